//! The sum of equal parts in a binary tree, which combines the gradients of several shards.
//!
//! ```text
//! parts    0   1   2   3   4   5   6   7          [count, pitch], count a power of two
//!           \ /     \ /     \ /     \ /
//!            +       +       +       +
//!             \     /         \     /
//!                +               +
//!                 \             /
//!                        +                        out: [length]
//! ```
//! Invariant: the tree depends only on the number of parts. A subtree that was summed beforehand
//! may replace its parts, and the bits are the same.

use crate::vector::{F4, VectorPart};
use crate::{contract, for_own_vector, unroll_on_gpu};
use cuda_std::prelude::*;

/// The maximum number of levels of the tree, for 64 parts.
const LEVELS: usize = 6;

/// Computes `out[i]` = the sum of `parts[s, i]` over s, in a binary tree. Shapes: `parts`: `[count,
/// pitch]`, `out`: `[length]`, `length` at most `pitch`. `count` is a power of two, at most 64.
/// Overwrites `out`.
#[kernel]
pub unsafe fn sum_parts(parts: &[f32], count: usize, pitch: usize, length: usize, out: *mut f32) {
    for_own_vector!(length, |index, part| {
        // SAFETY: the vector lies inside `out`, and inside each part.
        unsafe { sum_of_vectors(parts, count, pitch, index, part).store_part(out, index, part) };
    });
}

// SAFETY: a thread accesses only its own vector up to `length`. `out` is as long, and so is each
// part. A part starts at a multiple of four, as a vector does.
contract! { unsafe sum_parts { block: crate::block::BLOCK } |k| {
    Violation::unless(matches!(k.count, 1 | 2 | 4 | 8 | 16 | 32 | 64), "count", "a power of two up to 64", k.count)?;
    Violation::unless_aligned("pitch", k.pitch, F4::LEN)?;
    Violation::unless(k.length <= k.pitch, "length", "at most `pitch`", k.length)?;
    Violation::unless_length("parts", Size::of(k.count).times(k.pitch), k.parts.len())?;
    Violation::unless_length("out", k.length, k.out.len())?;
    crate::block::vector_grid(k.length)
}}

/// Sums one vector of each part in the tree. A partial sum waits at its level for its neighbor,
/// like the carry of a binary counter.
///
/// # Safety
/// The vector lies inside each part, and each part inside `parts`.
#[inline(always)]
#[track_caller]
unsafe fn sum_of_vectors(parts: &[f32], count: usize, pitch: usize, index: usize, part: VectorPart) -> F4 {
    let mut waiting = [F4::splat(0.0); LEVELS];
    let mut sum = F4::splat(0.0);
    let mut number = 0;
    while number < count {
        // SAFETY: `number` is below `count`, so the vector lies inside, as the caller guarantees.
        sum = unsafe { F4::load_part(parts, number * pitch + index, part, 0.0) };
        let mut carries = true;
        unroll_on_gpu!(level < LEVELS => {
            if carries {
                if (number >> level) & 1 == 1 {
                    sum = waiting[level] + sum;
                } else {
                    waiting[level] = sum;
                    carries = false;
                }
            }
        });
        number += 1;
    }
    sum
}
