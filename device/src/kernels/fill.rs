//! Constant fill and copy.
//!
//! Invariant: bits are moved as they are, but a NaN of BF16 may become another. Nothing is computed with them.

use crate::vector::F4;
use crate::{family, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// out = value; `out`: `[length]`. Overwrites `out`.
    fill<S: Stored> { fill_f32: f32; fill_bf16: bf16; }
    unsafe fn(out: *mut S, length: usize, value: f32) {
        // SAFETY: the vector lies inside `out`.
        unsafe {
            write_own_vectors!(S, length, out, |_index, _part| F4::splat(value));
        }
    }
    // SAFETY: a thread touches its own vectors, as far as `length` goes; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.length, k.out.len())?;
        crate::block::vector_grid::<S>(k.length)
    }
}

family! {
    /// out = x; `x`, `out`: `[n]`. Overwrites `out`.
    copy<S: Stored> { copy_f32: f32; copy_bf16: bf16; }
    unsafe fn(x: &[S], out: *mut S) {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe {
            write_own_vectors!(S, x.len(), out, |index, part| F4::load_part(x, index, part, 0.0));
        }
    }
    // SAFETY: a thread touches its own vectors, as far as `x` has them; `out` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        crate::block::vector_grid::<S>(k.x.len())
    }
}
