//! An arena runs one step at a time: the inner step's end would free the outer step's memory.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let inner = &mut *arena;
    arena.step(|_| inner.step(|_| Ok(())))
}

fn main() {}
