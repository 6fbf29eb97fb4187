//! A tensor cannot move to another thread.

use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let x = step.upload(&[1.0f32], [1])?;
        std::thread::scope(|scope| {
            scope.spawn(move || drop(x));
        });
        Ok(())
    })
}

fn main() {}
