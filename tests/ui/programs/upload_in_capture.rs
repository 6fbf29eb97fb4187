//! A recorded step cannot upload.

use stepscope::{Arena, HostInputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &HostInputs::new(), |step, (), _| {
        let x = step.upload(&[1.0f32; 4], [4])?;
        ops::scale(step, &x, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
