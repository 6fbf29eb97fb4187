//! A scratch's tensor cannot leave it as the closure's result.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let _escaped = step.scratch(|inner| inner.empty::<f32>([1]))?;
        Ok(())
    })
}

fn main() {}
