//! A tensor cannot leave its step as the closure's result.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let _escaped = arena.step(|step| step.upload(&[1.0f32], [1]))?;
    Ok(())
}

fn main() {}
