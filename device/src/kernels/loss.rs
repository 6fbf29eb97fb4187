//! Losses with their gradients, in one launch: cross-entropy of logits and class labels; and of single elements, the squared error and
//! the binary cross-entropy.
//!
//! ```text
//! 100 classes: 8 lanes a row, 32 rows a block of 256 threads
//! thread            0     1 .. 7   8     9 .. 15   ..   248    249 .. 255
//! row of the block  0     0        1     1              31     31              dlogits: each lane its columns
//! brings            loss  0        loss  0              loss   0         ->    block_combine -> losses[block]
//! ```
//! Invariant: a label that is no class reads nothing out of bounds. The loss and the gradients of its row are NaN, so that no
//! training goes on unnoticed.

use crate::block::{BLOCK, BLOCK_ELEMENTS, CHUNK, REDUCTION_BYTES, block_combine};
use crate::exps::Exps;
use crate::math;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, Part, load, store};
use crate::warp::{Row, add, rows_at_once, sum4};
use crate::{family, for_each_vector, map4, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// With `p[r, c] = exp(logits[r, c] - m) / t`, `m = max_c logits[r, c]`, `t = sum_c exp(logits[r, c] - m)`:
    ///
    /// ```text
    /// losses[i] = scale sum_r log(t) - (logits[r, labels[r]] - m)     over the rows r of block i
    /// dlogits[r, c] = weight (p[r, c] - [c = labels[r]])
    /// ```
    /// With a `smoothing` s above 0, the target is 1 - s of the label and s / classes of each class: the mean of `logits[r, c] - m` takes
    /// s of the label's part. Where `ignore` is 1, a row of the label [`IGNORED`] has no loss, and its gradients are 0.
    ///
    /// `logits`, `dlogits`: `[rows, classes]`, `labels`: `[rows]`, `losses`: one for each block, of [`loss_rows`] rows. Rows with
    /// `labels[r] >= classes` give NaN. Overwrites `losses` and `dlogits`.
    cross_entropy<S: Stored> { cross_entropy_f32: f32; cross_entropy_bf16: bf16; }
    unsafe fn(
        logits: &[S],
        labels: &[u32],
        classes: usize,
        weight: f32,
        scale: f32,
        smoothing: f32,
        ignore: u32,
        losses: *mut f32,
        dlogits: *mut S,
    ) {
        let block = thread::block_idx_x() as usize;
        // SAFETY: the row lies inside each argument, and its lanes stay together. All threads come to the block's reduction.
        unsafe {
            let loss = match Row::after(block * loss_rows(classes), logits.len(), classes) {
                Some(row) => {
                    let target = Target { weight, smoothing, ignore: ignore != 0 };
                    with_held!(row, classes, loss_of_row(logits, labels, classes, target, dlogits))
                }
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

/// The label of rows that count for nothing, where it is asked for.
pub const IGNORED: u32 = u32::MAX;

/// How labels count.
#[derive(Clone, Copy)]
struct Target {
    weight: f32,
    smoothing: f32,
    ignore: bool,
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
    Target { weight, smoothing, ignore }: Target,
    dlogits: *mut S,
) -> f32 {
    // SAFETY: the row lies inside the arguments, and its lanes are together here, as the caller promises. The label is compared
    // before it becomes an index.
    unsafe {
        let label = load(labels, row.number);
        let place = label as usize;
        let is_ignored = ignore && label == IGNORED;
        // A NaN here makes the row's loss and each of its gradients NaN.
        let (logit, weight) =
            if place < classes { (load(logits, row.start + place).widen(), weight) } else { (f32::NAN, f32::NAN) };
        let exps = Exps::<HELD, _>::new(row, logits, classes);
        let inverse = 1.0 / exps.sum;
        // Without smoothing they are 1 and 0, which change no bit.
        let (of_label, of_each) = (1.0 - smoothing, smoothing / classes as f32);
        for_each_vector!(HELD, row, classes, |at, column, part| {
            let [a, b, c, d] = (exps.get(at, column, part) * F4::splat(inverse) - F4::splat(of_each)).0;
            let label_place = label.wrapping_sub(column as u32);
            let less = |place, p| if place == label_place { p - of_label } else { p };
            let gradient = F4([less(0, a), less(1, b), less(2, c), less(3, d)]) * F4::splat(weight);
            let gradient = if is_ignored { F4::splat(0.0) } else { gradient };
            gradient.store_part(dlogits, row.start + column, part);
        });
        let mut target = logit - exps.largest;
        if smoothing != 0.0 {
            let mut sum = F4::splat(0.0);
            for_each_vector!(row, classes, |column, part| {
                let value = F4::load_part(logits, row.start + column, part, 0.0) - F4::splat(exps.largest);
                sum = sum + value.only(part);
            });
            target = of_label * target + of_each * row.sum(sum);
        }
        if row.is_first_lane() && !is_ignored { math::log(exps.sum) - target } else { 0.0 }
    }
}

/// Rows that a block of [`cross_entropy`](struct@cross_entropy) has.
#[inline(always)]
pub fn loss_rows(classes: usize) -> usize {
    rows_at_once(BLOCK, classes)
}

/// The squared difference, as the kernel's `function`.
pub const SQUARED_ERROR: u32 = 0;
/// The cross-entropy of a probability and a logit, in the form that neither overflows nor cancels.
pub const BINARY_CROSS_ENTROPY: u32 = 1;

family! {
    /// A loss of each element, by the number of its function: with d = x - target,
    ///
    /// ```text
    /// SQUARED_ERROR            loss = d^2                                            dx = 2 weight d
    /// BINARY_CROSS_ENTROPY     loss = max(x, 0) - x target + log(1 + e^-|x|)         dx = weight (1 / (1 + e^-x) - target)
    /// losses[i] = scale times the sum of the losses of chunk i, 4096 elements
    /// ```
    /// `x`, `target`, `dx`: `[n]`, `losses`: `[ceil(n / 4096)]`. Overwrites `losses` and `dx`.
    element_loss<S: Stored> { element_loss_f32: f32; element_loss_bf16: bf16; }
    unsafe fn(
        x: &[S],
        target: &[f32],
        function: u32,
        weight: f32,
        scale: f32,
        losses: *mut f32,
        dx: *mut S,
    ) {
        let first = thread::block_idx_x() as usize * CHUNK + thread::thread_idx_x() as usize * F4::LEN;
        let mut sum = F4::splat(0.0);
        // SAFETY: the vectors lie inside `x`, and `target` and `dx` are as long. A block has a place in `losses`; all of its threads come here.
        unsafe {
            let mut index = first;
            while index < x.len() && index < first + CHUNK {
                let left = x.len() - index;
                let part = if left >= F4::LEN { Part::Whole } else { Part::First(left) };
                let (x, target) = (F4::load_part(x, index, part, 0.0), F4::load_part(target, index, part, 0.0));
                let (loss, gradient) = if function == SQUARED_ERROR {
                    let difference = x - target;
                    (difference * difference, difference * F4::splat(2.0 * weight))
                } else {
                    let loss = map4!(x, rectified) - x * target + map4!(x, log_and_1_of_exp);
                    (loss, (map4!(x, math::sigmoid) - target) * F4::splat(weight))
                };
                sum = sum + loss.only(part);
                gradient.store_part(dx, index, part);
                index += BLOCK_ELEMENTS;
            }
            let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), sum4(sum), add);
            if thread::thread_idx_x() == 0 {
                store(losses, thread::block_idx_x() as usize, total * scale);
            }
        }
    }
    // SAFETY: a block touches its own chunk as far as `x` has it; `target` and `dx` are as long, and `losses` has an element for each chunk.
    contract unsafe { block: BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless(k.function <= BINARY_CROSS_ENTROPY, "function", "a number of this module", k.function)?;
        Violation::unless_length("target", k.x.len(), k.target.len())?;
        Violation::unless_length("losses", k.x.len().div_ceil(CHUNK), k.losses.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Grid::cover(k.x.len(), CHUNK)
    }
}

/// max(x, 0); a NaN stays one.
#[inline(always)]
fn rectified(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

/// log(1 + e^-|x|).
#[inline(always)]
fn log_and_1_of_exp(x: f32) -> f32 {
    math::log_and_1(math::exp_negative(-x.abs()))
}
