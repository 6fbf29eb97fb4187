//! One op in a step: the softmax of two rows.
//!
//! ```text
//! cargo run --example one_op          # on the GPU if there is one, else on the emulator
//! ```

#![forbid(unsafe_code)]

use stepscope::{Arena, Capacity, Device, DeviceKind, Result, ops};

fn main() -> Result<()> {
    let device = Device::open(DeviceKind::Auto)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    let shares = arena.step(|step| {
        let x = step.upload(&[0.0, 1.0, 2.0, 5.0, 5.0, 5.0], [2, 3])?; // a tensor of this step
        let y = ops::softmax(step, &x)?; // queued
        step.read(&y) // waits; host values may leave the step, tensors may not
    })?;
    for row in shares.chunks(3) {
        println!("{row:.4?}");
    }
    Ok(())
}
