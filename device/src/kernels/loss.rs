//! Losses with their gradients, in one launch: cross-entropy of logits and class labels, and the
//! elementwise squared error and binary cross-entropy.
//!
//! ```text
//! 100 classes: 8 lanes a row, 32 rows a block of 256 threads
//! thread            0     1 .. 7  8     9 .. 15  ..  248   249 .. 255
//! row of the block  0     0       1     1            31    31     dlogits: each lane its columns
//! brings            loss  0       loss  0            loss  0     -> block_combine -> losses[block]
//!
//! more than 4096 classes: a row a block
//! thread            0             1             ..   255               0                ..
//! columns           0..3          4..7               1020..1023        1024..1027       ..
//! ```
//! A row is read for its maximum, for its sum and, if they are wanted, for its gradients. The later
//! passes hit a cache only if few rows are in flight. A vocabulary's rows are some 100 KB each; one
//! row per warp would exceed any GPU's cache.
//!
//! Invariant: a label that is not a class causes no access out of bounds. It makes the loss and the
//! gradients of its row NaN, so that the error cannot pass unnoticed.

use crate::block::{BLOCK, BLOCK_ELEMENTS, CHUNK, REDUCTION_BYTES, block_combine};
use crate::exps::Exps;
use crate::math;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart, load, store};
use crate::warp::{Row, add, larger, rows_at_once, sum4};
use crate::{family, for_each_vector, map4, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes a loss and its gradients. Let `p[r, c] = exp(logits[r, c] - m) / t`, `m = max_c
    /// logits[r, c]`, `t = sum_c exp(logits[r, c] - m)`:
    ///
    /// ```text
    /// losses[i] = scale sum_r log(t) - (logits[r, labels[r]] - m)     over the rows r of block i
    /// dlogits[r, c] = weight (p[r, c] - [c = labels[r]])
    /// ```
    /// If `smoothing` s is above 0, the target is 1 - s for the label plus s / classes for each
    /// class. In the loss, the mean of `logits[r, c] - m` then replaces a share s of the label's
    /// term. If `ignore` is 1, a row with the label [`IGNORED`] has no loss, and its gradients are
    /// 0.
    ///
    /// Shapes: `logits`, `dlogits`: `[rows, classes]`, `labels`: `[rows]`, `losses`: one for each
    /// block of [`loss_rows`] rows. Rows with `labels[r] >= classes` give NaN. Overwrites `losses`
    /// and, if `gradients` is 1, `dlogits`. Otherwise `dlogits` is empty.
    cross_entropy<S: Stored> { cross_entropy_f32: f32; cross_entropy_bf16: bf16; }
    unsafe fn(
        logits: &[S],
        labels: &[u32],
        classes: usize,
        weight: f32,
        scale: f32,
        smoothing: f32,
        ignore: u32,
        gradients: u32,
        losses: *mut f32,
        dlogits: *mut S,
    ) {
        let block = thread::block_idx_x() as usize;
        // SAFETY: the row lies inside each argument, and its lanes stay converged. All threads
        // reach the block's reduction.
        unsafe {
            let target = Target { weight, smoothing, ignore: ignore != 0, gradients: gradients != 0 };
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
    // SAFETY: `logits` has whole rows of `classes`, `dlogits` is as long if it is written, `labels`
    // has one for each row, and `losses` one for each block of rows. A thread accesses a row only
    // if it begins inside `logits`, and uses a label as an index only if it is a class.
    contract unsafe { block: BLOCK, shared: REDUCTIONS * REDUCTION_BYTES } |k| {
        Violation::unless(k.classes <= u32::MAX as usize, "classes", "less than 2^32", k.classes)?;
        let rows = crate::warp::rows_in("logits", k.logits.len(), k.classes)?;
        Violation::unless_length("labels", rows, k.labels.len())?;
        Violation::unless_length("losses", rows.div_ceil(loss_rows(k.classes)), k.losses.len())?;
        let written = if k.gradients == 0 { 0 } else { k.logits.len() };
        Violation::unless_length("dlogits", written, k.dlogits.len())?;
        Grid::cover(rows, loss_rows(k.classes))
    }
}

family! {
    /// Computes the loss of each row, or the gradients of its logits, as [`cross_entropy`] does
    /// for a sum of all rows:
    ///
    /// ```text
    /// losses[r] = log(t) - (logits[r, labels[r]] - m)               if `gradients` is 0
    /// dlogits[r, c] = dlosses[r] (p[r, c] - [c = labels[r]])        if `gradients` is 1
    /// ```
    /// Shapes: `logits`, `dlogits`: `[rows, classes]`, `labels`, `losses`, `dlosses`: `[rows]`. A
    /// row with the label [`IGNORED`] has the loss 0, and its gradients are 0. Other rows with
    /// `labels[r] >= classes` give NaN. If `gradients` is 1, `losses` is empty. Otherwise `dlosses`
    /// and `dlogits` are. Overwrites the others.
    ///
    /// [`cross_entropy`]: struct@cross_entropy
    cross_entropy_of_rows<S: Stored> { cross_entropy_of_rows_f32: f32; cross_entropy_of_rows_bf16: bf16; }
    unsafe fn(
        logits: &[S],
        labels: &[u32],
        classes: usize,
        gradients: u32,
        dlosses: &[f32],
        losses: *mut f32,
        dlogits: *mut S,
    ) {
        let block = thread::block_idx_x() as usize;
        // SAFETY: the row lies inside each argument that is not empty, and its lanes stay
        // converged. All threads of a long row's block compute it together.
        unsafe {
            let target = |row: usize| {
                let weight = if gradients != 0 { load(dlosses, row) } else { 1.0 };
                Target { weight, smoothing: 0.0, ignore: true, gradients: gradients != 0 }
            };
            if classes > MOST_OF_A_WARP {
                let loss = loss_of_long_row(logits, labels, classes, target(block), dlogits);
                if gradients == 0 && thread::thread_idx_x() == 0 {
                    store(losses, block, loss);
                }
            } else if let Some(row) = Row::after(block * loss_rows(classes), logits.len(), classes) {
                let (number, target) = (row.number, target(row.number));
                let is_first = row.is_first_lane();
                let loss = with_held!(row, classes, loss_of_row(logits, labels, classes, target, dlogits));
                if gradients == 0 && is_first {
                    store(losses, number, loss);
                }
            }
        }
    }
    // SAFETY: `logits` has whole rows of `classes`. `labels`, `losses` and `dlosses` have one for
    // each row, unless they are empty and not accessed, and `dlogits` is as long as `logits` if it
    // is written. A thread accesses a row only if it begins inside `logits`, and uses a label as an
    // index only if it is a class.
    contract unsafe { block: BLOCK, shared: REDUCTIONS * REDUCTION_BYTES } |k| {
        Violation::unless(k.classes <= u32::MAX as usize, "classes", "less than 2^32", k.classes)?;
        let rows = crate::warp::rows_in("logits", k.logits.len(), k.classes)?;
        Violation::unless_length("labels", rows, k.labels.len())?;
        let [losses, dlosses, dlogits] = if k.gradients == 0 { [rows, 0, 0] } else { [0, rows, k.logits.len()] };
        Violation::unless_length("losses", losses, k.losses.len())?;
        Violation::unless_length("dlosses", dlosses, k.dlosses.len())?;
        Violation::unless_length("dlogits", dlogits, k.dlogits.len())?;
        Grid::cover(rows, loss_rows(k.classes))
    }
}

/// The label of rows without a loss, if `ignore` is 1.
pub const IGNORED: u32 = u32::MAX;

/// The maximum of classes for which a warp's lanes share a row. Longer rows have a whole block.
const MOST_OF_A_WARP: usize = 4096;
/// The reductions over the block's threads: of losses and, for a long row, of its maximum, its sum,
/// and the smoothing term.
const REDUCTIONS: u32 = 4;

/// Returns the shared memory of one reduction. Each has its own, so that none waits until another
/// has been read.
#[inline(always)]
unsafe fn reduction(number: u32) -> SharedTile<f32> {
    // SAFETY: the contract declares the shared memory of all reductions.
    unsafe { SharedTile::new(number * REDUCTION_BYTES, REDUCTION_BYTES / 4) }
}

/// The settings of the targets.
#[derive(Clone, Copy)]
struct Target {
    weight: f32,
    smoothing: f32,
    ignore: bool,
    /// True if gradients are written.
    gradients: bool,
}

/// A row's label, and the terms of the loss and gradients that depend on it.
#[derive(Clone, Copy)]
struct Labelled {
    label: u32,
    /// The label's logit. If the label is not a class, logit and weight are NaN, and so are the
    /// row's loss and gradients.
    logit: f32,
    weight: f32,
    /// The target's shares: of the label, and of each class. Without smoothing they are 1 and 0,
    /// which change no bit.
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
        Target { weight, smoothing, ignore, .. }: Target,
    ) -> Self {
        // SAFETY: the caller guarantees that the row lies inside. The label is checked before it
        // becomes an index.
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

    /// Returns the gradients of the four logits from `column` on, from their exponentials and the
    /// inverse of the row's sum.
    #[inline(always)]
    fn gradients(self, exps: F4, inverse: f32, column: usize) -> F4 {
        let [a, b, c, d] = (exps * F4::splat(inverse) - F4::splat(self.of_each)).0;
        let place_of_label = self.label.wrapping_sub(column as u32);
        let less = |place, p| if place == place_of_label { p - self.of_label } else { p };
        let gradients = F4([less(0, a), less(1, b), less(2, c), less(3, d)]) * F4::splat(self.weight);
        if self.is_ignored { F4::splat(0.0) } else { gradients }
    }

    /// Returns the row's loss, from its largest logit m, the sum of its exponentials and, with
    /// smoothing, the sum of all `logits - m`.
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

/// Writes a row's gradients, if they are wanted. Returns its loss in its first lane, and 0 in the
/// others.
///
/// # Safety
/// The row lies inside `logits`, `labels` and, if gradients are wanted, `dlogits`.
#[inline(always)]
unsafe fn loss_of_row<const REGS: usize, S: Stored>(
    row: Row,
    logits: &[S],
    labels: &[u32],
    classes: usize,
    target: Target,
    dlogits: *mut S,
) -> f32 {
    // SAFETY: the row lies inside the arguments.
    unsafe {
        let labelled = Labelled::of_row(row.number, row.start, logits, labels, classes, target);
        let exps = Exps::<REGS, _>::new(row, logits, classes);
        if target.gradients {
            let inverse = 1.0 / exps.sum;
            for_each_vector!(REGS, row, classes, |at, column, part| {
                let gradients = labelled.gradients(exps.get(at, column, part), inverse, column);
                gradients.store_part(dlogits, row.start + column, part);
            });
        }
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

/// Computes the loss of a row that the block shares, and returns it in the first thread. Each
/// thread sums its columns, ascending, a vector's four as ((0 + 1) + (2 + 3)); then the block's
/// threads are reduced.
///
/// # Safety
/// The block's row lies inside `logits`, `labels` and, if gradients are wanted, `dlogits`. All
/// threads of the block call it together.
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
    // SAFETY: the caller guarantees that the row lies inside the arguments and that all threads of
    // the block execute this.
    unsafe {
        let labelled = Labelled::of_row(number, start, logits, labels, classes, target);
        let mut most = F4::splat(f32::NEG_INFINITY);
        for_each_vector!(row, classes, |column, part| {
            most = most.zip(F4::load_part(logits, start + column, part, f32::NEG_INFINITY), larger);
        });
        // `larger` may drop a NaN. The sum propagates it.
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
        if target.gradients || target.smoothing != 0.0 {
            for_each_vector!(row, classes, |column, part| {
                let value = F4::load_part(logits, start + column, part, f32::NEG_INFINITY) - F4::splat(largest);
                if target.gradients {
                    let gradients = labelled.gradients(map4!(value, math::exp_negative), inverse, column);
                    gradients.store_part(dlogits, start + column, part);
                }
                differences = differences + value.only(part);
            });
        }
        let smoothed =
            if target.smoothing != 0.0 { Some(block_combine(reduction(3), sum4(differences), add)) } else { None };
        if thread::thread_idx_x() == 0 { labelled.loss(largest, sum, smoothed) } else { 0.0 }
    }
}

/// Returns the rows that a block of [`cross_entropy`](struct@cross_entropy) has.
#[inline(always)]
pub fn loss_rows(classes: usize) -> usize {
    if classes > MOST_OF_A_WARP { 1 } else { rows_at_once(BLOCK, classes) }
}

/// The kernel's `function` for the squared difference.
pub const SQUARED_ERROR: u32 = 0;
/// The kernel's `function` for the cross-entropy of a probability and a logit, in the form that
/// neither overflows nor cancels.
pub const BINARY_CROSS_ENTROPY: u32 = 1;

family! {
    /// Computes a loss of each element, selected by `function`, with d = x - target:
    ///
    /// ```text
    /// SQUARED_ERROR            loss = d^2
    ///                          dx = 2 weight d
    /// BINARY_CROSS_ENTROPY     loss = max(x, 0) - x target + log(1 + e^-|x|)
    ///                          dx = weight (1 / (1 + e^-x) - target)
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
        // SAFETY: the vectors lie inside `x`, and `target` and `dx` are as long. A block has an
        // element in `losses`; all of its threads reach this.
        unsafe {
            let mut index = first;
            while index < x.len() && index < first + CHUNK {
                let left = x.len() - index;
                let part = if left >= F4::LEN { VectorPart::Whole } else { VectorPart::First(left) };
                let (x, target) = (F4::load_part(x, index, part, 0.0), F4::load_part(target, index, part, 0.0));
                let (loss, gradient) = if function == SQUARED_ERROR {
                    let difference = x - target;
                    (difference * difference, difference * F4::splat(2.0 * weight))
                } else {
                    let loss = map4!(x, math::rectified) - x * target + map4!(x, math::log_and_1_of_exp);
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
    // SAFETY: a block accesses only the part of its own chunk inside `x`. `target` and `dx` are as
    // long, and `losses` has an element for each chunk.
    contract unsafe { block: BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless(k.function <= BINARY_CROSS_ENTROPY, "function", "the number of a function of this module", k.function)?;
        Violation::unless_length("target", k.x.len(), k.target.len())?;
        Violation::unless_length("losses", k.x.len().div_ceil(CHUNK), k.losses.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Grid::cover(k.x.len(), CHUNK)
    }
}
