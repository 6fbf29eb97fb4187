//! What the kernels of optimisers share: clipping by the global norm, and groups of parameters.
//!
//! Each group has settings of its own: `LEN` floats of a slot.
//!
//! ```text
//! elements of the flat region   | 0 .. 63 | 64 .. 127 | 128 .. 191 | ..
//! groups, one for each run      |    0    |     2     |     2      | ..
//! hyper                         | LEN of group 0 | LEN of group 1 | LEN of group 2 | ..
//! ```
//! Invariant: the four elements of a vector belong to one group. A group is given for whole runs of [`RUN`] elements, and a vector
//! starts at a multiple of four.

use crate::vector::load;
use cuda_std::GpuFloat;

/// Elements that share one entry of `groups`. The host starts each parameter at a multiple of this.
pub const RUN: usize = 64;

/// The factor that brings gradients with this squared global norm to a norm of at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`
/// computes it. It is 1 where `max_norm` is 0; else it is NaN for a norm that is NaN.
#[inline(always)]
pub fn clip_factor(max_norm: f32, squared_norm: f32) -> f32 {
    let factor = max_norm / (GpuFloat::sqrt(squared_norm) + 1e-6);
    // A NaN norm stays NaN.
    let factor = if factor > 1.0 { 1.0 } else { factor };
    if max_norm == 0.0 { 1.0 } else { factor }
}

/// Where in a slot of `slots` floats the `len` settings of the element's group start, and the factor 1. Where the slot has no such group:
/// 0, and the factor NaN. It makes the gradient NaN, since a kernel cannot return an error.
///
/// # Safety
/// `groups` has one group for each run of [`RUN`] elements, and so one for the run of `index`.
#[inline(always)]
#[track_caller]
pub unsafe fn group_settings(groups: &[u32], index: usize, len: usize, slots: usize) -> (usize, f32) {
    // SAFETY: the run of `index` has a group, as the caller promises.
    let start = unsafe { load(groups, index / RUN) } as usize * len;
    if start + len <= slots { (start, 1.0) } else { (0, f32::NAN) }
}

/// What a contract asks of groups and their settings: `groups` has one entry for each run, and the slot has whole groups, at least one.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grouped(elements: usize, groups: usize, slots: usize, len: usize) -> Result<(), cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless_length("groups", elements.div_ceil(RUN), groups)?;
    Violation::unless(slots > 0 && slots.is_multiple_of(len), "hyper", "settings of whole groups", slots)
}
