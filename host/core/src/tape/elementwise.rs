//! Sums, differences, products and multiples of variables on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;
use crate::tensor::Stored;

impl<'s> Tape<'_, 's> {
    /// `y = a + b`; `a`, `b`, `y`: the same shape. See [`ops::add`].
    ///
    /// If a matrix multiply produces one of them, [`Tape::linear_residual`] adds the other in the
    /// same launch.
    #[track_caller]
    pub fn add<S: Stored>(&self, a: &Var<'s, S>, b: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("add", [a, b])?;
        let y = ops::add(self.step(), a.value(), b.value())?;
        let (a, b) = (*a, *b);
        Ok(op.record(y.save(), move |back, dy| back.add_to_both(&a, &b, dy)))
    }

    /// `y = a - b`; `a`, `b`, `y`: the same shape. See [`ops::sub`].
    #[track_caller]
    pub fn sub<S: Stored>(&self, a: &Var<'s, S>, b: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("sub", [a, b])?;
        let y = ops::sub(self.step(), a.value(), b.value())?;
        let (a, b) = (*a, *b);
        Ok(op.record(y.save(), move |back, dy| {
            if b.wants_gradient() {
                let db = ops::scale(back.step(), &dy, -1.0)?;
                back.add(&b, db)?;
            }
            back.add(&a, dy)
        }))
    }

    /// `y = a b`, elementwise; `a`, `b`, `y`: the same shape. See [`ops::mul`].
    #[track_caller]
    pub fn mul<S: Stored>(&self, a: &Var<'s, S>, b: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("mul", [a, b])?;
        let y = ops::mul(self.step(), a.value(), b.value())?;
        let (a, b) = (*a, *b);
        Ok(op.record(y.save(), move |back, dy| {
            for (of, by) in [(a, b), (b, a)] {
                if of.wants_gradient() {
                    let gradient = ops::mul(back.step(), &dy, by.value())?;
                    back.add(&of, gradient)?;
                }
            }
            back.step().free(dy);
            Ok(())
        }))
    }

    /// `y = factor x`; `x`, `y`: the same shape. See [`ops::scale`].
    #[track_caller]
    pub fn scale<S: Stored>(&self, x: &Var<'s, S>, factor: f32) -> Result<Var<'s, S>> {
        let op = self.op("scale", [x])?;
        let (y, x) = (ops::scale(self.step(), x.value(), factor)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::scale(back.step(), &dy, factor)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
