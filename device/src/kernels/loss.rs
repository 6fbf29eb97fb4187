//! Cross-entropy of logits and class labels: the loss and its gradient, in one launch.
//!
//! ```text
//! 100 classes: 8 lanes a row, 32 rows a block of 256 threads
//! thread            0     1 .. 7   8     9 .. 15   ..   248    249 .. 255
//! row of the block  0     0        1     1              31     31              dlogits: each lane its columns
//! brings            loss  0        loss  0              loss   0         ->    block_combine -> losses[block]
//! ```
//! Invariant: a label that is no class reads nothing out of bounds. The loss and the gradients of its row are NaN, so that no
//! training goes on unnoticed.

use crate::block::{BLOCK, REDUCTION_BYTES, block_combine};
use crate::exps::Exps;
use crate::math;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, load, store};
use crate::warp::{Row, add, rows_at_once};
use crate::{family, for_each_vector, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// With `p[r, c] = exp(logits[r, c] - m) / t`, `m = max_c logits[r, c]`, `t = sum_c exp(logits[r, c] - m)`:
    ///
    /// ```text
    /// losses[i] = scale sum_r log(t) - (logits[r, labels[r]] - m)     over the rows r of block i
    /// dlogits[r, c] = weight (p[r, c] - [c = labels[r]])
    /// ```
    /// `logits`, `dlogits`: `[rows, classes]`, `labels`: `[rows]`, `losses`: one for each block, of [`loss_rows`] rows. Rows with
    /// `labels[r] >= classes` give NaN. Overwrites `losses` and `dlogits`.
    cross_entropy<S: Stored> { cross_entropy_f32: f32; cross_entropy_bf16: bf16; }
    unsafe fn(
        logits: &[S],
        labels: &[u32],
        classes: usize,
        weight: f32,
        scale: f32,
        losses: *mut f32,
        dlogits: *mut S,
    ) {
        let block = thread::block_idx_x() as usize;
        // SAFETY: the row lies inside each argument, and its lanes stay together. All threads come to the block's reduction.
        unsafe {
            let loss = match Row::after(block * loss_rows(classes), logits.len(), classes) {
                Some(row) => with_held!(row, classes, loss_of_row(logits, labels, classes, weight, dlogits)),
                None => 0.0,
            };
            let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), loss, add);
            if thread::thread_idx_x() == 0 {
                store(losses, block, total * scale);
            }
        }
    }
    // SAFETY: `logits` has whole rows of `classes`, `dlogits` is as long, `labels` has one for each row, and `losses` one for each
    // block of rows. A thread touches a row only where it begins inside `logits`, and uses a label as an index only where it is a
    // class.
    contract unsafe { block: BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless(k.classes <= u32::MAX as usize, "classes", "less than 2^32", k.classes)?;
        let rows = crate::warp::rows_in("logits", k.logits.len(), k.classes)?;
        Violation::unless_length("labels", rows, k.labels.len())?;
        Violation::unless_length("losses", rows.div_ceil(loss_rows(k.classes)), k.losses.len())?;
        Violation::unless_length("dlogits", k.logits.len(), k.dlogits.len())?;
        Grid::cover(rows, loss_rows(k.classes))
    }
}

/// Writes a row's gradients. Returns its loss in its first lane, and 0 in the others.
///
/// # Safety
/// The row lies inside `logits`, `labels` and `dlogits`. Its lanes call it together.
#[inline(always)]
unsafe fn loss_of_row<const HELD: usize, S: Stored>(
    row: Row,
    logits: &[S],
    labels: &[u32],
    classes: usize,
    weight: f32,
    dlogits: *mut S,
) -> f32 {
    // SAFETY: the row lies inside the arguments, and its lanes are together here, as the caller promises. The label is compared
    // before it becomes an index.
    unsafe {
        let label = load(labels, row.number);
        let place = label as usize;
        // A NaN here makes the row's loss and each of its gradients NaN.
        let (logit, weight) =
            if place < classes { (load(logits, row.start + place).widen(), weight) } else { (f32::NAN, f32::NAN) };
        let exps = Exps::<HELD, _>::new(row, logits, classes);
        let inverse = 1.0 / exps.sum;
        for_each_vector!(HELD, row, classes, |at, column, part| {
            let [a, b, c, d] = (exps.get(at, column, part) * F4::splat(inverse)).0;
            let label_place = label.wrapping_sub(column as u32);
            let less = |place, p| if place == label_place { p - 1.0 } else { p };
            let gradient = F4([less(0, a), less(1, b), less(2, c), less(3, d)]) * F4::splat(weight);
            gradient.store_part(dlogits, row.start + column, part);
        });
        if row.is_first_lane() { math::log(exps.sum) - (logit - exps.largest) } else { 0.0 }
    }
}

/// Rows that a block of [`cross_entropy`](fn@cross_entropy) has.
#[inline(always)]
pub fn loss_rows(classes: usize) -> usize {
    rows_at_once(BLOCK, classes)
}
