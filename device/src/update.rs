//! What the kernels of optimisers share: clipping by the global norm, and groups of parameters.
//!
//! A group has settings of its own, `LEN` floats of a slot. Invariant: the four elements of a vector are of one group, because a
//! group is given for whole runs of [`RUN`] elements, and a vector starts at a multiple of four.

use crate::vector::load;
use cuda_std::GpuFloat;

/// Elements that have one group: the host starts each parameter at a multiple of so many.
pub const RUN: usize = 64;

/// By what gradients with this squared global norm are multiplied so that the norm is at most `max_norm`, as
/// `torch.nn.utils.clip_grad_norm_` has it; 1 where `max_norm` is 0, else NaN for a norm that is NaN.
#[inline(always)]
pub fn clip_factor(max_norm: f32, squared_norm: f32) -> f32 {
    let factor = max_norm / (GpuFloat::sqrt(squared_norm) + 1e-6);
    // A NaN norm stays NaN.
    let factor = if factor > 1.0 { 1.0 } else { factor };
    if max_norm == 0.0 { 1.0 } else { factor }
}

/// Where in a slot of `slots` floats the `len` settings of the element's group start, and 1; 0 and NaN where the slot has no such group:
/// the factor makes the gradient NaN, since a kernel cannot refuse.
///
/// # Safety
/// `groups` has one group for each run of [`RUN`] elements, so one for that of `index`.
#[inline(always)]
#[track_caller]
pub unsafe fn group_settings(groups: &[u32], index: usize, len: usize, slots: usize) -> (usize, f32) {
    // SAFETY: the run of `index` has a group, as is asked.
    let start = unsafe { load(groups, index / RUN) } as usize * len;
    if start + len <= slots { (start, 1.0) } else { (0, f32::NAN) }
}

/// What a contract asks of the settings of groups: `groups` has one for each run, and the slot whole groups, at least one.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grouped(elements: usize, groups: usize, slots: usize, len: usize) -> Result<(), cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless_length("groups", elements.div_ceil(RUN), groups)?;
    Violation::unless(slots > 0 && slots.is_multiple_of(len), "hyper", "settings of whole groups", slots)
}
