//! Casts between the element types in memory.
//!
//! Invariant: f32 is rounded to the nearest BF16, ties to even; BF16 becomes f32 exactly.

use crate::{contract, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

/// Computes out = x, rounded. Shapes: `x`, `out`: `[n]`. Overwrites `out`.
#[kernel]
pub unsafe fn cast_to_bf16(x: &[f32], out: *mut bf16) {
    // SAFETY: the vector lies inside `x`, and `out` is as long.
    unsafe {
        write_own_vectors!(bf16, x.len(), out, [x] | _index | x);
    }
}

// SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long.
contract! { unsafe cast_to_bf16 { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::own_grid::<bf16>(k.x.len())
}}

/// Computes out = x, exactly. Shapes: `x`, `out`: `[n]`. Overwrites `out`.
#[kernel]
pub unsafe fn cast_to_f32(x: &[bf16], out: *mut f32) {
    // SAFETY: the vector lies inside `x`, and `out` is as long.
    unsafe {
        write_own_vectors!(bf16, x.len(), out, [x] | _index | x);
    }
}

// SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long.
contract! { unsafe cast_to_f32 { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::own_grid::<bf16>(k.x.len())
}}
