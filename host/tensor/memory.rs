//! Device memory by address and length: what tensors and kernels' arguments are made of.
//!
//! Invariant: whoever makes a [`Memory`] says that it is memory, and for how long; nothing here asks a device.

use super::element::Element;
use cuda_std::launch::{PointerMut, Slice};
use std::fmt;
use std::marker::PhantomData;

/// Device memory by address and length: valid for as long as the value that holds it.
pub struct Memory<T> {
    device: u64,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Memory<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<T> {}

impl<T> fmt::Debug for Memory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}[{}]", self.address, self.len)
    }
}

impl<T: Element> Memory<T> {
    /// Memory that the caller owns.
    ///
    /// # Safety
    /// `len` elements at `address` are memory of the device of the identity `device`, aligned for `T`, for as long as any holder of
    /// this value lives.
    pub(crate) unsafe fn new(device: u64, address: u64, len: usize) -> Self {
        Self { device, address, len, element: PhantomData }
    }

    /// Its device's identity, its address and its length.
    pub(super) fn parts(self) -> (u64, u64, usize) {
        (self.device, self.address, self.len)
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// A kernel's `&[T]`, for callers that hold what keeps the memory alive.
    pub(crate) fn as_slice(&self) -> Slice<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { Slice::new(self.device, self.address, self.len) }
    }

    /// A kernel's `*mut T`, for callers that hold the memory alone.
    pub(crate) fn as_out(&self) -> PointerMut<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { PointerMut::new(self.device, self.address, self.len) }
    }

    /// The same memory as elements of another type of the same size.
    pub(crate) fn cast<U: Element>(self) -> Memory<U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
        Memory { device: self.device, address: self.address, len: self.len, element: PhantomData }
    }

    /// The part of `len` elements from `start` on.
    ///
    /// # Panics
    /// When it is not inside.
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "{len} elements at {start} of {}", self.len);
        Self { device: self.device, address: self.address + (start * size_of::<T>()) as u64, len, element: PhantomData }
    }
}
