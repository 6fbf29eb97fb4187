//! Losses with their gradients, in one launch: cross-entropy of logits and class labels; and of single elements, the squared error and
//! the binary cross-entropy.
//!
//! ```text
//! 100 classes: 8 lanes a row, 32 rows a block of 256 threads
//! thread            0     1 .. 7   8     9 .. 15   ..   248    249 .. 255
//! row of the block  0     0        1     1              31     31              dlogits: each lane its columns
//! brings            loss  0        loss  0              loss   0         ->    block_combine -> losses[block]
//!
//! more than 4096 classes: a row a block
//! thread            0             1             ..   255               0                ..
//! columns           0..3          4..7               1020..1023        1024..1027       ..
//! ```
//! A row is passed three times: for its maximum, its sum, and its gradients. The passes behind the first find it in a cache only where few rows are under way at
//! once: a vocabulary's rows of some 100 KB each, a row a warp, would be more than any GPU's holds.
//!
//! Invariant: a label that is no class reads nothing out of bounds. The loss and the gradients of its row are NaN, so that no
//! training goes on unnoticed.

use crate::block::{BLOCK, BLOCK_ELEMENTS, CHUNK, REDUCTION_BYTES, block_combine};
use crate::exps::Exps;
use crate::math;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, Part, load, store};
use crate::warp::{Row, add, larger, rows_at_once, sum4};
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
            let target = Target { weight, smoothing, ignore: ignore != 0 };
            let loss = if classes > MOST_OF_A_WARP {
                loss_of_long_row(logits, labels, classes, target, dlogits)
            } else {
                match Row::after(block * loss_rows(classes), logits.len(), classes) {
                    Some(row) => with_held!(row, classes, loss_of_row(logits, labels, classes, target, dlogits)),
                    None => 0.0,
                }
            };
            let total = block_combine(reduction(0), loss, add);
            if thread::thread_idx_x() == 0 {
                store(losses, block, total * scale);
            }
        }
    }
    // SAFETY: `logits` has whole rows of `classes`, `dlogits` is as long, `labels` has one for each row, and `losses` one for each
    // block of rows. A thread touches a row only where it begins inside `logits`, and uses a label as an index only where it is a
    // class.
    contract unsafe { block: BLOCK, shared: REDUCTIONS * REDUCTION_BYTES } |k| {
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

/// Classes up to which lanes of a warp share a row. Of more a block does.
const MOST_OF_A_WARP: usize = 4096;
/// Reductions over the block's threads: of losses and, in a long row, of its maximum, its sum, and what is smoothed.
const REDUCTIONS: u32 = 4;

/// The place of one of them. Each has its own, so that none waits until another has been read.
#[inline(always)]
unsafe fn reduction(number: u32) -> SharedTile<f32> {
    // SAFETY: the contract has declared all of them.
    unsafe { SharedTile::new(number * REDUCTION_BYTES, REDUCTION_BYTES / 4) }
}

/// How labels count.
#[derive(Clone, Copy)]
struct Target {
    weight: f32,
    smoothing: f32,
    ignore: bool,
}

/// What a row's label makes of its exponentials.
#[derive(Clone, Copy)]
struct Labelled {
    label: u32,
    /// The label's logit. A NaN where the label is no class, as the weight is: it makes the row's loss and each of its gradients one.
    logit: f32,
    weight: f32,
    /// Shares of the target: of the label, and of each class. Without smoothing they are 1 and 0, which change no bit.
    of_label: f32,
    of_each: f32,
    is_ignored: bool,
}

impl Labelled {
    /// # Safety
    /// Row `number`, which begins at `start`, lies inside `logits` and `labels`.
    #[inline(always)]
    unsafe fn of_row<S: Stored>(
        number: usize,
        start: usize,
        logits: &[S],
        labels: &[u32],
        classes: usize,
        Target { weight, smoothing, ignore }: Target,
    ) -> Self {
        // SAFETY: inside, as the caller promises. The label is compared before it becomes an index.
        let (label, logit, weight) = unsafe {
            let label = load(labels, number);
            if (label as usize) < classes {
                (label, load(logits, start + label as usize).widen(), weight)
            } else {
                (label, f32::NAN, f32::NAN)
            }
        };
        let (of_label, of_each) = (1.0 - smoothing, smoothing / classes as f32);
        Self { label, logit, weight, of_label, of_each, is_ignored: ignore && label == IGNORED }
    }

    /// The gradients of the four logits from `column` on, of their exponentials and the inverse of the row's sum.
    #[inline(always)]
    fn gradients(self, exps: F4, inverse: f32, column: usize) -> F4 {
        let [a, b, c, d] = (exps * F4::splat(inverse) - F4::splat(self.of_each)).0;
        let place_of_label = self.label.wrapping_sub(column as u32);
        let less = |place, p| if place == place_of_label { p - self.of_label } else { p };
        let gradients = F4([less(0, a), less(1, b), less(2, c), less(3, d)]) * F4::splat(self.weight);
        if self.is_ignored { F4::splat(0.0) } else { gradients }
    }

    /// The row's loss, of its largest logit m, the sum of its exponentials and, with smoothing, of all `logits - m`.
    #[inline(always)]
    fn loss(self, largest: f32, sum: f32, smoothed: Option<f32>) -> f32 {
        let target = self.logit - largest;
        let target = match smoothed {
            Some(differences) => self.of_label * target + self.of_each * differences,
            None => target,
        };
        if self.is_ignored { 0.0 } else { math::log(sum) - target }
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
    target: Target,
    dlogits: *mut S,
) -> f32 {
    // SAFETY: the row lies inside the arguments, and its lanes are together here, as the caller promises.
    unsafe {
        let labelled = Labelled::of_row(row.number, row.start, logits, labels, classes, target);
        let exps = Exps::<HELD, _>::new(row, logits, classes);
        let inverse = 1.0 / exps.sum;
        for_each_vector!(HELD, row, classes, |at, column, part| {
            let gradients = labelled.gradients(exps.get(at, column, part), inverse, column);
            gradients.store_part(dlogits, row.start + column, part);
        });
        let mut smoothed = None;
        if target.smoothing != 0.0 {
            let mut sum = F4::splat(0.0);
            for_each_vector!(row, classes, |column, part| {
                let value = F4::load_part(logits, row.start + column, part, 0.0) - F4::splat(exps.largest);
                sum = sum + value.only(part);
            });
            smoothed = Some(row.sum(sum));
        }
        if row.is_first_lane() { labelled.loss(exps.largest, exps.sum, smoothed) } else { 0.0 }
    }
}

/// A thread's columns of the block's row, for [`for_each_vector!`](crate::for_each_vector).
struct LongRow {
    first: usize,
    stride: usize,
}

/// The same of a row that the block shares: the loss in its first thread. Each thread adds up its columns, ascending, a vector's four as
/// ((0 + 1) + (2 + 3)), then come the block's threads.
///
/// # Safety
/// The block's row lies inside `logits`, `labels` and `dlogits`. All threads of the block call it together.
#[inline(always)]
unsafe fn loss_of_long_row<S: Stored>(
    logits: &[S],
    labels: &[u32],
    classes: usize,
    target: Target,
    dlogits: *mut S,
) -> f32 {
    let number = thread::block_idx_x() as usize;
    let start = number * classes;
    let row = LongRow { first: thread::thread_idx_x() as usize * F4::LEN, stride: BLOCK as usize * F4::LEN };
    // SAFETY: the row lies inside the arguments, and the block's threads are together here, as the caller promises.
    unsafe {
        let labelled = Labelled::of_row(number, start, logits, labels, classes, target);
        let mut most = F4::splat(f32::NEG_INFINITY);
        for_each_vector!(row, classes, |column, part| {
            most = most.zip(F4::load_part(logits, start + column, part, f32::NEG_INFINITY), larger);
        });
        // `larger` may lose a NaN. The sum finds it.
        let [a, b, c, d] = most.0;
        let largest = block_combine(reduction(1), larger(larger(a, b), larger(c, d)), larger);
        let mut sum = F4::splat(0.0);
        for_each_vector!(row, classes, |column, part| {
            let value = F4::load_part(logits, start + column, part, f32::NEG_INFINITY) - F4::splat(largest);
            sum = sum + map4!(value, math::exp_negative);
        });
        let sum = block_combine(reduction(2), sum4(sum), add);
        let inverse = 1.0 / sum;
        let mut differences = F4::splat(0.0);
        for_each_vector!(row, classes, |column, part| {
            let value = F4::load_part(logits, start + column, part, f32::NEG_INFINITY) - F4::splat(largest);
            let gradients = labelled.gradients(map4!(value, math::exp_negative), inverse, column);
            gradients.store_part(dlogits, start + column, part);
            differences = differences + value.only(part);
        });
        let smoothed =
            if target.smoothing != 0.0 { Some(block_combine(reduction(3), sum4(differences), add)) } else { None };
        if thread::thread_idx_x() == 0 { labelled.loss(largest, sum, smoothed) } else { 0.0 }
    }
}

/// Rows that a block of [`cross_entropy`](struct@cross_entropy) has.
#[inline(always)]
pub fn loss_rows(classes: usize) -> usize {
    if classes > MOST_OF_A_WARP { 1 } else { rows_at_once(BLOCK, classes) }
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
