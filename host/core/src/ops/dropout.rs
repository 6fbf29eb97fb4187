//! Dropout (Srivastava et al., 2014), which draws the same random numbers again in the backward
//! pass.
//!
//! Invariant: the dropped elements depend only on the call's random numbers and the element's
//! index.

use crate::error::{Error, Result};
use crate::generator::Draw;
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::dropout as kernel;

/// `y = 0` with probability `p`, otherwise `x / (1 - p)`, elementwise; `x`, `y`: any shape of at
/// most 2^34 elements. Calling it again on the gradient of y is the backward pass, because it draws
/// the same numbers.
///
/// Queued, one launch; no scratch. The result has the same bits on every device. Element i uses
/// word `i mod 4` of Philox4x32-10, with the seed as key and `(i / 4, call, step)` as counter. It
/// is dropped if that word is below `p 2^32`.
///
/// # Errors
/// [`Error::Misuse`] for a p outside `[0, 1)`; [`Error::ArenaFull`].
#[track_caller]
pub fn dropout<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    p: f32,
    draw: &Draw<'s>,
) -> Result<Tensor<'s, S>> {
    check(p)?;
    // Exact, because it is a product with a power of two.
    let threshold = (f64::from(p) * 2f64.powi(32)) as u32;
    let mut y = step.empty(x.shape())?;
    step.launch(kernel::dropout {
        x: x.slice(),
        draw: draw.draw.slice(),
        call: draw.call,
        threshold,
        scale: 1.0 / (1.0 - p),
        y: y.out(),
    })?;
    Ok(y)
}

fn check(p: f32) -> Result<()> {
    if (0.0..1.0).contains(&p) {
        return Ok(());
    }
    Err(Error::misuse("dropout", "a probability in [0, 1)", p.to_string()))
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::dropout`] with the next numbers of the tape's generator; `x`, result: any
    /// shape. Backward draws the numbers again, so nothing is kept. On an evaluation tape the
    /// result is x itself.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a tape that has no generator and is not for an evaluation.
    #[track_caller]
    pub fn dropout<S: Stored>(&self, x: &Var<'s, S>, p: f32) -> Result<Var<'s, S>> {
        let op = self.op("dropout", [x])?;
        check(p)?;
        let Some(draws) = self.draws().map_err(|error| error.in_op("dropout"))? else { return Ok(*x) };
        let draw = draws.next();
        let (y, x) = (ops::dropout(self.step(), x.value(), p, &draw)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::dropout(back.step(), &dy, p, &draw)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
