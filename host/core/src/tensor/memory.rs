//! Device memory by address and length, from which tensors and kernel arguments are made.
//!
//! Invariant: the code that makes a [`Memory`] guarantees that it is memory, and for how long.
//! Nothing here asks a device. Memory consists of words of 4 bytes, whatever the elements are. A
//! device allocates multiples of 256 bytes, aligned to 256 bytes.
//!
//! ```text
//! words              |   0   |   1   |   2   |   3   | ..
//! BF16               | 0 | 1 | 2 | 3 | 4 | 5 | 6 |   |          7 elements and room for one
//! part(1, 4)             |   1 2   3   4 |                      its words: 0, 1 and 2
//! ```

use bytemuck::Pod;
use cuda_std::launch::{PointerMut, Slice};
use std::fmt;
use std::marker::PhantomData;

/// Device memory by address and length, valid for as long as the value that holds it.
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
    /// Describes memory that the caller owns.
    ///
    /// # Safety
    /// `len` elements at `address`, and the rest of the words in which they begin and end, are
    /// memory of this owner. The owner is a device, for its buffers, or an arena, for its steps.
    /// The elements are aligned for `T`. This holds for as long as any holder of this value lives.
    pub(crate) unsafe fn new(owner: u64, address: u64, len: usize) -> Self {
        Self { owner, address, len, element: PhantomData }
    }

    /// Its owner's number, its address and its length.
    pub(super) fn parts(self) -> (u64, u64, usize) {
        (self.owner, self.address, self.len)
    }

    /// The address of its first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Its owner's number.
    pub(crate) fn owner(self) -> u64 {
        self.owner
    }

    /// True for memory of this owner.
    pub(crate) fn is_of(self, owner: u64) -> bool {
        self.owner == owner
    }

    /// The number of its elements.
    #[allow(clippy::len_without_is_empty, reason = "no caller asks for that")]
    pub fn len(self) -> usize {
        self.len
    }

    /// The kernel argument `&[T]`, for callers that keep the memory alive.
    pub(crate) fn as_slice(&self) -> Slice<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { Slice::new(self.owner, self.address, self.len) }
    }

    /// The kernel argument `*mut T`, for callers that hold the memory exclusively.
    pub(crate) fn as_out(&self) -> PointerMut<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { PointerMut::new(self.owner, self.address, self.len) }
    }

    /// The size of all elements in bytes.
    fn byte_len(self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the same memory as elements of another type.
    ///
    /// # Panics
    /// Panics unless the memory is a whole number of such elements, aligned for them.
    pub(crate) fn cast<U: Pod>(self) -> Memory<U> {
        let (bytes, size, align) = (self.byte_len(), size_of::<U>(), align_of::<U>());
        let whole = bytes.is_multiple_of(size) && self.address.is_multiple_of(align as u64);
        assert!(
            whole,
            "{bytes} bytes at {:#x} are not whole elements of {size} bytes, aligned to {align}",
            self.address
        );
        Memory { owner: self.owner, address: self.address, len: bytes / size, element: PhantomData }
    }

    /// Returns the same memory as bytes.
    pub fn bytes(self) -> Memory<u8> {
        self.cast()
    }

    /// Returns the whole words that contain the memory. The first may begin before it, and the last
    /// may end after it.
    pub(crate) fn words(self) -> Memory<u32> {
        const WORD: u64 = size_of::<u32>() as u64;
        let start = self.address - self.address % WORD;
        let end = (self.address + self.byte_len() as u64).next_multiple_of(WORD);
        Memory { owner: self.owner, address: start, len: ((end - start) / WORD) as usize, element: PhantomData }
    }

    /// Returns the part of `len` elements from `start` on.
    ///
    /// # Panics
    /// Panics if the part exceeds the memory.
    pub fn part(self, start: usize, len: usize) -> Self {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} elements at {start} exceed the memory of {}",
            self.len
        );
        Self { owner: self.owner, address: self.address + (start * size_of::<T>()) as u64, len, element: PhantomData }
    }
}
