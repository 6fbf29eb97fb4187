//! Weights cannot be updated while a tape still needs the old ones for backward.

use stepscope::{AdamW, Arena, Gradients, Optimizer, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &mut Parameters, gradients: &mut Gradients, optimizer: &mut Optimizer<AdamW>) -> Result<()> {
    let ticket = optimizer.advance()?;
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let loss = tape.input(step.upload(&[1.0f32], [1])?);
        optimizer.apply(ticket, step, parameters, gradients)?;
        tape.backward(&loss, gradients)
    })
}

fn main() {}
