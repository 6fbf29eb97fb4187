//! A scratch can use the step's tensors only if they are lent to it.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        step.scratch(|inner| {
            let _y = ops::tanh(inner, &x)?;
            Ok(())
        })
    })
}

fn main() {}
