//! Cross-entropy of logits and class labels: the loss and its gradient, in one launch.
//!
//! Invariant: a label that is no class reads nothing out of bounds; the loss and the gradients of its row are NaN, so that
//! it cannot be trained on unseen.

use crate::block::{BLOCK, REDUCTION_BYTES, block_combine};
use crate::math;
use crate::tile::SharedTile;
use crate::vector::{F4, load, store};
use crate::warp::{Row, add, lanes_of, max};
use crate::{contract, for_each_vector, map4};
use cuda_std::prelude::*;

/// With `p[r, c] = exp(logits[r, c] - m) / t`, `m = max_c logits[r, c]`, `t = sum_c exp(logits[r, c] - m)`:
///
/// ```text
/// losses[i] = scale sum_r log(t) - (logits[r, labels[r]] - m)     over the rows r of block i
/// dlogits[r, c] = weight (p[r, c] - [c = labels[r]])
/// ```
/// `logits`, `dlogits`: `[rows, classes]`, `labels`: `[rows]`, `losses`: as many as blocks, see [`loss_rows`]. NaN in rows
/// with `labels[r] >= classes`. Overwrites `losses` and `dlogits`.
#[kernel]
pub unsafe fn cross_entropy(
    logits: &[f32],
    labels: &[u32],
    classes: usize,
    weight: f32,
    scale: f32,
    losses: *mut f32,
    dlogits: *mut f32,
) {
    let block = thread::block_idx_x() as usize;
    let mut loss = 0.0;
    // SAFETY: the row lies inside each argument, the label is checked; its lanes stay together. All threads come to the
    // block's reduction.
    unsafe {
        if let Some(row) = Row::after(block * loss_rows(classes), logits.len(), classes) {
            let mut largest = F4::splat(f32::NEG_INFINITY);
            for_each_vector!(row, classes, |column, part| {
                largest = largest.zip(F4::load_part(logits, row.start + column, part, f32::NEG_INFINITY), max);
            });
            let largest = row.max(largest);
            let mut sum = F4::splat(0.0);
            for_each_vector!(row, classes, |column, part| {
                let logits = F4::load_part(logits, row.start + column, part, f32::NEG_INFINITY);
                sum = sum + map4!(logits - F4::splat(largest), math::exp);
            });
            let total = row.sum(sum);
            let inverse = 1.0 / total;
            let label = load(labels, row.number) as usize;
            // A NaN makes each of the row's gradients one.
            let weight = if label < classes { weight } else { f32::NAN };
            for_each_vector!(row, classes, |column, part| {
                let logits = F4::load_part(logits, row.start + column, part, 0.0);
                let [a, b, c, d] = (map4!(logits - F4::splat(largest), math::exp) * F4::splat(inverse)).0;
                let less = |at, p| if column + at == label { p - 1.0 } else { p };
                let gradient = F4([less(0, a), less(1, b), less(2, c), less(3, d)]) * F4::splat(weight);
                gradient.store_part(dlogits, row.start + column, part);
            });
            if row.is_first_lane() {
                loss = if label < classes {
                    math::log(total) - (load(logits, row.start + label) - largest)
                } else {
                    f32::NAN
                };
            }
        }
        let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), loss, add);
        if thread::thread_idx_x() == 0 {
            store(losses, block, total * scale);
        }
    }
}

contract! { cross_entropy { block: BLOCK, shared: REDUCTION_BYTES } |k| {
    let rows = crate::warp::rows_in("logits", k.logits.len(), k.classes)?;
    Violation::unless_length("labels", rows, k.labels.len())?;
    Violation::unless_length("losses", rows.div_ceil(loss_rows(k.classes)), k.losses.len())?;
    Violation::unless_length("dlogits", k.logits.len(), k.dlogits.len())?;
    Grid::cover(rows, loss_rows(k.classes))
}}

/// Rows of a block of [`cross_entropy`](fn@cross_entropy).
#[inline(always)]
pub fn loss_rows(classes: usize) -> usize {
    (BLOCK / lanes_of(classes)) as usize
}
