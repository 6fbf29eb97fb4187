//! Dropout (Srivastava et al., 2014), whose random numbers are drawn again in backward.
//!
//! Invariant: what is dropped follows from the numbers of the call and the element's place.

use super::generator::Draw;
use crate::autograd::{Tape, Var};
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::dropout as kernel;

/// `y = 0` with probability `p`, else `x / (1 - p)`, element by element; `x`, `y`: any shape of at most 2^34 elements. The same call on the
/// gradient of y is the backward pass: it draws the same numbers.
///
/// Queued, one launch, no scratch; same bits on every device. Element i has word `i mod 4` of Philox4x32-10 with the seed as key and `(i / 4, call,
/// step)` as counter; it is dropped where that is below `p 2^32`.
///
/// # Errors
/// [`Error::Misuse`] for a p that is not in `[0, 1)`; [`Error::ArenaFull`].
#[track_caller]
pub fn dropout<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    p: f32,
    draw: &Draw<'s>,
) -> Result<Tensor<'s, S>> {
    check(p)?;
    // A product with a power of two: exact.
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
    /// [`ops::dropout`] by the next numbers of the tape's generator; `x`, result: any shape. Backward draws them again: nothing is kept.
    /// On a tape that evaluates, x itself.
    ///
    /// # Errors
    /// Those of the op; [`Error::Misuse`] on a tape that neither has a generator nor evaluates.
    #[track_caller]
    pub fn dropout<S: Stored>(&self, x: &Var<'s, S>, p: f32) -> Result<Var<'s, S>> {
        let op = self.op("dropout", [x])?;
        check(p)?;
        let Some(draws) = self.draws().map_err(|error| error.in_op("dropout"))? else { return Ok(*x) };
        let draw = draws.next();
        let (y, x) = (ops::dropout(self.step(), x.value(), p, &draw)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::dropout(back.step(), &dy, p, &draw)?;
            back.step().give_back(dy);
            back.add(&x, dx)
        }))
    }
}
