//! A step that is recorded cannot upload.

use stepscope::{Arena, Inputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &Inputs::new(), |step, (), _| {
        let x = step.upload(&[1.0f32; 4], [4])?;
        ops::scale(step, &x, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
