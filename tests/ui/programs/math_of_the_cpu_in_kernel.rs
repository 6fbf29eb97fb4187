//! A kernel has no `f32::exp`, whose bits depend on the machine; it must use `kernels::math`.

use cuda_std::prelude::*;
use kernels::vector::{load, store};

/// Computes y[0] = exp(x[0]).
#[kernel]
pub unsafe fn exponential(x: &[f32], y: *mut f32) {
    // SAFETY: x and y each have an element.
    unsafe { store(y, 0, load(x, 0).exp()) }
}

fn main() {}
