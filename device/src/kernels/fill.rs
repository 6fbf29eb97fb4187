//! Constant fill and copy.
//!
//! Invariant: bits are moved as they are. Nothing is computed with them.

use crate::vector::F4;
use crate::{contract, for_own_vector};
use cuda_std::prelude::*;

/// out = value; `out`: `[length]`. Overwrites `out`.
#[kernel]
pub unsafe fn fill(out: *mut f32, length: usize, value: f32) {
    for_own_vector!(length, |index, part| {
        // SAFETY: the vector lies inside `out`.
        unsafe { F4::splat(value).store_part(out, index, part) }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `length` goes; `out` is as long.
contract! { unsafe fill { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.length, k.out.len())?;
    crate::block::vector_grid(k.length)
}}

/// out = x; `x`, `out`: `[n]`. Overwrites `out`.
#[kernel]
pub unsafe fn copy(x: &[f32], out: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and `out` is as long.
        unsafe { F4::load_part(x, index, part, 0.0).store_part(out, index, part) }
    });
}

// SAFETY: a thread touches the four elements from its own index on, as far as `x` has them; `out` is as long.
contract! { unsafe copy { block: crate::block::BLOCK } |k| {
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    crate::block::vector_grid(k.x.len())
}}
