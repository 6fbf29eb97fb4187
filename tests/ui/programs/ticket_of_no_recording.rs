//! A ticket for each replay exists only while a step is recorded.

use stepscope::optim::UpdateTicket;
use stepscope::{AdamW, Arena, Gradients, Optimizer, Parameters, Result};

fn run(arena: &mut Arena, parameters: &mut Parameters, gradients: &Gradients, optimizer: &mut Optimizer<AdamW>) -> Result<()> {
    arena.step(|step| optimizer.apply(UpdateTicket::each_replay(step), step, parameters, gradients))
}

fn main() {}
