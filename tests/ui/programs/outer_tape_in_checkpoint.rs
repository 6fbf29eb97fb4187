//! A checkpoint's closure cannot record on the tape around it.

use stepscope::{Arena, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters) -> Result<()> {
    arena.step(|step| {
        let around = Tape::new(step, parameters);
        let x = around.input(step.upload(&[1.0f32], [1])?);
        around.checkpoint(x, |_, x| around.scale(&x, 2.0))?;
        Ok(())
    })
}

fn main() {}
