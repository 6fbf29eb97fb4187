//! Cross-entropy of logits and class labels, forward and backward.
//!
//! Invariant: a label that is no class reads nothing out of bounds; its loss and its gradients are NaN, so that it
//! cannot be trained on unseen.

use crate::block::divide;
use crate::math;
use crate::vector::{F4, load, store};
use crate::warp::{Row, max};
use crate::{contract, for_each_vector, for_own_vector, map4};
use cuda_std::prelude::*;

/// `losses[r] = log(sum_c exp(logits[r, c])) - logits[r, labels[r]]` and probabilities = softmax(logits), both less the
/// row's maximum first; `logits`, `probabilities`: `[rows, classes]`, `labels`, `losses`: `[rows]`. The loss is NaN
/// where `labels[r] >= classes`. Overwrites `probabilities` and `losses`.
#[kernel]
pub unsafe fn cross_entropy_forward(
    logits: &[f32],
    labels: &[u32],
    classes: usize,
    probabilities: *mut f32,
    losses: *mut f32,
) {
    let Some(row) = Row::new(logits.len(), classes) else { return };
    let mut largest = F4::splat(f32::NEG_INFINITY);
    let mut sum = F4::splat(0.0);
    // SAFETY: the row lies inside each argument, the label is checked; its lanes stay together.
    unsafe {
        for_each_vector!(row, classes, |column, part| {
            largest = largest.zip(F4::load_part(logits, row.start + column, part, f32::NEG_INFINITY), max);
        });
        let largest = row.max(largest);
        for_each_vector!(row, classes, |column, part| {
            let logits = F4::load_part(logits, row.start + column, part, f32::NEG_INFINITY);
            sum = sum + map4!(logits - F4::splat(largest), math::exp);
        });
        let total = row.sum(sum);
        let inverse = 1.0 / total;
        for_each_vector!(row, classes, |column, part| {
            let logits = F4::load_part(logits, row.start + column, part, 0.0);
            let exps = map4!(logits - F4::splat(largest), math::exp);
            (exps * F4::splat(inverse)).store_part(probabilities, row.start + column, part);
        });
        if row.is_first_lane() {
            let label = load(labels, row.number) as usize;
            let loss =
                if label < classes { math::log(total) - (load(logits, row.start + label) - largest) } else { f32::NAN };
            store(losses, row.number, loss);
        }
    }
}

contract! { cross_entropy_forward { block: crate::warp::ROW_BLOCK } |k| {
    let rows = crate::warp::rows_in("logits", k.logits.len(), k.classes)?;
    Violation::unless_length("labels", rows, k.labels.len())?;
    Violation::unless_length("probabilities", k.logits.len(), k.probabilities.len())?;
    Violation::unless_length("losses", rows, k.losses.len())?;
    crate::warp::Row::grid("logits", k.logits.len(), k.classes)
}}

/// `dlogits[r, c] = (probabilities[r, c] - [c = labels[r]]) (scale upstream[0])`; `probabilities`, `dlogits`:
/// `[rows, classes]`, `labels`: `[rows]`, `upstream`: `[1]`, the gradient of the loss. NaN in rows with
/// `labels[r] >= classes`. Overwrites `dlogits`.
#[kernel]
pub unsafe fn cross_entropy_backward(
    probabilities: &[f32],
    labels: &[u32],
    classes: usize,
    scale: f32,
    upstream: &[f32],
    dlogits: *mut f32,
) {
    for_own_vector!(probabilities.len(), |index, part| {
        // SAFETY: the vector lies inside `probabilities` and `dlogits`; an element's row inside `labels`.
        unsafe {
            let factor = scale * load(upstream, 0);
            let [a, b, c, d] = F4::load_part(probabilities, index, part, 0.0).0;
            let gradient = |at, probability| gradient(probability, index + at, labels, classes) * factor;
            let a = gradient(0, a);
            let b = if part.count() > 1 { gradient(1, b) } else { 0.0 };
            let c = if part.count() > 2 { gradient(2, c) } else { 0.0 };
            let d = if part.count() > 3 { gradient(3, d) } else { 0.0 };
            F4([a, b, c, d]).store_part(dlogits, index, part);
        }
    });
}

contract! { cross_entropy_backward { block: crate::block::BLOCK } |k| {
    let rows = crate::warp::rows_in("probabilities", k.probabilities.len(), k.classes)?;
    Violation::unless_length("labels", rows, k.labels.len())?;
    Violation::unless_length("upstream", 1, k.upstream.len())?;
    Violation::unless_length("dlogits", k.probabilities.len(), k.dlogits.len())?;
    crate::block::vector_grid(k.probabilities.len())
}}

/// `probability` less 1 where the element at `index` is the label's, NaN where the label is no class.
///
/// # Safety
/// The element lies in a row that has a label, and `classes` is not 0.
#[inline(always)]
unsafe fn gradient(probability: f32, index: usize, labels: &[u32], classes: usize) -> f32 {
    // SAFETY: the caller's contract.
    let (label, column) = unsafe {
        let (row, column) = divide(index, classes);
        (load(labels, row) as usize, column)
    };
    let target = if column == label { 1.0 } else { 0.0 };
    if label < classes { probability - target } else { f32::NAN }
}
