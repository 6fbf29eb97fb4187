//! A recorded step cannot run another step of its arena.

use stepscope::{Arena, HostInputs, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture(&mut *arena, &HostInputs::new(), |_, arena, _| arena.step(|_| Ok(())))?;
    Ok(())
}

fn main() {}
