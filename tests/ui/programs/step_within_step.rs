//! An arena runs one step at a time: the inner one's end would take back the outer one's memory.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let inner = &mut *arena;
    arena.step(|_| inner.step(|_| Ok(())))
}

fn main() {}
