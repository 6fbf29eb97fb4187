//! Weights cannot be dropped while a tape still needs them for backward.

use stepscope::{Arena, Gradients, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: Parameters, gradients: &mut Gradients) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, &parameters);
        let loss = tape.input(step.upload(&[1.0f32], [1])?);
        drop(parameters);
        tape.backward(&loss, gradients)
    })
}

fn main() {}
