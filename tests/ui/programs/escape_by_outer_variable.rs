//! A tensor cannot leave its step through a variable outside.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let mut escaped = None;
    arena.step(|step| {
        escaped = Some(step.upload(&[1.0f32], [1])?);
        Ok(())
    })
}

fn main() {}
