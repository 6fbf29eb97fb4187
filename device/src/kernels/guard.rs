//! Guards after tensors in checked mode: 16-bit halves with a fixed pattern. They are written when
//! a tensor is created, and compared when its step ends.
//!
//! Invariant: a guard begins where its tensor ends, on any multiple of 2 bytes, the size of the
//! smallest element. The halves are declared as BF16. They are written and read one by one,
//! bitwise, so memory before the first half is not accessed.

use crate::contract;
use crate::vector::{load, store};
use cuda_std::prelude::*;
use half::bf16;

/// The bit pattern of a guard's halves.
pub const PATTERN: bf16 = bf16::from_bits(0xa5a5);

/// Fills `guard` with [`PATTERN`]. Shapes: `guard`: `[length]`. A thread writes one half.
#[kernel]
pub unsafe fn guard_write(guard: *mut bf16, length: usize) {
    let index = thread::index_1d() as usize;
    if index < length {
        // SAFETY: the comparison shows that the half lies inside the guard: the contract checks
        // that `length` is the guard's.
        unsafe { store(guard, index, PATTERN) };
    }
}

// SAFETY: a thread writes one half, below `length`, the length of `guard`. There are fewer than
// 2^32 halves, so no two threads have the same index.
contract! { unsafe guard_write { block: 64, align: 2 } |k| {
    Violation::unless_length("guard", k.length, k.guard.len())?;
    Violation::unless(k.length <= u32::MAX as usize, "length", "fewer than 2^32 halves", k.length)?;
    Grid::cover(k.length, 64)
}}

/// Computes `found[place]` = the index of the first half of `guard` that is not [`PATTERN`], or
/// `guard.len()`. Shapes: `guard`: `[length]`, `found`: `[places]`. Runs on one thread.
#[kernel]
pub unsafe fn guard_check(guard: &[bf16], place: usize, found: *mut u32) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let mut index = 0;
    // SAFETY: the halves lie inside the guard, and `place` inside `found`, which the contract
    // checks.
    unsafe {
        while index < guard.len() && load(guard, index).to_bits() == PATTERN.to_bits() {
            index += 1;
        }
        store(found, place, index as u32);
    }
}

// SAFETY: one thread reads the halves inside `guard`. It writes one element inside `found`.
contract! { unsafe guard_check { block: 32, align: 2 } |k| {
    Violation::unless(k.guard.len() <= u32::MAX as usize, "guard", "fewer than 2^32 halves", k.guard.len())?;
    Violation::unless(k.place < k.found.len(), "place", "a place inside `found`", k.place)?;
    Grid::new(1, 1, 1)
}}
