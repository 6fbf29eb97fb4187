//! Where results of the device land on the host while it goes on: words of page-locked memory, each an f32.
//!
//! ```text
//! word    | 0 1 2 3 |
//! f32     | 0 1 2 3 |
//! BF16    | . . 0 1 |     the upper half of the same number's f32; the lower half is zero
//! ```
//! Invariant: a word is read only when the device has passed the fence behind its copy, and the memory goes back only when no copy to
//! it can be queued. On a lost device it stays.

use super::calls::Driver;
use super::device::Device;
use super::retired::Retired;
use super::ring::Slot;
use crate::error::Result;
use std::time::Duration;

/// Words for the results of one piece of work. Copies to it are queued in order, then it is sealed and waited for.
#[derive(Debug)]
pub(crate) struct Landing {
    device: Device,
    slot: Slot,
    words: usize,
    /// Words from the start that are in use.
    filled: usize,
}

impl Landing {
    /// Room for so many words, above zero.
    pub(crate) fn new(device: &Device, words: usize) -> Result<Self> {
        let slot = Slot::new(device, words * size_of::<u32>(), device.deadline())?;
        Ok(Self { device: device.clone(), slot, words, filled: 0 })
    }

    /// The words that it has room for.
    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// Forgets what it holds, which has been waited for.
    pub(crate) fn clear(&mut self) {
        self.filled = 0;
    }

    /// Queues a copy of a number on the device: of f32, or of BF16 by its size.
    ///
    /// # Safety
    /// `from` is device memory of at least `bytes` bytes.
    ///
    /// # Panics
    /// When there is no room, or a number has more bytes than a word.
    pub(crate) unsafe fn queue(&mut self, from: u64, bytes: usize) -> Result<()> {
        assert!(self.filled < self.words, "a landing of {} words is full", self.words);
        let word = self.slot.address() + (self.filled * size_of::<u32>()) as u64;
        let to = word + size_of::<u32>().checked_sub(bytes).expect("a number fits a word") as u64;
        self.filled += 1;
        // SAFETY: a word of our own page-locked slot; no copy to it is queued, since `clear` is called when all were waited for.
        unsafe { (word as *mut u32).write(0) };
        let queue = move |driver: &dyn Driver| {
            // SAFETY: `from` is so many bytes of device memory, as this function asks; `to` is the end of a word of our own page-locked
            // slot, read behind the fence alone.
            unsafe { driver.queue_download(from, to, bytes) }
        };
        self.device.call("queue_download", self.device.deadline(), queue)
    }

    /// Puts the fence behind the copies.
    pub(crate) fn seal(&mut self) -> Result<()> {
        let fence = self.slot.fence();
        self.device.call("record_fence", self.device.deadline(), move |driver| driver.record_fence(fence))
    }

    /// Waits for the copies, and returns the words as numbers.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) at the deadline; the device is lost then.
    pub(crate) fn wait(&self, deadline: Duration) -> Result<Vec<f32>> {
        let fence = self.slot.fence();
        self.device.wait("download", deadline, move |driver| driver.poll_fence(fence))?;
        // SAFETY: so many words of the slot were copied to, and the device has passed the fence behind the copies.
        let words = unsafe { std::slice::from_raw_parts(self.slot.address() as *const f32, self.filled) };
        Ok(words.to_vec())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let (slot, bytes) = (self.slot, self.words * size_of::<u32>());
        // SAFETY: the slot is this device's, of so many bytes, and nobody reads it after this; copies to it are queued at most.
        unsafe { self.device.retire(Retired::Slot { slot, bytes }) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DeviceKind;
    use crate::memory::Buffer;
    use half::bf16;

    /// Twice, so that the second time each word has the other type's bits before.
    #[test]
    fn numbers_of_either_type_land_in_order() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let halves = Buffer::from_slice(&device, &[bf16::from_f32(1.5), bf16::from_f32(-3.0)]).unwrap();
        let words = Buffer::from_slice(&device, &[0.1f32, -f32::MIN_POSITIVE]).unwrap();
        let mut landing = Landing::new(&device, 4).unwrap();
        for round in 0..2 {
            landing.clear();
            for place in 0..2 {
                let (half, word) = (halves.memory().part(place, 1), words.memory().part(place, 1));
                let landed = if round == 0 {
                    half.land(&mut landing).and_then(|()| word.land(&mut landing))
                } else {
                    word.land(&mut landing).and_then(|()| half.land(&mut landing))
                };
                landed.unwrap();
            }
            landing.seal().unwrap();
            let got = landing.wait(device.deadline()).unwrap();
            let pairs = [[1.5, 0.1], [-3.0, -f32::MIN_POSITIVE]];
            let expected = pairs.map(|[half, word]| if round == 0 { [half, word] } else { [word, half] });
            assert_eq!(got, expected.as_flattened(), "{round}");
        }
    }
}
