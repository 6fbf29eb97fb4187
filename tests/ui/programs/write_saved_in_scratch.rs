//! A scratch cannot write a saved tensor either.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut saved = step.upload(&[1.0f32], [1])?.save();
        step.scratch(|inner| {
            let _target = inner.lend_mut(&mut saved);
            Ok(())
        })
    })
}

fn main() {}
