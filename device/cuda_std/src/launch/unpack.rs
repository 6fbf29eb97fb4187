//! How the CPU form of a kernel reads its arguments back; `#[kernel]` writes the calls, and types follow from the kernel's own
//! signature, so that nothing which its author's module calls by the name of a type can stand between.
//!
//! Invariant: what is read at a place is what [`Argument::pack`](super::Argument::pack) has put there.

use super::Scalar;

/// A kernel's `&[T]`, from two words.
///
/// # Safety
/// The words at `at` are those of a [`Slice<T>`](super::Slice) whose memory is alive, and stays so for `'a`.
#[inline(always)]
pub unsafe fn slice<'a, T>(words: *const u64, at: usize) -> &'a [T] {
    // SAFETY: the two words are address and length of memory that is alive for `'a`, as this function asks.
    unsafe { core::slice::from_raw_parts(*words.add(at) as usize as *const T, *words.add(at + 1) as usize) }
}

/// A kernel's `*const T`.
///
/// # Safety
/// There is a word at `at`.
#[inline(always)]
pub unsafe fn pointer<T>(words: *const u64, at: usize) -> *const T {
    // SAFETY: there is such a word, as this function asks.
    unsafe { *words.add(at) as usize as *const T }
}

/// A kernel's `*mut T`.
///
/// # Safety
/// There is a word at `at`.
#[inline(always)]
pub unsafe fn pointer_mut<T>(words: *const u64, at: usize) -> *mut T {
    // SAFETY: there is such a word, as this function asks.
    unsafe { *words.add(at) as usize as *mut T }
}

/// A number.
///
/// # Safety
/// There is a word at `at`.
#[inline(always)]
pub unsafe fn scalar<S: Scalar>(words: *const u64, at: usize) -> S {
    // SAFETY: there is such a word, as this function asks.
    S::from_word(unsafe { *words.add(at) })
}
