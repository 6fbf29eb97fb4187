//! A tensor lent to a scratch for reading cannot be written there.

use stepscope::{Arena, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        step.scratch(|inner| ops::fill_into(inner, &mut inner.lend(&x), 0.0))
    })
}

fn main() {}
