//! A checkpoint's closure sees the step's variables only as they are lent to it.

use stepscope::{Arena, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let x = tape.input(step.upload(&[1.0f32], [1])?);
        let outer = tape.scale(&x, 3.0)?;
        tape.checkpoint(x, move |tape, x| tape.add(&x, &outer))?;
        Ok(())
    })
}

fn main() {}
