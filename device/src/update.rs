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

use crate::companded::{self, Code};
use crate::split::SplitMasters;
use crate::vector::{F4, VectorPart, load};
use cuda_std::GpuFloat;
use half::bf16;

/// The elements that share one entry of `groups`.
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

/// The type in which weights are stored between updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterType {
    /// f32, 4 bytes for each weight.
    F32,
    /// [Split masters](crate::split), 3 bytes for each weight: a BF16, which products read, and a
    /// correction of 8 bits. Together they have 24 bits.
    Split,
}

/// The type in which an optimizer stores what it keeps for each weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateType {
    /// f32, 4 bytes for each weight.
    F32,
    /// [8 bits](crate::companded), with a scale for each run of 64: 1.0625 bytes for each weight.
    Bits8,
}

impl StateType {
    /// The words in which the state of a run of 64 weights is stored.
    pub const fn run_words(self) -> usize {
        match self {
            Self::F32 => RUN,
            Self::Bits8 => companded::RUN_WORDS,
        }
    }

    /// The elements of which the state takes whole vectors of 16 bytes. The host starts each
    /// parameter at a multiple of this, so that its state can be updated separately.
    pub const fn unit(self) -> usize {
        match self {
            Self::F32 => RUN,
            Self::Bits8 => 4 * RUN,
        }
    }

    /// Loads four numbers of a state from `index` on.
    ///
    /// # Safety
    /// `state` is valid for reads of the run of `index`, a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, state: *const u32, index: usize, code: Code) -> F4 {
        // SAFETY: the caller guarantees that the run may be read.
        unsafe {
            match self {
                Self::F32 => F4::load_raw(state.cast::<f32>(), index),
                Self::Bits8 => companded::load4(state, index, code),
            }
        }
    }

    /// Writes four numbers of a state from `index` on.
    ///
    /// # Safety
    /// `state` is valid for reads and writes of the run of `index`, a multiple of four. The lanes
    /// that have the run call it together, after they have read the run.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, values: F4, state: *mut u32, index: usize, code: Code) {
        // SAFETY: the caller guarantees that the run may be written, by its lanes together.
        unsafe {
            match self {
                Self::F32 => values.store(state.cast::<f32>(), index),
                Self::Bits8 => companded::store4(values, state, index, code),
            }
        }
    }
}

/// The weights that a kernel updates, whatever their type. Those of [`MasterType::F32`] are
/// `weights`, with a copy in `halves` if `has_bf16` is not 0. Those of [`MasterType::Split`] are
/// `halves` and `corrections`.
#[derive(Clone, Copy)]
pub struct Masters {
    /// The type of the weights.
    pub stored: MasterType,
    /// The weights in f32.
    pub weights: *mut f32,
    /// A flag: not 0 if f32 weights have a copy.
    pub has_bf16: u32,
    /// The copy of f32 weights, or the halves of split masters.
    pub halves: *mut bf16,
    /// The corrections of split masters.
    pub corrections: *mut u32,
}

impl Masters {
    fn split(self) -> SplitMasters {
        SplitMasters { halves: self.halves, corrections: self.corrections }
    }

    fn f32(self) -> Weights {
        Weights { weights: self.weights, copy: self.halves, has_bf16: self.has_bf16 }
    }

    /// Loads four weights from `index` on.
    ///
    /// # Safety
    /// The weights may be read, and `index` is a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, index: usize) -> F4 {
        // SAFETY: the caller guarantees that the weights may be read.
        unsafe {
            match self.stored {
                MasterType::F32 => self.f32().load(index, VectorPart::Whole),
                MasterType::Split => self.split().load(index),
            }
        }
    }

    /// Writes four new weights from `index` on.
    ///
    /// # Safety
    /// The weights may be written, and `index` is a multiple of four.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, weights: F4, index: usize) {
        // SAFETY: the caller guarantees that the weights may be written.
        unsafe {
            match self.stored {
                MasterType::F32 => self.f32().store(weights, index, VectorPart::Whole),
                MasterType::Split => self.split().store(weights, index),
            }
        }
    }
}

/// Checks the lengths of weights of `elements` for a contract: whole runs, in the arguments of
/// their type only.
#[cfg(not(target_arch = "nvptx64"))]
pub fn masters(
    stored: MasterType,
    elements: usize,
    (weights, has_bf16): (usize, u32),
    (halves, corrections): (usize, usize),
) -> Result<(), cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless_aligned("gradients", elements, RUN)?;
    let expected = match (stored, has_bf16) {
        (MasterType::F32, 0) => [elements, 0, 0],
        (MasterType::F32, _) => [elements, elements, 0],
        (MasterType::Split, _) => [0, elements, elements / F4::LEN],
    };
    let names = ["weights", "halves", "corrections"];
    let lengths = [weights, halves, corrections];
    (0..names.len()).try_for_each(|at| Violation::unless_length(names[at], expected[at], lengths[at]))
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
