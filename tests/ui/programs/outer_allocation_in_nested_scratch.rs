//! While a nested scratch is open, the scratch around it cannot allocate.

use stepscope::{Arena, Result, Step};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        step.scratch(|inner| {
            let outer: &Step<'_> = inner;
            inner.scratch(|_| {
                let _x = outer.empty::<f32>([1])?;
                Ok(())
            })
        })
    })
}

fn main() {}
