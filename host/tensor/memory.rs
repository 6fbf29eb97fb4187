//! Device memory by address and length: what tensors and kernels' arguments are made of.
//!
//! Invariant: whoever makes a [`Memory`] says that it is memory, and for how long; nothing here asks a device. Memory is made of words of
//! 4 bytes, whatever the elements are: a device hands it out in multiples of 256 bytes, from multiples of 256 on.
//!
//! ```text
//! words              |   0   |   1   |   2   |   3   | ..
//! BF16               | 0 | 1 | 2 | 3 | 4 | 5 | 6 |   |          7 elements: the last word has room behind them
//! part(1, 4)             |   1 2   3   4 |                      its words are 0, 1 and 2
//! ```

use bytemuck::Pod;
use cuda_std::launch::{PointerMut, Slice};
use std::fmt;
use std::marker::PhantomData;

/// Device memory by address and length: valid for as long as the value that holds it.
pub struct Memory<T> {
    owner: u64,
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

impl<T: Pod> Memory<T> {
    /// Memory that the caller owns.
    ///
    /// # Safety
    /// `len` elements at `address`, and the rest of the words that they begin and end in, are memory of this owner: of a device's buffers
    /// or of an arena's steps. They are aligned for `T`, for as long as any holder of this value
    /// lives.
    pub(crate) unsafe fn new(owner: u64, address: u64, len: usize) -> Self {
        Self { owner, address, len, element: PhantomData }
    }

    /// Its owner's number, its address and its length.
    pub(super) fn parts(self) -> (u64, u64, usize) {
        (self.owner, self.address, self.len)
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    /// Returns true for memory of this owner.
    pub(crate) fn is_of(self, owner: u64) -> bool {
        self.owner == owner
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// A kernel's `&[T]`, for callers that hold what keeps the memory alive.
    pub(crate) fn as_slice(&self) -> Slice<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { Slice::new(self.owner, self.address, self.len) }
    }

    /// A kernel's `*mut T`, for callers that hold the memory alone.
    pub(crate) fn as_out(&self) -> PointerMut<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { PointerMut::new(self.owner, self.address, self.len) }
    }

    /// Bytes of all elements.
    fn byte_len(self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same memory as elements of another type.
    ///
    /// # Panics
    /// When it is not whole elements of that type, on a boundary of theirs.
    pub(crate) fn cast<U: Pod>(self) -> Memory<U> {
        let (bytes, size, align) = (self.byte_len(), size_of::<U>(), align_of::<U>());
        let whole = bytes.is_multiple_of(size) && self.address.is_multiple_of(align as u64);
        assert!(whole, "{bytes} bytes at {:#x} as elements of {size}, on multiples of {align}", self.address);
        Memory { owner: self.owner, address: self.address, len: bytes / size, element: PhantomData }
    }

    /// The same memory, whatever its elements are.
    pub(crate) fn bytes(self) -> Memory<u8> {
        self.cast()
    }

    /// The whole words that it lies in: the first may begin before it, and the last end behind it.
    pub(crate) fn words(self) -> Memory<u32> {
        const WORD: u64 = size_of::<u32>() as u64;
        let start = self.address - self.address % WORD;
        let end = (self.address + self.byte_len() as u64).next_multiple_of(WORD);
        Memory { owner: self.owner, address: start, len: ((end - start) / WORD) as usize, element: PhantomData }
    }

    /// The part of `len` elements from `start` on.
    ///
    /// # Panics
    /// When it is not inside.
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "{len} elements at {start} of {}", self.len);
        Self { owner: self.owner, address: self.address + (start * size_of::<T>()) as u64, len, element: PhantomData }
    }
}
