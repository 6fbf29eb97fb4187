//! A tensor cannot be used in another arena's step.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena, other: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        other.step(|foreign| {
            let y = foreign.upload(&[1.0f32], [1])?;
            ops::add(step, &x, &y)?;
            Ok(())
        })
    })
}

fn main() {}
