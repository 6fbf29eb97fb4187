//! An update that was prepared once is not applied twice.

use stepscope::{AdamW, Arena, Gradients, Optimizer, Parameters, Result};

fn run(arena: &mut Arena, parameters: &mut Parameters, gradients: &Gradients, optimizer: &mut Optimizer<AdamW>) -> Result<()> {
    let ticket = optimizer.advance()?;
    arena.step(|step| {
        optimizer.apply(ticket, step, parameters, gradients)?;
        optimizer.apply(ticket, step, parameters, gradients)
    })
}

fn main() {}
