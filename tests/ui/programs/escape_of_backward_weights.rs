//! Weights that a backward pass lends to an op cannot be kept for another op.

use std::cell::RefCell;
use std::rc::Rc;
use stepscope::tensor::Lent;
use stepscope::{Parameter, Result, Tape, Var};

fn kept<'t, 's>(
    tape: &Tape<'t, 's>,
    x: &Var<'s>,
    w: Parameter,
    out: Rc<RefCell<Vec<Lent<'t, 's>>>>,
) -> Result<Var<'s>> {
    let op = tape.op("kept", [x])?;
    let x = *x;
    Ok(op.record(*x.value(), move |back, dy| {
        out.borrow_mut().push(back.weights(w)?);
        back.add(&x, dy)
    }))
}

fn main() {}
