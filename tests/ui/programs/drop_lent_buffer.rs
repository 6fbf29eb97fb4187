//! A buffer cannot be dropped while it is lent to a step.

use stepscope::{Arena, Buffer, Result, ops};

fn run(arena: &mut Arena, buffer: Buffer<f32>) -> Result<()> {
    arena.step(|step| {
        let lent = step.lend(&buffer, [1])?;
        drop(buffer);
        let _y = ops::tanh(step, &lent)?;
        Ok(())
    })
}

fn main() {}
