//! A saved tensor, although it is `Copy`, cannot leave its step either.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let _escaped = arena.step(|step| Ok(step.upload(&[1.0f32], [1])?.save()))?;
    Ok(())
}

fn main() {}
