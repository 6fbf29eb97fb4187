//! A recorded step cannot read, because nothing has been computed yet.

use stepscope::{Arena, HostInputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &HostInputs::new(), |step, (), _| {
        let x = ops::fill(step, [4], 1.0)?;
        step.read(&x).map(drop)
    })?;
    Ok(())
}

fn main() {}
