//! A step cannot be kept beyond its closure.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let mut kept = None;
    arena.step(|step| {
        kept = Some(step);
        Ok(())
    })
}

fn main() {}
