//! What the kernels of optimisers share: weights and their BF16 copy, clipping by the global norm, and groups of parameters.
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

use crate::vector::{F4, Part, load};
use cuda_std::GpuFloat;
use half::bf16;

/// Elements that share one entry of `groups`. The host starts each parameter at a multiple of this.
pub const RUN: usize = 64;

/// The weights that a kernel updates, and their copy, rounded to BF16, where there is one.
#[derive(Clone, Copy)]
pub struct Weights {
    /// Of all parameters, flat.
    pub weights: *mut f32,
    /// At the same places.
    pub copy: *mut bf16,
    /// Not 0: there is a copy.
    pub copied: u32,
}

impl Weights {
    /// The old weights of the thread's vector.
    ///
    /// # Safety
    /// The vector lies inside the weights.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, index: usize, part: Part) -> F4 {
        // SAFETY: the vector lies inside, as the caller promises.
        unsafe { F4::load_part_raw(self.weights, index, part, 0.0) }
    }

    /// Writes the new weights, and the nearest BF16 of each.
    ///
    /// # Safety
    /// The vector lies inside the weights, and inside the copy if there is one.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, weights: F4, index: usize, part: Part) {
        // SAFETY: the vector lies inside, as the caller promises.
        unsafe {
            weights.store_part(self.weights, index, part);
            if self.copied != 0 {
                weights.store_part(self.copy, index, part);
            }
        }
    }

    /// What a contract asks of a copy: it is as long as the weights, or there is none.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn copies(elements: usize, copied: u32, copy: usize) -> Result<(), cuda_std::launch::Violation> {
        cuda_std::launch::Violation::unless_length("copy", if copied == 0 { 0 } else { elements }, copy)
    }
}

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
