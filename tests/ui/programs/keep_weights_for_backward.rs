//! Weights that an op lends cannot be kept for its backward pass.

use stepscope::{Parameter, Result, Step, Tape, Var, ops};

fn doubled<'s>(tape: &Tape<'_, 's>, step: &Step<'s>, x: &Var<'s>, w: Parameter) -> Result<Var<'s>> {
    let op = tape.op("doubled", [x])?;
    let weights = op.weights(w)?;
    let (y, x) = (ops::mul(step, x.value(), &weights)?, *x);
    Ok(op.record(y.save(), move |back, dy| {
        let dx = ops::mul(back.step(), &dy, &weights)?;
        back.add(&x, dx)
    }))
}

fn main() {}
