//! While a tape may still allocate from the step, no scratch can be opened.

use stepscope::{Arena, Gradients, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters, gradients: &mut Gradients) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let loss = tape.input(step.upload(&[1.0f32], [1])?);
        step.scratch(|_| Ok(()))?;
        tape.backward(&loss, gradients)
    })
}

fn main() {}
