//! A weight cannot be dropped while a captured step holds it.

use stepscope::{Arena, Buffer, HostInputs, Result, ops};

fn run(arena: &mut Arena, weight: Buffer<f32>) -> Result<()> {
    let mut captured = arena.capture(&weight, &HostInputs::new(), |step, weight, _| {
        ops::scale(step, &step.lend(*weight, [4])?, 2.0).map(drop)
    })?;
    drop(weight);
    captured.replay(&HostInputs::new())?;
    Ok(())
}

fn main() {}
