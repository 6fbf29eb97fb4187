//! Constant fill and copy.
//!
//! Invariant: values are moved bit by bit, except that a BF16 NaN may change its payload. No
//! arithmetic is done.

use crate::vector::F4;
use crate::{family, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes out = value. Shapes: `out`: `[length]`. Overwrites `out`.
    fill<S: Stored> { fill_f32: f32; fill_bf16: bf16; }
    unsafe fn(out: *mut S, length: usize, value: f32) {
        // SAFETY: the vector lies inside `out`.
        unsafe {
            write_own_vectors!(S, length, out, [] |_index| F4::splat(value));
        }
    }
    // SAFETY: a thread accesses only its own vectors up to `length`; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.length, k.out.len())?;
        crate::block::own_grid::<S>(k.length)
    }
}

family! {
    /// Computes out = x. Shapes: `x`, `out`: `[n]`. Overwrites `out`.
    copy<S: Stored> { copy_f32: f32; copy_bf16: bf16; }
    unsafe fn(x: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            write_own_vectors!(S, x.len(), out, [x] |_index| x);
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}
