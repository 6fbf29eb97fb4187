//! Another thread cannot use a tensor, even if it ends within the step.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?.save();
        std::thread::scope(|scope| {
            scope.spawn(|| x.shape());
        });
        Ok(())
    })
}

fn main() {}
