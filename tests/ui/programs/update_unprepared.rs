//! An update is not applied without the ticket of its preparation.

use stepscope::{AdamW, Arena, Gradients, Optimizer, Parameters, Result};

fn run(arena: &mut Arena, parameters: &mut Parameters, gradients: &Gradients, optimizer: &mut Optimizer<AdamW>) -> Result<()> {
    arena.step(|step| optimizer.apply(step, parameters, gradients))
}

fn main() {}
