//! Pinned host memory of callers, from which the device copies by itself.
//!
//! ```text
//! held by its owner --upload--> a fence after the copy --passed--> may be written again
//!      |                                                              ^
//!      '--dropped--> spare: reused for the same size after the fence is passed
//! ```
//! Invariant: memory is written or freed only after the device has passed the fence after the last
//! copy from it. Each wait for that has a deadline. On a lost device the memory stays.

use super::calls::Driver;
use super::handle::Device;
use super::pages::{Block, Copies, MOST_SPARE_BYTES, Pages};
use super::ring::Slot;
use crate::error::{Error, Result};

impl Device {
    /// Returns `bytes` bytes (above zero) with unspecified contents. [`Device::give_pages_back`]
    /// frees them. `admit` is called if they are newly allocated.
    pub(crate) fn take_pages(&self, bytes: usize, admit: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.check("page-locked memory")?;
        if self.is_dry_run() {
            return Err(Error::misuse("page-locked memory", "a device", "a dry run, which has no memory"));
        }
        let block = match self.spare_pages(bytes)? {
            Some(spare) => spare,
            None => {
                admit()?;
                Block { slot: Slot::new(self, bytes, self.deadline())?, bytes, copies: Copies::None }
            }
        };
        let address = block.slot.address();
        self.pages().held.insert(address, block);
        Ok(address)
    }

    /// Takes the first spare block of this size, if no copy from it is pending.
    fn spare_pages(&self, bytes: usize) -> Result<Option<Block>> {
        let first = |pages: &Pages| pages.spare.iter().position(|block| block.bytes == bytes);
        let fence = {
            let pages = self.pages();
            first(&pages).map(|at| pages.spare[at].slot.fence())
        };
        let Some(fence) = fence else { return Ok(None) };
        if !self.call("poll_fence", self.deadline(), move |driver| driver.poll_fence(fence))? {
            return Ok(None);
        }
        let mut pages = self.pages();
        // Another thread may have taken it meanwhile.
        let at = first(&pages).filter(|&at| pages.spare[at].slot.fence() == fence);
        Ok(at.map(|at| Block { copies: Copies::None, ..pages.spare.remove(at) }))
    }

    /// Waits until no copy from the block at an address is pending.
    pub(crate) fn wait_for_pages(&self, address: u64) -> Result<()> {
        let Some(Block { slot, copies, .. }) = self.pages().held.get(&address).copied() else { return Ok(()) };
        let fence = slot.fence();
        match copies {
            Copies::None => return Ok(()),
            Copies::BeforeFence => self.wait("upload", self.deadline(), move |driver| driver.poll_fence(fence))?,
            Copies::Unknown => self.synchronize(self.deadline())?,
        }
        if let Some(block) = self.pages().held.get_mut(&address) {
            block.copies = Copies::None;
        }
        Ok(())
    }

    /// Keeps a block for the next request of the same size, or frees it.
    ///
    /// # Safety
    /// Nothing reads or writes it any more except queued copies.
    pub(crate) unsafe fn give_pages_back(&self, address: u64) {
        let freed = {
            let mut pages = self.pages();
            let Some(block) = pages.held.remove(&address) else { return };
            pages.spare.push(block);
            let mut kept_bytes = pages.spare.iter().map(|block| block.bytes).sum::<usize>();
            let is_freed = |block: &mut Block| {
                let is_freed = kept_bytes > MOST_SPARE_BYTES || block.copies == Copies::Unknown;
                kept_bytes -= if is_freed { block.bytes } else { 0 };
                is_freed
            };
            pages.spare.extract_if(.., is_freed).collect::<Vec<_>>()
        };
        // SAFETY: the blocks belong to this device, and nothing owns them any more. At most copies
        // from them are queued.
        freed.into_iter().for_each(|block| unsafe { self.retire(block.retired()) });
    }

    /// Queues a copy directly from pinned memory of this device. Returns false if the bytes do not
    /// lie in such memory.
    ///
    /// # Safety
    /// The requirements of [`Device::stage`].
    pub(super) unsafe fn copy_from_pages(&self, to: u64, transit: Option<u64>, from: &[u8]) -> Result<bool> {
        let Some(Block { slot, .. }) = self.pages().around(from).copied() else { return Ok(false) };
        let (fence, address, bytes) = (slot.fence(), from.as_ptr() as u64, from.len());
        let queued = self.call("upload", self.deadline(), move |driver: &dyn Driver| {
            // SAFETY: `to` and `transit` meet this function's requirements. The source lies in
            // pinned memory. It is borrowed until this function returns, and then neither written
            // nor freed before the fence is passed.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(address as *const u8, bytes), transit) }?;
            driver.record_fence(fence)
        });
        if let Some(block) = self.pages().around(from) {
            // An unknown state stays unknown even when another thread's copy is queued.
            let unknown = queued.is_err() || block.copies == Copies::Unknown;
            block.copies = if unknown { Copies::Unknown } else { Copies::BeforeFence };
        }
        queued.map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::description::DeviceKind;
    use super::super::faults::{Call, FaultPlan};
    use super::*;

    /// The test does not access the memory, so it needs no owner.
    #[test]
    fn spare_pages_are_limited() {
        let plan = FaultPlan::new();
        let device = Device::builder(DeviceKind::Emulated).faults(plan.clone()).open().unwrap();
        let third = MOST_SPARE_BYTES / 3;
        let blocks = [0, 1, 2, 3].map(|number| (device.take_pages(third + number, || Ok(())).unwrap(), number));
        for (given_back, (address, _)) in (1..).zip(blocks) {
            // SAFETY: nothing has accessed it.
            unsafe { device.give_pages_back(address) };
            assert_eq!(plan.count(Call::FreePinned), if given_back < 3 { 0 } else { given_back - 2 }, "{given_back}");
        }
        for (_, number) in blocks {
            let made = plan.count(Call::AllocatePinned);
            let admit = || if number < 2 { Ok(()) } else { panic!("{number} was kept") };
            device.take_pages(third + number, admit).unwrap();
            assert_eq!(plan.count(Call::AllocatePinned), made + u64::from(number < 2));
        }
    }
}
