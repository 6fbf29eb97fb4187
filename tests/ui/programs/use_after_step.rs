//! A closure that holds a tensor cannot be called after the step.

use stepscope::tensor::Shape;
use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    let mut later: Vec<Box<dyn Fn() -> Shape>> = Vec::new();
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        later.push(Box::new(move || x.shape()));
        Ok(())
    })?;
    println!("{}", later[0]());
    Ok(())
}

fn main() {}
