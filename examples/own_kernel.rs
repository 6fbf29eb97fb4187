//! A custom kernel, leaky ReLU (`y = x` above zero, else `slope x`), from its function to its
//! launch in a step.
//!
//! ```text
//! cargo run --example own_kernel
//! ```
//! A build script that compiles the package to PTX makes this function run on a GPU.
//! `tests/downstream/` is a package that does so, and trains with such a kernel.

use cuda_std::prelude::*;
use kernels::contract;
use kernels::vector::{load, store};
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, Device, DeviceKind, Error, Result, Step, Tensor};

const BLOCK: usize = 128;

/// Computes `y[i] = x[i]` above zero, else `slope x[i]`; `x`, `y`: `[n]`. Overwrites `y`.
#[kernel]
pub unsafe fn leaky_relu(x: &[f32], slope: f32, y: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the index lies inside `x`, and the contract requires that `y` has the same
        // length.
        unsafe {
            let x = load(x, index);
            store(y, index, if x > 0.0 { x } else { slope * x });
        }
    }
}

// The contract checks the arguments and sets the number of blocks before a launch. It is `unsafe`
// because nothing verifies that its checks suffice.
// SAFETY: each thread accesses only the element at its own index, and only if `x` has one. Indices
// count up to 2^32, and `y` has the length of `x`.
contract! { unsafe leaky_relu { block: BLOCK, align: 4 } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    Violation::unless(k.x.len() <= u32::MAX as usize, "x", "fewer elements than `index_1d` counts", k.x.len())?;
    Grid::cover(k.x.len(), BLOCK)
}}

/// The op: allocates an output of the input's shape and launches the kernel.
fn op<'s>(step: &Step<'s>, x: &Tensor<'s>, slope: f32) -> Result<Tensor<'s>> {
    let mut y = step.empty(x.shape())?;
    step.launch(leaky_relu { x: x.slice(), slope, y: y.out() })?;
    Ok(y)
}

fn main() -> Result<()> {
    let device = Device::open(DeviceKind::Emulated)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    let y = arena.step(|step| step.read(&op(step, &step.upload(&[-8.0, -1.0, 0.0, 3.0], [4])?, 0.25)?))?;
    println!("{y:?}");
    assert_eq!(y, [-2.0, -0.25, 0.0, 3.0]);

    let refused = arena.step(|step| {
        let x = step.upload(&[1.0; 4], [4])?;
        let mut short = step.empty([3])?;
        step.launch(leaky_relu { x: x.slice(), slope: 0.25, y: short.out() })
    });
    let Err(error @ Error::Contract { .. }) = refused else { panic!("a launch beyond its output was accepted") };
    println!("refused: {error}");
    Ok(())
}
