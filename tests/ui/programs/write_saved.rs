//! A saved tensor cannot be written.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut saved = step.upload(&[1.0f32], [1])?.save();
        ops::fill_into(step, &mut saved, 0.0)
    })
}

fn main() {}
