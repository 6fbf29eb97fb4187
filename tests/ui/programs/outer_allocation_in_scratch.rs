//! While a scratch is open, its step cannot allocate: the scratch's end would free that memory.

use stepscope::{Arena, Result, Step};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let outer: &Step<'_> = step;
        step.scratch(|_| {
            let _x = outer.empty::<f32>([1])?;
            Ok(())
        })
    })
}

fn main() {}
