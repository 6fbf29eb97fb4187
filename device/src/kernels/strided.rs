//! Copies between arrays with strides: permutations, broadcasts, parts, flips and concatenations.
//!
//! Invariant: an element is moved once, and its number does not change. Elements of the output that
//! no place maps to are not accessed.

use crate::broadcast::{self, RANK, is_aligned};
use crate::stored::Stored;
use crate::vector::{F4, VectorPart, store};
use crate::{family, for_own_place, unroll};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `out[start' + i . strides'] = x[start + i . strides]` for every place i of the
    /// extents. `layout` has the six extents, the six strides of x, which may be 0 or negative, and
    /// its start; then those of `out`, which ascend from the last to the first. Overwrites these
    /// elements.
    copy_strided<S: Stored> { copy_strided_f32: f32; copy_strided_bf16: bf16; }
    unsafe fn(x: &[S], layout: [usize; 20], length: usize, out: *mut S) {
        // SAFETY: the contract has checked that both arrays have the elements of every place, and
        // that no two places share one of `out`.
        unsafe {
            for_own_place!(S, &layout, length, |place| {
                let (mut from, mut to) = ([0; RANK], [0; RANK]);
                unroll!(at < RANK => {
                    from[at] = layout[RANK + at];
                    to[at] = layout[2 * RANK + 1 + at];
                });
                let (start, out_start) = (layout[2 * RANK], layout[3 * RANK + 1]);
                let values = place.strided(x, start, from);
                if place.is_in_row() && to[RANK - 1] == 1 && is_aligned(out_start, to) {
                    values.store(out, out_start + place.offset(to));
                } else {
                    let offsets = place.offsets(to);
                    let count = if let VectorPart::First(count) = place.part { count } else { F4::LEN };
                    unroll!(at < 4 => {
                        if at < count {
                            store(out, out_start + offsets[at], S::narrow(values.0[at]));
                        }
                    });
                }
            });
        }
    }
    // SAFETY: each place's elements lie inside `x` and `out`. The strides of `out` keep places
    // apart, so no element is written twice.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        if k.length > 0 {
            let (extents, rest) = k.layout.split_at(RANK);
            let (from, to) = rest.split_at(broadcast::OPERAND);
            broadcast::check_extents(extents, k.length)?;
            broadcast::check_inside("x", extents, from[RANK], &from[..RANK], k.x.len())?;
            broadcast::check_apart(extents, &to[..RANK])?;
            broadcast::check_inside("out", extents, to[RANK], &to[..RANK], k.out.len())?;
        }
        crate::block::own_grid::<S>(k.length)
    }
}
