//! A saved tensor cannot be freed.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?.save();
        step.free(x);
        Ok(())
    })
}

fn main() {}
