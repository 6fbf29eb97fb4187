//! The weights of split masters in f32.
//!
//! Invariant: each weight has the 24 bits of its two parts; see [`split`](crate::split).

use crate::split::join4;
use crate::vector::{F4, load};
use crate::{contract, for_own_vector};
use cuda_std::prelude::*;
use half::bf16;

/// Computes out = the weights, exactly. Shapes: `halves`, `out`: `[n]`, `corrections`:
/// `[ceil(n / 4)]`, four in a word. Overwrites `out`.
#[kernel]
pub unsafe fn join_masters(halves: &[bf16], corrections: &[u32], out: *mut f32) {
    for_own_vector!(halves.len(), |index, part| {
        // SAFETY: the vector lies inside `halves`, `out` is as long, and `corrections` has a word
        // for it.
        unsafe {
            let weights = join4(F4::load_part(halves, index, part, 0.0), load(corrections, index / F4::LEN));
            weights.store_part(out, index, part);
        }
    });
}

// SAFETY: a thread accesses only the four elements from its own index on that lie inside `halves`,
// and their word of `corrections`. `out` is as long.
contract! { unsafe join_masters { block: crate::block::BLOCK } |k| {
    Violation::unless_length("corrections", k.halves.len().div_ceil(F4::LEN), k.corrections.len())?;
    Violation::unless_length("out", k.halves.len(), k.out.len())?;
    crate::block::vector_grid(k.halves.len())
}}
