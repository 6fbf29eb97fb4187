//! Matrices transposed.

use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Shape, Source, Target, Tensor};
use kernels::transpose as kernel;

/// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. Queued, no scratch. A product transposes its factors
/// by itself: see [`Gemm`](super::Gemm).
///
/// # Errors
/// [`Error::Misuse`] for fewer than two extents; [`Error::ArenaFull`].
#[track_caller]
pub fn transpose<'s>(step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s>> {
    let (rows, cols, shape): (_, _, Shape) = match *x.shape().extents() {
        [rows, cols] => (rows, cols, [cols, rows].into()),
        [a, rows, cols] => (rows, cols, [a, cols, rows].into()),
        [a, b, rows, cols] => (rows, cols, [a, b, cols, rows].into()),
        _ => return Err(Error::misuse("transpose", "at least two extents", x.shape().to_string())),
    };
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::transpose { x: x.slice(), rows, cols, y: y.out() })?;
    }
    Ok(y)
}
