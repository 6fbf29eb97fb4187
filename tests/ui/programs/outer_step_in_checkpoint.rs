//! A recomputed closure cannot allocate on the step around it.

use stepscope::{Arena, Parameters, Result, Tape};

fn run(arena: &mut Arena, parameters: &Parameters) -> Result<()> {
    arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let x = tape.input(step.upload(&[1.0f32], [1])?);
        let outer = tape.step();
        tape.recompute(x, move |_, x| outer.empty::<f32>([1]).map(|_| x))?;
        Ok(())
    })
}

fn main() {}
