//! Pinned (page-locked) host memory that the device copies from by itself.
//!
//! Kernels do not read this memory, and it speeds up nothing that the host waits for anyway. An
//! upload from it needs no copy on the host. Use it for batches that a thread prepares while the
//! device works.
//!
//! Invariant: the memory changes only through the mutable borrow of [`PageLocked::write`], which
//! waits for the queued copies from it. While such a borrow may be alive, no copy is queued from
//! the memory. An upload then copies the bytes before it returns.

use super::Device;
use crate::error::{Error, Result};
use crate::tensor::Element;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pinned host memory of one device with `len` elements. It dereferences to a slice. Two uses of
/// the slice, or of a part of it, copy nothing on the host: an
/// [`EagerStep::upload`](crate::EagerStep::upload) to that device, and a replay's input
/// ([`HostInputs`](crate::HostInputs)). An upload of what [`PageLocked::write`] returned is copied on
/// the host, because it may be written again at once.
///
/// Dropped memory is reused by the next request for the same number of bytes. The device keeps up
/// to 512 MiB for this purpose.
///
/// ```
/// use stepscope::memory::PageLocked;
/// use stepscope::{Arena, Capacity, Device, DeviceKind};
///
/// let device = Device::open(DeviceKind::Emulated)?;
/// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let mut batch = PageLocked::zeros(&device, 4)?;
/// for number in 0..3u32 {
///     // Waits until the device has copied the batch before.
///     batch.write()?.fill(number);
///     let read = arena.step(|step| step.read(&step.upload(&batch, [2, 2])?))?;
///     assert_eq!(read, [number; 4]);
/// }
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Debug)]
pub struct PageLocked<T: Element> {
    device: Device,
    address: u64,
    len: usize,
    /// True from [`PageLocked::write`] until the next shared borrow.
    lent: AtomicBool,
    element: PhantomData<T>,
}

impl<T: Element> PageLocked<T> {
    /// Allocates `len` zeros.
    ///
    /// # Errors
    /// [`Error::Refused`] if a MiB or more is requested and the host does not have it.
    /// [`Error::DeviceMemory`] and [`Error::Driver`] if the driver is out of pinned memory.
    /// [`Error::Misuse`] if `len` is zero, or if the device is a dry run or records a step on this
    /// thread.
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            let expected = "at least one element, and a size that fits the address space";
            return Err(Error::misuse("page-locked memory", expected, len.to_string()));
        };
        let address = device.take_pages(bytes, || device.admit_on_host(bytes))?;
        // SAFETY: these bytes of pinned memory were just taken, and nothing else uses them. No copy
        // from them is queued any more.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(Self { device: device.clone(), address, len, lent: AtomicBool::new(false), element: PhantomData })
    }

    /// Returns the elements for writing, after the device has made all queued copies from them.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the device's deadline. [`Error::DeviceLost`] if a queued copy will
    /// not be made.
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.device.lend_pages(self.address)?;
        *self.lent.get_mut() = true;
        // SAFETY: `zeros` took and wrote `len` elements, at an address that is a multiple of 256.
        // No copy from them is queued, and this mutable borrow excludes all others. Until it has
        // ended, no copy is queued from them either: only `deref` ends the lending.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) })
    }
}

impl<T: Element> Deref for PageLocked<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // Several threads may do this at the same time. None of them returns before the block is
        // reclaimed, or it finds the mark that another thread has set after that.
        if self.lent.load(Ordering::Acquire) {
            // SAFETY: `write` borrows `self` mutably for as long as anything derived from its
            // result lives, so none of that is alive next to this shared borrow. Only `write` makes
            // another, after `lend_pages`.
            unsafe { self.device.reclaim_pages(self.address) };
            self.lent.store(false, Ordering::Release);
        }
        // SAFETY: `zeros` took and wrote `len` elements, at an address that is a multiple of 256.
        // Writing requires a mutable borrow of all of them.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) }
    }
}

impl<T: Element> Drop for PageLocked<T> {
    fn drop(&mut self) {
        // SAFETY: `zeros` took this memory, and no borrow of it is left. At most copies from it are
        // queued.
        unsafe { self.device.give_pages_back(self.address) };
    }
}
