//! The factor of clipping by the global norm, for optimizers that are composed of ops.

use crate::contract;
use crate::update;
use crate::vector::{load, store};
use cuda_std::prelude::*;

/// Computes out = min(1, max_norm / (sqrt(squared_norm) + 1e-6)), as
/// `torch.nn.utils.clip_grad_norm_` does. The result is 1 if `max_norm` is 0; otherwise it is NaN
/// if the norm is NaN. Shapes: `squared_norm`, `out`: `[1]`. Overwrites `out`. Runs on one thread.
#[kernel]
pub unsafe fn clip_factor(squared_norm: &[f32], max_norm: f32, out: *mut f32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: both have their one element.
        unsafe { store(out, 0, update::clip_factor(max_norm, load(squared_norm, 0))) }
    }
}

// SAFETY: one thread reads the element of `squared_norm` and writes that of `out`.
contract! { unsafe clip_factor { block: 32, align: 4 } |k| {
    Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
    Violation::unless_length("out", 1, k.out.len())?;
    Grid::new(1, 1, 1)
}}
