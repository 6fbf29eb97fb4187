//! Unpacking of a kernel's arguments on the CPU. `#[kernel]` generates the calls. Types are
//! inferred from the kernel's own signature, so that a type name that the author's module shadows
//! cannot interfere.
//!
//! Invariant: the value read at an index is the one that [`Argument::pack`](super::Argument::pack)
//! has stored there.

use super::Pod;
use crate::tensor_map::TensorMap;
use core::marker::PhantomData;

/// Reads a kernel's `&[T]`, from two words.
///
/// # Safety
/// The words at `at` are those of a [`Slice<T>`](super::Slice) whose memory is alive for `'a`.
#[inline(always)]
pub unsafe fn slice<'a, T>(words: *const u64, at: usize) -> &'a [T] {
    // SAFETY: the caller guarantees that the two words are address and length of memory that is
    // alive for `'a`.
    unsafe { core::slice::from_raw_parts(*words.add(at) as usize as *const T, *words.add(at + 1) as usize) }
}

/// Reads a kernel's `*const T`.
///
/// # Safety
/// There is a word at `at`.
#[inline(always)]
pub unsafe fn pointer<T>(words: *const u64, at: usize) -> *const T {
    // SAFETY: the caller guarantees that there is a word at `at`.
    unsafe { *words.add(at) as usize as *const T }
}

/// Reads a kernel's `*mut T`.
///
/// # Safety
/// There is a word at `at`.
#[inline(always)]
pub unsafe fn pointer_mut<T>(words: *const u64, at: usize) -> *mut T {
    // SAFETY: the caller guarantees that there is a word at `at`.
    unsafe { *words.add(at) as usize as *mut T }
}

/// Reads a kernel's `TensorMap<T>`, from eight words.
///
/// # Safety
/// The words at `at` are those of a [`TensorMap`](super::TensorMap).
#[inline(always)]
pub unsafe fn tensor_map<T>(words: *const u64, at: usize) -> TensorMap<T> {
    // SAFETY: the caller guarantees that there are eight words.
    let word = |next: usize| unsafe { *words.add(at + next) as usize };
    TensorMap {
        memory: word(0) as *const T,
        length: word(1),
        extents: [2, 3, 4].map(|next| word(next) as u32),
        strides: [5, 6].map(word),
        box_rows: word(7) as u32,
        element: PhantomData,
    }
}

/// Reads plain data.
///
/// # Safety
/// There are the words of a T from `at` on.
#[inline(always)]
pub unsafe fn value<T: Pod>(words: *const u64, at: usize) -> T {
    // SAFETY: the caller guarantees the words. Any bits are a T, whose alignment is at most a
    // word's.
    unsafe { words.add(at).cast::<T>().read() }
}
