//! Page-locked host memory of callers, from which the device copies by itself.
//!
//! ```text
//! held by its owner --upload--> a fence behind the copy --passed--> may be written again
//!      |                                                               ^
//!      '--dropped--> spare: whoever asks for as many bytes has it when the fence is passed
//! ```
//! Invariant: nothing is written or freed before the device has passed the fence behind the last copy from it; a wait for that has a
//! deadline. On a lost device it stays.

use super::calls::Driver;
use super::device::Device;
use super::pages::{Block, Copies, MOST_SPARE_BYTES, Pages};
use super::ring::Slot;
use crate::error::{Error, Result};

impl Device {
    /// So many bytes, above zero, with whatever was there; [`Device::give_pages_back`] ends them. `admit` is asked if they are new.
    pub(crate) fn take_pages(&self, bytes: usize, admit: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.check("page-locked memory")?;
        if self.rehearses() {
            return Err(Error::misuse("page-locked memory", "a device", "the rehearsal of one, which has no memory"));
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

    /// The first spare block of so many bytes, if nothing has still to be copied from it.
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
        // Unless another thread has taken it meanwhile.
        let at = first(&pages).filter(|&at| pages.spare[at].slot.fence() == fence);
        Ok(at.map(|at| Block { copies: Copies::None, ..pages.spare.remove(at) }))
    }

    /// Waits until nothing has still to be copied from the block at an address.
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

    /// Keeps a block for whoever asks for as many bytes, or frees it.
    ///
    /// # Safety
    /// Nobody reads or writes it any more, but for copies that are queued.
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
        // SAFETY: they are this device's, and nobody has them any more; copies from them are queued at most.
        freed.into_iter().for_each(|block| unsafe { self.retire(block.retired()) });
    }

    /// Queues a copy of bytes that lie in page-locked memory of this device, straight from there. Returns whether they do.
    ///
    /// # Safety
    /// As for [`Device::stage`].
    pub(super) unsafe fn copy_from_pages(&self, to: u64, transit: Option<u64>, from: &[u8]) -> Result<bool> {
        let Some(Block { slot, .. }) = self.pages().around(from).copied() else { return Ok(false) };
        let (fence, address, bytes) = (slot.fence(), from.as_ptr() as u64, from.len());
        let queued = self.call("upload", self.deadline(), move |driver: &dyn Driver| {
            // SAFETY: `to` and `transit` are as this function asks. The source is so many bytes of page-locked memory: it is borrowed until
            // this function returns, and then neither written nor freed before the fence is passed.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(address as *const u8, bytes), transit) }?;
            driver.record_fence(fence)
        });
        if let Some(block) = self.pages().around(from) {
            // What is unknown stays so when another thread's copy is queued.
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

    /// Nothing of the memory is touched, so it is nobody's.
    #[test]
    fn no_more_is_kept_than_said_and_the_oldest_goes_first() {
        let plan = FaultPlan::new();
        let device = Device::builder(DeviceKind::Emulated).faults(plan.clone()).open().unwrap();
        let third = MOST_SPARE_BYTES / 3;
        let blocks = [0, 1, 2, 3].map(|number| (device.take_pages(third + number, || Ok(())).unwrap(), number));
        for (given_back, (address, _)) in (1..).zip(blocks) {
            // SAFETY: nobody has touched it.
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
