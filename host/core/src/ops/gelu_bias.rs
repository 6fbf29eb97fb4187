//! The gradient of GELU after a bias.

use super::{same_shape, sum_rows_into};
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::PointerMut;
use kernels::activation;

/// `dx = dy gelu'(x)` and `db = sum over rows of dx`, for an x whose last op added a bias; `x`,
/// `dy`, `dx`: `[.., cols]`, `db`: `[cols]`.
///
/// Adds to `db` when `accumulate`, otherwise overwrites it. Queued; one launch for up to 128 rows.
/// Scratch above 128 rows: f32 of a 128th of x's elements.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn gelu_bias_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
    db: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "gelu_bias_backward";
    same_shape(OP, x.shape(), dy.shape())?;
    let [rows, cols] = x.shape().as_rows();
    same_shape(OP, [cols].into(), db.shape())?;
    let mut dx = step.empty(x.shape())?;
    let mut launch = |db: PointerMut<'_, f32>, accumulate| {
        let (x, dy, dx) = (x.slice(), dy.slice(), dx.out());
        step.launch(activation::gelu_bias_backward { x, dy, cols, accumulate, dx, db })
    };
    if (1..=activation::BIAS_ROWS).contains(&rows) {
        launch(db.out(), u32::from(accumulate))?;
    } else {
        let mut partials = step.empty([rows.div_ceil(activation::BIAS_ROWS), cols])?;
        launch(partials.out(), 0)?;
        sum_rows_into(step, &partials, db, accumulate)?;
        step.free(partials);
    }
    Ok(dx)
}
