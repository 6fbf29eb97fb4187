//! Memory that outlives steps: weights, gradients, moments, hyperparameters.
//!
//! Invariant: a buffer owns its memory, and no reset reaches it.

use crate::driver::Device;
use crate::error::{Error, Result};
use crate::tensor::Element;
use std::marker::PhantomData;

/// `len` elements of device memory, owned.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    device: Device,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// A buffer that holds a copy of `values`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room; [`Error::Misuse`] for no values.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        if values.is_empty() {
            return Err(Error::misuse("buffer", "at least one element", "none"));
        }
        let address = device.allocate(size_of_val(values))?;
        let mut buffer = Self { device: device.clone(), address, len: values.len(), element: PhantomData };
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// As for [`Buffer::from_slice`].
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        Self::from_slice(device, &vec![T::zeroed(); len])
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a buffer has at least one element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory this is.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Overwrites elements from `start` on, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they do not fit.
    pub fn write(&mut self, start: usize, values: &[T]) -> Result<()> {
        self.check("buffer.write", start, values.len())?;
        self.memory().part(start, values.len()).upload(&self.device, values, self.device.deadline())
    }

    /// Waits for the work queued before and returns all elements.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the device's deadline.
    pub fn read(&self) -> Result<Vec<T>> {
        self.read_range(0, self.len)
    }

    /// Waits for the work queued before and returns `len` elements from `start` on.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they do not exist; [`Error::Timeout`] after the device's deadline.
    pub fn read_range(&self, start: usize, len: usize) -> Result<Vec<T>> {
        self.check("buffer.read", start, len)?;
        self.memory().part(start, len).download(&self.device, self.device.deadline())
    }

    fn check(&self, op: &'static str, start: usize, len: usize) -> Result<()> {
        if start.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::misuse(op, format!("a range inside 0..{}", self.len), format!("{len} elements from {start} on")))
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: this is what `from_slice` allocated; the buffer owns it, and work that used it was queued before.
        unsafe { self.device.free(self.address, self.len * size_of::<T>()) };
    }
}
