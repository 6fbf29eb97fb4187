//! One launch cannot read and write the same tensor.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut x = step.upload(&[1.0f32], [1])?;
        ops::add_assign(step, &mut x, &x)
    })
}

fn main() {}
