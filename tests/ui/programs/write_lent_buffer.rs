//! The host cannot write a buffer while it is lent to a step.

use stepscope::{Arena, Buffer, Result, ops};

fn run(arena: &mut Arena, buffer: &mut Buffer<f32>) -> Result<()> {
    arena.step(|step| {
        let lent = step.lend(buffer, [1])?;
        buffer.write(0, &[2.0])?;
        let _y = ops::tanh(step, &lent)?;
        Ok(())
    })
}

fn main() {}
