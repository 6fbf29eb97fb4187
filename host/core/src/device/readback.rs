//! Reads of device memory: blocking reads, and the asynchronous readback of results into words of
//! pinned host memory, each of which holds an f32.
//!
//! ```text
//! word    | 0 1 2 3 |
//! f32     | 0 1 2 3 |
//! BF16    | . . 0 1 |     the upper half of the same number's f32; the lower half is zero
//! ```
//! Invariant: a word is read only after the device has passed the fence after its copy. Memory that
//! is copied to is freed only when no copy to it can be queued. On a lost device it stays.

use super::driver::Driver;
use super::handle::Device;
use super::memory::DeferredFree;
use super::staging::Slot;
use crate::error::{Error, Result};
use crate::shortage::HostMemory;
use bytemuck::Pod;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

/// The read size above which the host's available memory is checked first.
const LARGE_READ_BYTES: usize = 64 << 20;

/// Returns the error for a read that the host has no memory for.
fn no_host_memory(requested_bytes: usize, free_bytes: u64) -> Error {
    let reason = "a read takes host memory of the same size: read one range at a time, or free some memory".into();
    Error::DeviceMemory { device: "the host".into(), requested_bytes, free_bytes, reason }
}

impl Device {
    /// Waits for the work queued before, until the deadline, and then copies.
    ///
    /// # Safety
    /// `from` is memory of this device, of at least `len` elements. It stays until the copy is done
    /// or the device is lost.
    pub(crate) unsafe fn download<T: Pod + Send>(&self, from: u64, len: usize, deadline: Duration) -> Result<Vec<T>> {
        let start = Instant::now();
        let bytes = len.saturating_mul(size_of::<T>());
        // The system grants memory that it does not have, and kills a process that writes to it.
        let available = (bytes >= LARGE_READ_BYTES).then(HostMemory::available_bytes);
        if let Some(available) = available.filter(|&available| bytes as u64 > available) {
            return Err(no_host_memory(bytes, available));
        }
        self.synchronize(deadline)?;
        self.call("download", deadline.saturating_sub(start.elapsed()), move |driver| {
            let zeros = bytemuck::allocation::try_zeroed_slice_box(len);
            let to = zeros.map_err(|()| no_host_memory(bytes, HostMemory::available_bytes()))?.into_vec();
            // After an error or a panic the copy may be in progress, so the memory stays.
            let mut to = ManuallyDrop::new(to);
            // SAFETY: `from` is device memory of `len` elements, which is this function's contract.
            // `to` has the same length and belongs to this call.
            unsafe { driver.download(from, bytemuck::cast_slice_mut(&mut to)) }?;
            Ok(ManuallyDrop::into_inner(to))
        })
    }
}

/// The words for the results of one piece of work. Copies to them are queued in order, then the
/// readback is sealed and waited for.
#[derive(Debug)]
pub struct PinnedReadback {
    device: Device,
    slot: Slot,
    words: usize,
    /// The number of words from the start that are in use.
    filled: usize,
}

impl PinnedReadback {
    /// Allocates `words` words (above zero).
    pub fn new(device: &Device, words: usize) -> Result<Self> {
        let slot = Slot::new(device, words * size_of::<u32>(), device.deadline())?;
        Ok(Self { device: device.clone(), slot, words, filled: 0 })
    }

    /// Returns the capacity in words.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Clears the results, which must have been waited for.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// Queues a copy of a number from the device. Its size in bytes distinguishes f32 from BF16.
    ///
    /// # Safety
    /// `from` is device memory of at least `bytes` bytes.
    ///
    /// # Panics
    /// Panics if it is full, or if a number has more bytes than a word.
    pub(crate) unsafe fn queue(&mut self, from: u64, bytes: usize) -> Result<()> {
        assert!(self.filled < self.words, "a readback of {} words is full", self.words);
        let word = self.slot.address() + (self.filled * size_of::<u32>()) as u64;
        let to = word + size_of::<u32>().checked_sub(bytes).expect("a number fits a word") as u64;
        self.filled += 1;
        // SAFETY: this word belongs to our own pinned slot. No copy to it is queued, because
        // `clear` is called only after all were waited for.
        unsafe { (word as *mut u32).write(0) };
        let queue = move |driver: &dyn Driver| {
            // SAFETY: `from` is device memory of `bytes` bytes, which is this function's contract.
            // `to` is the end of a word of our own pinned slot, and is read only after the fence.
            unsafe { driver.queue_download(from, to, bytes) }
        };
        self.device.call("queue_download", self.device.deadline(), queue)
    }

    /// Records the fence after the copies.
    pub fn seal(&mut self) -> Result<()> {
        let fence = self.slot.fence();
        self.device.call("record_fence", self.device.deadline(), move |driver| driver.record_fence(fence))
    }

    /// Waits for the copies, and returns the words as numbers.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, which also loses the device.
    pub fn wait(&self, deadline: Duration) -> Result<Vec<f32>> {
        let fence = self.slot.fence();
        self.device.wait("download", deadline, move |driver| driver.poll_fence(fence))?;
        // SAFETY: `filled` words of the slot were copied to, and the device has passed the fence
        // after the copies.
        let words = unsafe { std::slice::from_raw_parts(self.slot.address() as *const f32, self.filled) };
        Ok(words.to_vec())
    }
}

impl Drop for PinnedReadback {
    fn drop(&mut self) {
        let (slot, bytes) = (self.slot, self.words * size_of::<u32>());
        // SAFETY: the slot belongs to this device, has `bytes` bytes, and is not read after this.
        // At most copies to it are queued.
        unsafe { self.device.retire(DeferredFree::Slot { slot, bytes }) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Buffer;
    use crate::device::DeviceKind;
    use half::bf16;

    /// Runs twice, so that the second time each word holds the bits of the other type.
    #[test]
    fn readbacks_of_both_types_keep_order() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let halves = Buffer::from_slice(&device, &[bf16::from_f32(1.5), bf16::from_f32(-3.0)]).unwrap();
        let words = Buffer::from_slice(&device, &[0.1f32, -f32::MIN_POSITIVE]).unwrap();
        let mut landing = PinnedReadback::new(&device, 4).unwrap();
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
