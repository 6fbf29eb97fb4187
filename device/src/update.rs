//! The common parts of the optimizer kernels: weights and their BF16 copy, clipping by the global
//! norm, and parameter groups.
//!
//! Each group has its own settings: `LEN` floats of a slot.
//!
//! ```text
//! elements of the flat region   | 0 .. 63 | 64 .. 127 | 128 .. 191 | ..
//! groups, one for each run      |    0    |     2     |     2      | ..
//! hyper                         | LEN of group 0 | LEN of group 1 | LEN of group 2 | ..
//! ```
//! If there is one group, `groups` is empty and nothing is read from it.
//!
//! Invariant: the four elements of a vector belong to one group. A group is given for whole runs of
//! [`RUN`] elements, and a vector starts at a multiple of four.

use crate::vector::{F4, VectorPart, load};
use cuda_std::GpuFloat;
use half::bf16;

/// The elements that share one entry of `groups`. The host starts each parameter at a multiple of
/// this.
pub const RUN: usize = 64;

/// The weights that a kernel updates, and their BF16 copy if there is one.
#[derive(Clone, Copy)]
pub struct Weights {
    /// The weights of all parameters, flat.
    pub weights: *mut f32,
    /// The copy, with the same indices.
    pub copy: *mut bf16,
    /// A flag: not 0 if there is a copy.
    pub has_bf16: u32,
}

impl Weights {
    /// Loads the old weights of the thread's vector.
    ///
    /// # Safety
    /// The vector lies inside the weights.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, index: usize, part: VectorPart) -> F4 {
        // SAFETY: the vector lies inside, as the caller guarantees.
        unsafe { F4::load_part_raw(self.weights, index, part, 0.0) }
    }

    /// Writes the new weights, and the nearest BF16 of each.
    ///
    /// # Safety
    /// The vector lies inside the weights, and inside the copy if there is one.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, weights: F4, index: usize, part: VectorPart) {
        // SAFETY: the vector lies inside, as the caller guarantees.
        unsafe {
            weights.store_part(self.weights, index, part);
            if self.has_bf16 != 0 {
                weights.store_part(self.copy, index, part);
            }
        }
    }

    /// Checks a copy for a contract: it is as long as the weights, or there is none.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn copies(elements: usize, has_bf16: u32, copy: usize) -> Result<(), cuda_std::launch::Violation> {
        cuda_std::launch::Violation::unless_length("copy", if has_bf16 == 0 { 0 } else { elements }, copy)
    }
}

/// Returns the factor that scales gradients with this squared global norm to a norm of at most
/// `max_norm`, as `torch.nn.utils.clip_grad_norm_` does. It is 1 if `max_norm` is 0; otherwise it
/// is NaN for a norm that is NaN.
#[inline(always)]
pub fn clip_factor(max_norm: f32, squared_norm: f32) -> f32 {
    let factor = max_norm / (GpuFloat::sqrt(squared_norm) + 1e-6);
    // A NaN norm stays NaN.
    let factor = if factor > 1.0 { 1.0 } else { factor };
    if max_norm == 0.0 { 1.0 } else { factor }
}

/// Returns the index of the group's `len` settings in a slot of `slots` floats, and the factor 1.
/// Without `groups`, every element belongs to the first group. If the slot has no such group,
/// returns 0 and the factor NaN. The factor then makes the gradient NaN, because a kernel cannot
/// return an error.
///
/// # Safety
/// `groups` is empty, or has one group for each run of [`RUN`] elements, including the run of
/// `index`. The slot has the settings of at least one group.
#[inline(always)]
#[track_caller]
pub unsafe fn group_settings(groups: &[u32], index: usize, len: usize, slots: usize) -> (usize, f32) {
    if groups.is_empty() {
        return (0, 1.0);
    }
    // SAFETY: `groups` is not empty, so the run of `index` has a group, as the caller guarantees.
    let start = unsafe { load(groups, index / RUN) } as usize * len;
    if start + len <= slots { (start, 1.0) } else { (0, f32::NAN) }
}

/// Checks groups and their settings for a contract. Either `groups` is empty, and the slot has the
/// settings of one group. Or `groups` has one entry for each run, and the slot has whole groups, at
/// least one.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grouped(elements: usize, groups: usize, slots: usize, len: usize) -> Result<(), cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    if groups == 0 && elements > 0 {
        return Violation::unless_length("hyper", len, slots);
    }
    Violation::unless_length("groups", elements.div_ceil(RUN), groups)?;
    Violation::unless(slots > 0 && slots.is_multiple_of(len), "hyper", "settings of whole groups", slots)
}
