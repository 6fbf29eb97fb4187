//! Where results of the device land on the host while it goes on: words of page-locked memory.
//!
//! Invariant: a word is read only when the device has passed the fence behind its copy, and the memory goes back only when no copy to
//! it can be queued. On a lost device it stays.

use super::device::Device;
use super::staging::Slot;
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

    /// Queues a copy of a word on the device.
    ///
    /// # Safety
    /// `from` is device memory of at least 4 bytes.
    ///
    /// # Panics
    /// When there is no room.
    pub(crate) unsafe fn queue(&mut self, from: u64) -> Result<()> {
        assert!(self.filled < self.words, "a landing of {} words is full", self.words);
        let to = self.slot.address() + (self.filled * size_of::<u32>()) as u64;
        self.filled += 1;
        // SAFETY: the source by the caller's promise; the word is page-locked memory of our own, and read behind the fence.
        self.device.direct("queue_download", |driver| unsafe { driver.queue_download(from, to, size_of::<u32>()) })
    }

    /// Puts the fence behind the copies.
    pub(crate) fn seal(&mut self) -> Result<()> {
        self.device.direct("record_fence", |driver| driver.record_fence(self.slot.fence()))
    }

    /// Waits for the copies, and returns the words as numbers.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) at the deadline; the device is lost then.
    pub(crate) fn wait(&self, deadline: Duration) -> Result<Vec<f32>> {
        self.device.wait("download", deadline, |driver| driver.poll_fence(self.slot.fence()))?;
        // SAFETY: so many words of the slot were copied to, and the device has passed the fence behind the copies.
        let words = unsafe { std::slice::from_raw_parts(self.slot.address() as *const f32, self.filled) };
        Ok(words.to_vec())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // A copy may still be queued, if what it belongs to has failed.
        let done = self.device.synchronize(self.device.deadline());
        let (slot, bytes) = (self.slot, self.words * size_of::<u32>());
        let ended = done.and_then(|()| {
            // SAFETY: all copies are done, and the landing ends here.
            self.device.bounded("free_pinned", self.device.deadline(), move |driver| unsafe { slot.end(driver, bytes) })
        });
        if let Err(error) = ended {
            tracing::warn!(%error, "page-locked memory was not freed");
        }
    }
}
