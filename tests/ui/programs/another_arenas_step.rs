//! A step cannot work on a tensor of another arena, which is freed at another time.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena, other: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        other.step(|foreign| {
            let _y = ops::tanh(foreign, &x)?;
            Ok(())
        })
    })
}

fn main() {}
