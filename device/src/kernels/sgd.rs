//! SGD with momentum (Sutskever et al., 2013, as PyTorch computes it), with clipping by the global
//! norm.
//!
//! Invariant: everything that changes from step to step is in the `hyper` slot on the device, so a
//! captured launch can be replayed.

use crate::block::own_index;
use crate::companded::Code;
#[cfg(not(target_arch = "nvptx64"))]
use crate::update::RUN;
use crate::update::{MasterType, Masters, StateType, Weights, clip_factor, group_settings};
use crate::vector::{F4, VectorPart, load};
use crate::{contract, family, for_own_vector};
use cuda_std::prelude::*;
use half::bf16;

/// The layout of the `hyper` slot.
pub mod slot {
    /// The learning rate of this step.
    pub const LEARNING_RATE: usize = 0;
    /// The fraction of the last step's velocity that is kept.
    pub const MOMENTUM: usize = 1;
    /// The weight decay: this fraction of the weight is added to the gradient.
    pub const WEIGHT_DECAY: usize = 2;
    /// The global norm to which gradients are clipped. 0 means no clipping.
    pub const MAX_NORM: usize = 3;
    /// The Nesterov flag: if not 0, the step looks ahead.
    pub const NESTEROV: usize = 4;
    /// The number of floats in the slot.
    pub const LEN: usize = 5;
}

/// Runs one step of SGD with momentum over one flat region, in PyTorch's order of operations, with
/// a dampening of 0:
///
/// ```text
/// g = gradient * min(1, max_norm / (sqrt(squared_norm) + 1e-6)) + weight_decay * w
/// velocity = momentum * velocity + g
/// w = w - learning_rate * velocity
///   or, with Nesterov's: w = w - learning_rate * (g + momentum * velocity)
/// ```
/// Shapes: `weights`, `gradients`, `velocity`: `[n]`, `hyper`: `[groups, 5]`, see [`slot`],
/// `groups`: `[ceil(n / 64)]`, the parameter group of each run of 64 elements, or empty if there is
/// one group. `squared_norm`: `[1]`, of all gradients. Each line ends in a fused multiply-add.
/// `copy`: `[n]`, the new weights, each rounded once. If `has_bf16` is 0, `copy` is empty and not
/// written. Elements whose group does not exist become NaN. Updates `weights` and `velocity`, and
/// overwrites `copy`.
#[kernel]
pub unsafe fn sgd(
    weights: *mut f32,
    copy: *mut bf16,
    has_bf16: u32,
    gradients: &[f32],
    velocity: *mut f32,
    hyper: &[f32],
    groups: &[u32],
    squared_norm: &[f32],
) {
    for_own_vector!(gradients.len(), |index, part| {
        // SAFETY: the vector lies inside `gradients`, and the others are as long. `groups` is empty
        // or has the group of its run. `group_settings` returns an index at which `hyper` has a
        // whole group's settings.
        unsafe {
            let (start, known) = group_settings(groups, index, slot::LEN, hyper.len());
            let settings = Settings::load(hyper, start, squared_norm);
            update(
                Weights { weights, copy, has_bf16 },
                gradients,
                velocity,
                Settings { clip: settings.clip * known, ..settings },
                index,
                part,
            );
        }
    });
}

// SAFETY: a thread accesses only the four elements from its own index on that lie inside
// `gradients`. `weights`, `velocity` and a copy are as long, and `groups` is empty or has a group
// for each 64 of them. It reads `hyper` only at a whole group's settings: those of the first group,
// if the element's group does not exist.
contract! { unsafe sgd { block: crate::block::BLOCK } |k| {
    Violation::unless_length("weights", k.gradients.len(), k.weights.len())?;
    Weights::copies(k.gradients.len(), k.has_bf16, k.copy.len())?;
    Violation::unless_length("velocity", k.gradients.len(), k.velocity.len())?;
    crate::update::grouped(k.gradients.len(), k.groups.len(), k.hyper.len(), slot::LEN)?;
    Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
    crate::block::vector_grid(k.gradients.len())
}}

family! {
    /// Runs the step of [`sgd()`], on weights and a velocity that take less memory. Shapes:
    /// `gradients`: `[n]`, whole runs of 64 elements, `weights`, `has_bf16`, `halves`,
    /// `corrections`: see [`Masters`], `velocity`: `[n / 64, words of a run]`, see [`StateType`],
    /// the others as there. Updates the weights and `velocity`.
    sgd_small(formats: (MasterType, StateType) as FORMATS) {
        sgd_f32_bits8 = (MasterType::F32, StateType::Bits8);
        sgd_split_f32 = (MasterType::Split, StateType::F32);
        sgd_split_bits8 = (MasterType::Split, StateType::Bits8);
    }
    unsafe fn(
        weights: *mut f32,
        has_bf16: u32,
        halves: *mut bf16,
        corrections: *mut u32,
        gradients: &[f32],
        velocity: *mut u32,
        hyper: &[f32],
        groups: &[u32],
        squared_norm: &[f32],
    ) {
        let index = own_index();
        if index >= gradients.len() {
            return;
        }
        let (stored, state) = FORMATS;
        let masters = Masters { stored, weights, has_bf16, halves, corrections };
        // SAFETY: there are whole runs of elements, so the vector and its run lie inside all
        // arrays, and the lanes of a run are here together. `groups` is empty or has the group of
        // the run. `group_settings` returns an index at which `hyper` has a whole group's settings.
        unsafe {
            let (start, known) = group_settings(groups, index, slot::LEN, hyper.len());
            let settings = Settings::load(hyper, start, squared_norm);
            let g = F4::load(gradients, index) * F4::splat(settings.clip * known);
            let (w, new) = settings.step(masters.load(index), g, state.load(velocity, index, Code::Signed));
            masters.store(w, index);
            state.store(new, velocity, index, Code::Signed);
        }
    }
    // SAFETY: a thread accesses only the four elements from its own index on that lie inside
    // `gradients`, and the run of the velocity in which they lie. There are whole runs, and 16
    // lanes next to each other, which start at a multiple of 16, have each. The arrays of weights
    // have the lengths of their type, `velocity` the words of all runs, and `groups` is empty or
    // has a group for each run. It reads `hyper` only at a whole group's settings: those of the
    // first group, if the element's group does not exist.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        let (elements, (stored, state)) = (k.gradients.len(), FORMATS);
        crate::update::masters(
            stored, elements, (k.weights.len(), k.has_bf16), (k.halves.len(), k.corrections.len())
        )?;
        let words = Size::of(elements / RUN).times(state.run_words());
        Violation::unless_length("velocity", words, k.velocity.len())?;
        crate::update::grouped(elements, k.groups.len(), k.hyper.len(), slot::LEN)?;
        Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
        crate::block::vector_grid(elements)
    }
}

/// A group's settings, in the form that the update uses.
#[derive(Clone, Copy)]
struct Settings {
    learning_rate: f32,
    momentum: f32,
    weight_decay: f32,
    nesterov: bool,
    clip: f32,
}

impl Settings {
    /// Loads the settings that start at `start`.
    ///
    /// # Safety
    /// `hyper` has [`slot::LEN`] floats there, and `squared_norm` one.
    #[inline(always)]
    #[track_caller]
    unsafe fn load(hyper: &[f32], start: usize, squared_norm: &[f32]) -> Self {
        // SAFETY: the caller guarantees that the group's settings lie inside `hyper`.
        unsafe {
            Self {
                learning_rate: load(hyper, start + slot::LEARNING_RATE),
                momentum: load(hyper, start + slot::MOMENTUM),
                weight_decay: load(hyper, start + slot::WEIGHT_DECAY),
                nesterov: load(hyper, start + slot::NESTEROV) != 0.0,
                clip: clip_factor(load(hyper, start + slot::MAX_NORM), load(squared_norm, 0)),
            }
        }
    }

    /// Returns the new weights and velocity for the clipped gradients.
    #[inline(always)]
    fn step(self, w_old: F4, clipped: F4, velocity_old: F4) -> (F4, F4) {
        let Self { learning_rate, momentum, weight_decay, nesterov, .. } = self;
        let g = clipped.fma(F4::splat(weight_decay), w_old);
        let velocity_new = g.fma(F4::splat(momentum), velocity_old);
        let ahead = g.fma(F4::splat(momentum), velocity_new);
        let direction = if nesterov { ahead } else { velocity_new };
        (w_old.fma(F4::splat(-learning_rate), direction), velocity_new)
    }
}

/// Updates the thread's vector.
///
/// # Safety
/// The vector lies inside each of the three arrays, and inside the copy if there is one.
#[inline(always)]
#[track_caller]
unsafe fn update(
    weights: Weights,
    gradients: &[f32],
    velocity: *mut f32,
    settings: Settings,
    index: usize,
    part: VectorPart,
) {
    // SAFETY: the caller guarantees that the vector lies inside each array.
    unsafe {
        let w_old = weights.load(index, part);
        let velocity_old = F4::load_part_raw(velocity, index, part, 0.0);
        let g = F4::load_part(gradients, index, part, 0.0) * F4::splat(settings.clip);
        let (w, velocity_new) = settings.step(w_old, g, velocity_old);
        weights.store(w, index, part);
        velocity_new.store_part(velocity, index, part);
    }
}
