//! A recorded step uses only its state: it cannot capture a device from outside.

use stepscope::{Arena, Buffer, Device, HostInputs, Result, ops};

fn run(arena: &mut Arena, device: &Device) -> Result<()> {
    arena.capture((), &HostInputs::new(), |step, (), _| {
        let other = Buffer::from_slice(device, &[1.0f32; 4])?;
        ops::scale(step, &step.lend(&other, [4])?, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
