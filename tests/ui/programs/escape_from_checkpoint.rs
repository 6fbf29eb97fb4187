//! A tensor of a recomputed closure cannot leave it through a variable outside.

use std::cell::RefCell;
use std::rc::Rc;
use stepscope::{Arena, Parameters, Result, Tape, Var};

fn run(arena: &mut Arena, parameters: &Parameters) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let x = tape.input(step.upload(&[1.0f32], [1])?);
        let escaped = Rc::new(RefCell::new(Vec::<Var>::new()));
        tape.recompute(x, move |_, x| {
            let y = x.mul(2.0)?;
            escaped.borrow_mut().push(y);
            Ok(y)
        })?;
        Ok(())
    })
}

fn main() {}
