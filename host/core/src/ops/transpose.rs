//! Transposes of matrices, and swaps of any two extents.

use super::broadcast::strides_of;
use super::views::{Places, taken};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::transpose as kernel;

/// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. Queues the work,
/// and needs no scratch memory. A product can transpose its operands without this op; see
/// [`Gemm`](super::Gemm).
///
/// # Errors
/// [`Error::Misuse`] for fewer than two extents; [`Error::ArenaFull`].
#[track_caller]
pub fn transpose<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let shape = x.shape();
    let [.., rows, cols] = *shape.extents() else {
        return Err(Error::misuse("transpose", "at least two extents", shape.to_string()));
    };
    let last = shape.extents().len() - 1;
    let shape = shape.with(last - 1, cols).with(last, rows);
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::transpose { x: x.slice(), rows, cols, y: y.out() })?;
    }
    Ok(y)
}

/// Swaps the extents number `a` and `b`, such as heads and tokens; `x`: any shape, `y`: the shape
/// with these extents swapped. Queued, one launch; no scratch. The gradient is the same swap of dy.
///
/// # Errors
/// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
#[track_caller]
pub fn swap_extents<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    a: usize,
    b: usize,
) -> Result<Tensor<'s, S>> {
    let rank = x.shape().extents().len();
    if a.max(b) >= rank {
        let expected = format!("a tensor with an extent number {}", a.max(b));
        return Err(Error::misuse("swap_extents", expected, x.shape().to_string()));
    }
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(a, b);
    permuted(step, x, &order)
}

/// Returns x with the extents of these numbers, in this order; each number is there once.
pub(super) fn permuted<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    order: &[usize],
) -> Result<Tensor<'s, S>> {
    let rank = order.len();
    if rank >= 2 && order[rank - 2..] == [rank - 1, rank - 2] && order[..rank - 2].is_sorted() {
        return transpose(step, x);
    }
    let (mut to, strides) = (x.shape(), strides_of(x.shape()));
    for (at, &from) in order.iter().enumerate() {
        to = to.with(at, x.shape().extents()[from]);
    }
    taken(step, to, x, &Places { start: 0, strides: order.iter().map(|&from| strides[from]).collect() })
}
