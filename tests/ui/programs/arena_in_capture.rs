//! A step that is recorded cannot run another step of its arena.

use stepscope::{Arena, Inputs, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture(&mut *arena, &Inputs::new(), |_, arena, _| arena.step(|_| Ok(())))?;
    Ok(())
}

fn main() {}
