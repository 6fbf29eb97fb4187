//! A tape is consumed by its only backward pass.

use stepscope::{Arena, Gradients, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters, gradients: &mut Gradients) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let loss = tape.input(step.upload(&[1.0f32], [1])?);
        tape.backward(&loss, gradients)?;
        tape.backward(&loss, gradients)
    })
}

fn main() {}
