//! A tensor of a recorded step cannot leave it; its elements are read through an output.

use stepscope::{Arena, Inputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &Inputs::new(), |step, (), _| ops::fill(step, [4], 1.0))?;
    Ok(())
}

fn main() {}
