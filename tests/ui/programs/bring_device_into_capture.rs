//! A step that is recorded uses nothing but its state: a device from around it cannot be brought in.

use stepscope::{Arena, Buffer, Device, Inputs, Result, ops};

fn run(arena: &mut Arena, device: &Device) -> Result<()> {
    arena.capture((), &Inputs::new(), |step, (), _| {
        let other = Buffer::from_slice(device, &[1.0f32; 4])?;
        ops::scale(step, &step.lend(&other, [4])?, 2.0).map(drop)
    })?;
    Ok(())
}

fn main() {}
