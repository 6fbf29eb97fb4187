//! A recomputed closure cannot capture variables of the step around it: they are lent to it.

use stepscope::{Arena, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let x = tape.input(step.upload(&[1.0f32], [1])?);
        let outer = x.mul(3.0)?;
        tape.recompute(x, move |_, x| {
            assert_eq!(x.shape(), outer.shape());
            x.mul(2.0)
        })?;
        Ok(())
    })
}

fn main() {}
