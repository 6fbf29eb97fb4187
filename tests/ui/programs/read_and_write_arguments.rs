//! A kernel's arguments cannot name the same tensor for reading and for writing.

use kernels::elementwise::add_assign;
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut x = step.upload(&[1.0f32], [1])?;
        step.launch(add_assign { out: x.out(), a: x.slice() })
    })
}

fn main() {}
