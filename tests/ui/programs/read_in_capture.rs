//! A step that is recorded cannot read: there is nothing to be read yet.

use stepscope::{Arena, Inputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &Inputs::new(), |step, (), _| {
        let x = ops::fill(step, [4], 1.0)?;
        step.read(&x).map(drop)
    })?;
    Ok(())
}

fn main() {}
