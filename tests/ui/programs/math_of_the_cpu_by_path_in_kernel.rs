//! Nor has it by its path, or in another macro's call.

use cuda_std::prelude::*;
use kernels::vector::{load, store};

/// y[0] = x[0], which is at most 1.
#[kernel]
pub unsafe fn bounded(x: &[f32], y: *mut f32) {
    // SAFETY: an element of each.
    unsafe {
        let x = load(x, 0);
        assert!(f32::powi(x, 2) <= 1.0);
        store(y, 0, x);
    }
}

fn main() {}
