//! Pinned host memory: a slot with its fence, the pages of callers, and the readback of results.
//!
//! A page is pinned memory that its owner fills, and that the device copies from directly:
//!
//! ```text
//! held by its owner --upload--> a fence after the copy --passed--> lent for writing
//!      |        ^                                                     |
//!      |        '------------------------- borrowed for reading ------'
//!      '--dropped--> spare: reused for the same size after the fence is passed
//! ```
//! While a block is lent, its writer may change what it uploads as soon as the call returns. The
//! bytes then pass through the staging ring.
//!
//! A readback copies results into words of pinned memory, each of which holds an f32:
//!
//! ```text
//! word    | 0 1 2 3 |
//! f32     | 0 1 2 3 |
//! BF16    | . . 0 1 |     the upper half of the same number's f32; the lower half is zero
//! ```
//! Invariants:
//!
//! - Pinned memory is read, written again or freed only after the device has passed the fence after
//!   its last copy. On a lost device it stays.
//! - A slot's memory and its fence have the same lifetime. A block of pages is held or spare.
//! - No copy is queued directly from a block that is lent for writing.
//! - A word of a readback is read, and written again, only after the fence after its copy.

use super::Device;
use super::driver::{Driver, Fence};
use super::memory::DeferredFree;
use crate::error::{Error, Result};
use crate::tensor::{Memory, Stored};
use std::collections::BTreeMap;
use std::time::Duration;

/// A slot of pinned memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    address: u64,
    fence: Fence,
    /// The number of bytes from the start that are in use.
    pub(super) filled: usize,
}

impl Slot {
    pub(super) fn new(device: &Device, bytes: usize, deadline: Duration) -> Result<Self> {
        device.call("allocate_pinned", deadline, move |driver| {
            let fence = driver.create_fence()?;
            let address = driver.allocate_pinned(bytes).inspect_err(|_| {
                // SAFETY: the fence was just made. Leaking it is the lesser harm.
                let _ = unsafe { driver.destroy_fence(fence) };
            })?;
            Ok(Self { address, fence, filled: 0 })
        })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn fence(&self) -> Fence {
        self.fence
    }

    /// Frees the memory and its fence.
    ///
    /// # Safety
    /// The slot was made with `bytes` bytes, no copy from or to it is queued, and it is not used
    /// afterwards.
    pub(super) unsafe fn end(self, driver: &dyn Driver, bytes: usize) -> Result<()> {
        // SAFETY: no copy is queued and nothing uses the slot afterwards, by this function's
        // contract. `Slot::new` made both.
        unsafe { driver.destroy_fence(self.fence).and(driver.free_pinned(self.address, bytes)) }
    }
}

/// The most bytes that are kept for later requests. Beyond this, the block that was returned first
/// is freed.
const MOST_SPARE_BYTES: usize = 512 << 20;

/// The copies from a block that the device may still have to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    None,
    /// All copies come before the block's fence.
    BeforeFence,
    /// The call that would have reported the state failed.
    Unknown,
}

/// A block of pinned memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    slot: Slot,
    bytes: usize,
    copies: Copies,
    /// True while a mutable borrow of the memory may be alive.
    lent: bool,
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The held blocks, by address.
    held: BTreeMap<u64, Block>,
    /// The spare blocks, in the order in which they were returned.
    spare: Vec<Block>,
}

impl Pages {
    /// Returns the block that contains these bytes. Zero bytes are in no block, because another
    /// block may begin at their end.
    fn around(&mut self, bytes: &[u8]) -> Option<&mut Block> {
        let start = bytes.first().map(std::ptr::from_ref)? as u64;
        let (&address, block) = self.held.range_mut(..=start).next_back()?;
        let end = (start - address).checked_add(bytes.len() as u64)?;
        (end <= block.bytes as u64).then_some(block)
    }

    /// Returns all blocks for freeing. All held blocks must have been returned before.
    pub(super) fn into_deferred(self) -> impl Iterator<Item = DeferredFree> {
        self.spare.into_iter().map(Block::deferred)
    }
}

impl Block {
    fn deferred(self) -> DeferredFree {
        DeferredFree::Slot { slot: self.slot, bytes: self.bytes }
    }
}

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
                Block { slot: Slot::new(self, bytes, self.deadline())?, bytes, copies: Copies::None, lent: false }
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
        Ok(at.map(|at| Block { copies: Copies::None, lent: false, ..pages.spare.remove(at) }))
    }

    /// Waits until no copy from the block at an address is pending, and marks the block as lent for
    /// writing. Until [`Device::reclaim_pages`], uploads from it are staged.
    pub(crate) fn lend_pages(&self, address: u64) -> Result<()> {
        let Some(Block { slot, copies, .. }) = self.pages().held.get(&address).copied() else { return Ok(()) };
        let fence = slot.fence();
        match copies {
            Copies::None => {}
            Copies::BeforeFence => self.wait("upload", self.deadline(), move |driver| driver.poll_fence(fence))?,
            Copies::Unknown => self.synchronize(self.deadline())?,
        }
        if let Some(block) = self.pages().held.get_mut(&address) {
            (block.copies, block.lent) = (Copies::None, true);
        }
        Ok(())
    }

    /// Ends the lending of a block for writing.
    ///
    /// # Safety
    /// No mutable borrow of the block is alive. Until the next [`Device::lend_pages`] nothing
    /// writes it.
    pub(crate) unsafe fn reclaim_pages(&self, address: u64) {
        if let Some(block) = self.pages().held.get_mut(&address) {
            block.lent = false;
        }
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
        freed.into_iter().for_each(|block| unsafe { self.retire(block.deferred()) });
    }

    /// Queues a copy directly from pinned memory of this device. Returns false if the bytes do not
    /// lie in such memory, or lie in a block that is lent for writing.
    ///
    /// # Safety
    /// The requirements of [`Device::stage`].
    pub(super) unsafe fn copy_from_pages(&self, to: u64, bounce: Option<u64>, from: &[u8]) -> Result<bool> {
        let Some(Block { slot, lent: false, .. }) = self.pages().around(from).copied() else { return Ok(false) };
        let (fence, address, bytes) = (slot.fence(), from.as_ptr() as u64, from.len());
        let queued = self.call("upload", self.deadline(), move |driver: &dyn Driver| {
            // SAFETY: `to` and `bounce` meet this function's requirements. The source lies in
            // pinned memory, and is borrowed until this function returns. The block was not lent
            // while it was borrowed, so the source is no part of a mutable borrow that could write
            // it afterwards. The next mutable borrow begins with `lend_pages`, and the memory is
            // freed by `retire`. Both wait for the fence.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(address as *const u8, bytes), bounce) }?;
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

/// The words for the results of one piece of work. Copies to them are queued in order, then the
/// readback is sealed and waited for. Then it is empty again.
#[derive(Debug)]
pub struct PinnedReadback {
    device: Device,
    slot: Slot,
    words: usize,
    /// The number of words from the start that are in use.
    filled: usize,
    /// True if the fence comes after all copies to the words.
    sealed: bool,
}

impl PinnedReadback {
    /// Allocates `words` words.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no words, and for more than the address space has.
    pub fn new(device: &Device, words: usize) -> Result<Self> {
        let bytes = words.checked_mul(size_of::<u32>()).filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            return misuse("at least one word, and a size that fits the address space", format!("{words} words"));
        };
        let slot = Slot::new(device, bytes, device.deadline())?;
        Ok(Self { device: device.clone(), slot, words, filled: 0, sealed: false })
    }

    /// Returns the capacity in words.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Queues a copy of an element of this owner's memory to the next word. Its size distinguishes
    /// f32 from BF16.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the readback is full or sealed, and unless the memory is one element of
    /// the readback's device. Otherwise the device's.
    pub(crate) fn queue<S: Stored>(&mut self, owner: u64, from: Memory<S>) -> Result<()> {
        if self.sealed {
            return misuse("results before `seal`, or after `wait`", "a result between `seal` and `wait`");
        }
        if self.filled == self.words {
            return misuse("a free word", format!("all {} words in use", self.words));
        }
        if from.len() != 1 {
            return misuse("a result of one element", format!("{} elements", from.len()));
        }
        if !self.device.reaches(owner) {
            return misuse("a result on the readback's device", "a result on another device or in a dry run");
        }
        let (from, bytes) = (from.address(), size_of::<S>());
        let word = self.slot.address() + (self.filled * size_of::<u32>()) as u64;
        let to = word + size_of::<u32>().checked_sub(bytes).expect("an element fits a word") as u64;
        self.filled += 1;
        // SAFETY: this word belongs to our own pinned slot, which has room for `words` words. No
        // copy to it is queued, because `wait` has waited for all earlier ones.
        unsafe { (word as *mut u32).write(0) };
        let queue = move |driver: &dyn Driver| {
            // SAFETY: `from` is one element of this device by the type of `Memory` and the check
            // above. `to` is the end of a word of our own pinned slot, and is read only after the
            // fence.
            unsafe { driver.queue_download(from, to, bytes) }
        };
        self.device.call("queue_download", self.device.deadline(), queue)
    }

    /// Records the fence after the copies.
    ///
    /// # Errors
    /// The device's, when the fence cannot be recorded.
    pub fn seal(&mut self) -> Result<()> {
        let fence = self.slot.fence();
        self.device.call("record_fence", self.device.deadline(), move |driver| driver.record_fence(fence))?;
        self.sealed = true;
        Ok(())
    }

    /// Waits for the copies, and takes the words as numbers.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, which also loses the device. [`Error::Misuse`] if the
    /// readback is not sealed.
    pub fn wait(&mut self, deadline: Duration) -> Result<Vec<f32>> {
        if !self.sealed {
            return misuse("`wait` after `seal`", "no `seal` since the last result");
        }
        let fence = self.slot.fence();
        self.device.wait("download", deadline, move |driver| driver.poll_fence(fence))?;
        // SAFETY: `filled` words of the slot were copied to. `seal` recorded the fence after those
        // copies, and the device has passed it.
        let words = unsafe { std::slice::from_raw_parts(self.slot.address() as *const f32, self.filled) };
        let words = words.to_vec();
        (self.filled, self.sealed) = (0, false);
        Ok(words)
    }
}

fn misuse<R>(expected: &str, got: impl Into<String>) -> Result<R> {
    Err(Error::misuse("readback", expected, got))
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
    use crate::buffer::Buffer;
    use crate::device::DeviceKind;
    use half::bf16;

    /// Runs twice, so that the second time each word holds the bits of the other type.
    #[test]
    fn readbacks_of_both_types_keep_order() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let halves = Buffer::from_slice(&device, &[bf16::from_f32(1.5), bf16::from_f32(-3.0)]).unwrap();
        let words = Buffer::from_slice(&device, &[0.1f32, -f32::MIN_POSITIVE]).unwrap();
        let mut readback = PinnedReadback::new(&device, 4).unwrap();
        for round in 0..2 {
            for place in 0..2 {
                let (half, word) = (halves.memory().part(place, 1), words.memory().part(place, 1));
                let queued = if round == 0 {
                    readback.queue(half.owner(), half).and_then(|()| readback.queue(word.owner(), word))
                } else {
                    readback.queue(word.owner(), word).and_then(|()| readback.queue(half.owner(), half))
                };
                queued.unwrap();
            }
            readback.seal().unwrap();
            let got = readback.wait(device.deadline()).unwrap();
            let pairs = [[1.5, 0.1], [-3.0, -f32::MIN_POSITIVE]];
            let expected = pairs.map(|[half, word]| if round == 0 { [half, word] } else { [word, half] });
            assert_eq!(got, expected.as_flattened(), "{round}");
        }
    }

    #[test]
    fn misused_readbacks_are_refused() {
        let [device, other] = [0, 1].map(|_| Device::open(DeviceKind::Emulated).unwrap());
        for words in [0, usize::MAX, 1 << 62, (1 << 62) + 1, isize::MAX as usize / 4 + 1] {
            let error = PinnedReadback::new(&device, words).unwrap_err().to_string();
            assert!(error.contains(&format!("at least one word, and a size that fits the address space, got {words}")));
        }
        let [own, theirs] = [&device, &other].map(|device| Buffer::from_slice(device, &[1.0f32, 2.0]).unwrap());
        let mut readback = PinnedReadback::new(&device, 1).unwrap();
        let mut refused = |memory: Memory<f32>, text: &str| {
            let error = readback.queue(memory.owner(), memory).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        refused(own.memory(), "a result of one element, got 2 elements");
        refused(own.memory().part(1, 0), "got 0 elements");
        refused(theirs.memory().part(0, 1), "a result on another device or in a dry run");
        readback.queue(device.identity(), own.memory().part(1, 1)).unwrap();
        let error = readback.queue(device.identity(), own.memory().part(0, 1)).unwrap_err().to_string();
        assert!(error.contains("a free word, got all 1 words in use"), "{error}");
        let error = readback.wait(device.deadline()).unwrap_err().to_string();
        assert!(error.contains("`wait` after `seal`, got no `seal` since the last result"), "{error}");
        readback.seal().unwrap();
        let error = readback.queue(device.identity(), own.memory().part(0, 1)).unwrap_err().to_string();
        assert!(
            error.contains("results before `seal`, or after `wait`, got a result between `seal` and `wait`"),
            "{error}"
        );
        for expected in [&[2.0][..], &[]] {
            assert_eq!(readback.wait(device.deadline()).unwrap(), expected);
            assert!(readback.wait(device.deadline()).is_err());
            readback.seal().unwrap();
        }
    }

    /// The test does not access the memory, so it needs no owner.
    #[test]
    fn spare_pages_are_limited() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let take = |number: usize, is_new: bool| {
            let mut admitted = false;
            let admit = || {
                admitted = true;
                Ok(())
            };
            let address = device.take_pages(MOST_SPARE_BYTES / 3 + number, admit).unwrap();
            assert_eq!(admitted, is_new, "{number}");
            address
        };
        let blocks = [0, 1, 2, 3].map(|number| take(number, true));
        for (given_back, address) in (1..).zip(blocks) {
            // SAFETY: nothing has accessed it.
            unsafe { device.give_pages_back(address) };
            assert_eq!(device.pages().spare.len(), 2.min(given_back), "{given_back}");
        }
        for number in 0..4 {
            take(number, number < 2);
        }
    }
}
