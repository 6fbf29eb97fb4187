//! A recorded step cannot allocate outside the arena: it has no access to a device.

use stepscope::{Arena, Buffer, HostInputs, Result, ops};

fn run(arena: &mut Arena) -> Result<()> {
    arena.capture((), &HostInputs::new(), |step, (), _| {
        let other = Buffer::from_slice(step.device(), &[1.0f32; 4])?;
        ops::scale(step, &step.lend(&other, [4])?, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
