//! Saving consumes the unique tensor: it cannot be written afterwards under its old name.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut x = step.upload(&[1.0f32], [1])?;
        let _saved = x.save();
        ops::fill_into(step, &mut x, 0.0)
    })
}

fn main() {}
