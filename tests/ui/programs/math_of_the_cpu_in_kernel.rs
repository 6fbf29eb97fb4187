//! A kernel has no `f32::exp`, whose bits are the machine's: `kernels::math` has functions of its own.

use cuda_std::prelude::*;
use kernels::vector::{load, store};

/// y[0] = exp(x[0]).
#[kernel]
pub unsafe fn exponential(x: &[f32], y: *mut f32) {
    // SAFETY: an element of each.
    unsafe { store(y, 0, load(x, 0).exp()) }
}

fn main() {}
