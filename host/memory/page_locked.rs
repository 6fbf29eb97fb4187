//! Host memory that the device copies from by itself.
//!
//! What it does not do: it is no memory that kernels read, and it makes nothing faster that the host has to wait for anyway. An upload from it
//! costs the host no copy, so batches belong here that a thread prepares while the device works. Invariant: the memory changes only by
//! [`PageLocked::write`], which waits for the copies from it that are queued.

use super::situation::admit_on_host;
use crate::driver::Device;
use crate::error::{Error, Result};
use crate::tensor::Element;
use std::marker::PhantomData;
use std::ops::Deref;

/// `len` elements in page-locked host memory of one device. It dereferences to a slice: [`Eager::upload`](crate::Eager::upload) of it, or of a part, to
/// that device, and a replay's input ([`Inputs`](crate::Inputs)), copy nothing on the host.
///
/// When it is dropped its memory goes to whoever asks for as many bytes next; the device keeps up to 512 MiB for that.
///
/// ```
/// use stepscope::{Arena, Capacity, Device, DeviceKind, PageLocked};
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
    element: PhantomData<T>,
}

impl<T: Element> PageLocked<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::Refused`] for a MiB or more that the host does not have; [`Error::DeviceMemory`] and [`Error::Driver`] when the driver has
    /// none; [`Error::Misuse`] for no elements, and on a device that is only measured or records a step on this thread.
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            let expected = "at least one element, and bytes that fit an address";
            return Err(Error::misuse("page-locked memory", expected, len.to_string()));
        };
        let address = device.take_pages(bytes, || admit_on_host(device, bytes))?;
        // SAFETY: so many bytes of page-locked memory, which were just taken and nobody else has: nothing is copied from them any more.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(Self { device: device.clone(), address, len, element: PhantomData })
    }

    /// The elements, to be changed, when the device has made all copies from them that are queued.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the device's deadline, and [`Error::DeviceLost`] when a copy is queued that will not be made.
    pub fn write(&mut self) -> Result<&mut [T]> {
        self.device.wait_for_pages(self.address)?;
        // SAFETY: `zeros` took and wrote so many elements, at an address that is a multiple of 256; nothing is copied from them, and this borrow
        // keeps others from them.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) })
    }
}

impl<T: Element> Deref for PageLocked<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeros` took and wrote so many elements, at an address that is a multiple of 256; who writes them borrows all.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) }
    }
}

impl<T: Element> Drop for PageLocked<T> {
    fn drop(&mut self) {
        // SAFETY: `zeros` took it, and no borrow of it is left; copies from it are queued at most.
        unsafe { self.device.give_pages_back(self.address) };
    }
}
