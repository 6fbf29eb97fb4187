//! What device code tells the emulator about memory, before it touches it.
//!
//! Whoever moves memory for kernels calls [`global`] and [`shared`]: the vector and the tile of `device/src`. What is not
//! told is not watched. Invariant: a kernel's entry points are compiled with what [`assume_watched`] says, and the calls
//! are gone from the one that is not watched; an access that is wrong does not return.

use super::arguments::Span;
use super::{Kind, current};
use std::cell::Cell;
use std::ops::Range;
use std::panic::{Location, resume_unwind};

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Sets whether the kernel threads that this OS thread runs next are watched.
#[inline(never)]
pub(super) fn watch(watched: bool) {
    WATCHED.set(watched);
}

/// Whether the running kernel thread is watched. Within one call of a kernel the compiler takes every look for the same.
#[inline(always)]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(clippy::pointers_in_nomem_asm_block, reason = "the byte is constant for as long as two looks can be merged")]
fn is_watched() -> bool {
    let byte = WATCHED.with(Cell::as_ptr);
    let watched: u32;
    // SAFETY: reads one byte that is there as long as the OS thread. `nomem` says more than is so: that no write to
    // memory changes the outcome. No write of a kernel does: the byte is set by `watch` alone, between kernel calls, in a
    // function that is inlined nowhere.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        core::arch::asm!(
            "movzx {0:e}, byte ptr [{1}]",
            lateout(reg) watched, in(reg) byte, options(pure, nomem, nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::asm!(
            "ldrb {0:w}, [{1}]",
            lateout(reg) watched, in(reg) byte, options(pure, nomem, nostack, preserves_flags)
        );
    }
    watched != 0
}

/// Whether the running kernel thread is watched.
#[inline(always)]
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn is_watched() -> bool {
    WATCHED.get()
}

/// Tells the compiler, at the start of a kernel's entry point, whether it is the one for watched launches.
///
/// # Safety
/// It is so.
#[inline(always)]
pub unsafe fn assume_watched(watched: bool) {
    // SAFETY: the caller's promise.
    unsafe { core::hint::assert_unchecked(is_watched() == watched) }
}

/// The running thread is about to touch `base[index..index + count]` in global memory. `base` is a pointer that the
/// launch passed: the access must stay inside that argument.
#[inline(always)]
#[track_caller]
pub fn global<T>(kind: Kind, base: *const T, index: usize, count: usize) {
    if is_watched() {
        let offset = index.wrapping_mul(size_of::<T>());
        touch_global(kind, Span { base: base as usize, offset, bytes: count * size_of::<T>() }, Location::caller());
    }
}

#[cold]
#[inline(never)]
fn touch_global(kind: Kind, span: Span, location: &'static Location<'static>) {
    if span.bytes > 0 {
        let outcome = current(|block| block.touch_global(kind, span, location));
        outcome.unwrap_or_else(|cause| resume_unwind(Box::new(cause)));
    }
}

/// The running thread is about to touch `tile[index..index + count]` in shared memory, where a tile has `len` elements.
#[inline(always)]
#[track_caller]
pub fn shared<T>(kind: Kind, tile: *const T, len: u32, index: u32, count: u32) {
    if is_watched() {
        let [len, index, count] = [len, index, count].map(|elements| elements as usize * size_of::<T>());
        touch_shared(kind, tile as usize, len, index..index + count, Location::caller());
    }
}

#[cold]
#[inline(never)]
fn touch_shared(kind: Kind, tile: usize, len: usize, bytes: Range<usize>, location: &'static Location<'static>) {
    let outcome = current(|block| {
        let start = tile.wrapping_sub(block.shared_start() as usize);
        block.touch_shared(kind, start..start + len, start + bytes.start..start + bytes.end, location)
    });
    outcome.unwrap_or_else(|cause| resume_unwind(Box::new(cause)));
}
