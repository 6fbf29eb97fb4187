//! A scratch's tensor cannot become a tensor of the step.

use stepscope::{Arena, Result, Tensor};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut escaped: Vec<Tensor<'_>> = vec![step.empty([1])?];
        step.scratch(|inner| {
            escaped.push(inner.empty([1])?);
            Ok(())
        })
    })
}

fn main() {}
