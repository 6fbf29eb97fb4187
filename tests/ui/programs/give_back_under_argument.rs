//! A tensor cannot be freed while a kernel that is still to be launched names it.

use kernels::elementwise::add_assign;
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Result};

fn run(arena: &mut Arena) -> Result<()> {
    arena.step(|step| {
        let mut x = step.upload(&[1.0f32], [1])?;
        let y = step.upload(&[1.0f32], [1])?;
        let kernel = add_assign { out: x.out(), a: y.slice() };
        step.free(y);
        step.launch(kernel)
    })
}

fn main() {}
