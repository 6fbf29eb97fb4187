//! A step that is recorded cannot allocate outside the arena: it does not name its device, and brings none.

use stepscope::{Arena, Buffer, Inputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &Inputs::new(), |step, (), _| {
        let other = Buffer::from_slice(step.device(), &[1.0f32; 4])?;
        ops::scale(step, &step.lend(&other, [4])?, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
