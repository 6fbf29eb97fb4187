//! A weight that a captured step writes is borrowed exclusively until the capture ends.

use stepscope::{Arena, Buffer, HostInputs, Result, ops};

fn run(arena: &mut Arena, weight: &mut Buffer<f32>) -> Result<()> {
    let mut captured = arena.capture(&mut *weight, &HostInputs::new(), |step, weight, _| {
        ops::fill_into(step, &mut step.lend_mut(*weight, [4])?, 2.0)
    })?;
    weight.write(0, &[1.0])?;
    captured.replay(&HostInputs::new())?;
    Ok(())
}

fn main() {}
