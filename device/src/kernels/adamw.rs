//! AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with clipping by the
//! global norm.
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
use cuda_std::{GpuFloat, prelude::*};
use half::bf16;

/// The layout of the `hyper` slot.
pub mod slot {
    /// The learning rate of this step.
    pub const LEARNING_RATE: usize = 0;
    /// The decay of the first moment.
    pub const BETA1: usize = 1;
    /// The decay of the second moment.
    pub const BETA2: usize = 2;
    /// Added to the root of the second moment.
    pub const EPSILON: usize = 3;
    /// The decoupled weight decay. The kernel multiplies it by the learning rate.
    pub const WEIGHT_DECAY: usize = 4;
    /// 1 - beta1^t in step t = 1, 2, ..., with the beta1 of this slot.
    pub const BIAS_CORRECTION1: usize = 5;
    /// 1 - beta2^t in step t = 1, 2, ..., with the beta2 of this slot.
    pub const BIAS_CORRECTION2: usize = 6;
    /// The global norm to which gradients are clipped. 0 means no clipping.
    pub const MAX_NORM: usize = 7;
    /// The number of floats in the slot.
    pub const LEN: usize = 8;
}

/// Runs one AdamW step over one flat region, in PyTorch's order of operations:
///
/// ```text
/// g = gradient * min(1, max_norm / (sqrt(squared_norm) + 1e-6))     torch.nn.utils.clip_grad_norm_
/// w = w * (1 - learning_rate * weight_decay)
/// m = m + (1 - beta1) * (g - m)
/// v = beta2 * v + (1 - beta2) * g * g
/// w = w - learning_rate / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + epsilon)
/// ```
/// Shapes: `weights`, `gradients`, `m`, `v`: `[n]`, `hyper`: `[groups, 8]`, see [`slot`], `groups`:
/// `[ceil(n / 64)]`, the parameter group of each run of 64 elements, or empty if there is one
/// group. `squared_norm`: `[1]`, of all gradients. `copy`: `[n]`, the new weights, each rounded
/// once. If `has_bf16` is 0, `copy` is empty and not written. 1 - beta is exact in f32. Elements
/// whose group does not exist become NaN. Updates `weights`, `m` and `v`, and overwrites `copy`.
#[kernel]
pub unsafe fn adamw(
    weights: *mut f32,
    copy: *mut bf16,
    has_bf16: u32,
    gradients: &[f32],
    m: *mut f32,
    v: *mut f32,
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
                m,
                v,
                Settings { clip: settings.clip * known, ..settings },
                index,
                part,
            );
        }
    });
}

// SAFETY: a thread accesses only the four elements from its own index on that lie inside
// `gradients`. `weights`, `m`, `v` and a copy are as long, and `groups` is empty or has a group for
// each 64 of them. It reads `hyper` only at a whole group's settings: those of the first group, if
// the element's group does not exist.
contract! { unsafe adamw { block: crate::block::BLOCK } |k| {
    Violation::unless_length("weights", k.gradients.len(), k.weights.len())?;
    Weights::copies(k.gradients.len(), k.has_bf16, k.copy.len())?;
    Violation::unless_length("m", k.gradients.len(), k.m.len())?;
    Violation::unless_length("v", k.gradients.len(), k.v.len())?;
    crate::update::grouped(k.gradients.len(), k.groups.len(), k.hyper.len(), slot::LEN)?;
    Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
    crate::block::vector_grid(k.gradients.len())
}}

family! {
    /// Runs the step of [`adamw()`], on weights and moments that take less memory. Shapes:
    /// `gradients`: `[n]`, whole runs of 64 elements, `weights`, `has_bf16`, `halves`,
    /// `corrections`: see [`Masters`], `m`, `v`: `[n / 64, words of a run]`, see [`StateType`], the
    /// others as there. Updates the weights, `m` and `v`.
    adamw_small(formats: (MasterType, StateType) as FORMATS) {
        adamw_f32_bits8 = (MasterType::F32, StateType::Bits8);
        adamw_split_f32 = (MasterType::Split, StateType::F32);
        adamw_split_bits8 = (MasterType::Split, StateType::Bits8);
    }
    unsafe fn(
        weights: *mut f32,
        has_bf16: u32,
        halves: *mut bf16,
        corrections: *mut u32,
        gradients: &[f32],
        m: *mut u32,
        v: *mut u32,
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
            let old = (state.load(m, index, Code::Signed), state.load(v, index, Code::Squares));
            let (w, m_new, v_new) = settings.step(masters.load(index), g, old);
            masters.store(w, index);
            state.store(m_new, m, index, Code::Signed);
            state.store(v_new, v, index, Code::Squares);
        }
    }
    // SAFETY: a thread accesses only the four elements from its own index on that lie inside
    // `gradients`, and the run of the state in which they lie. There are whole runs, and 16 lanes
    // next to each other, which start at a multiple of 16, have each. The arrays of weights have
    // the lengths of their type, `m` and `v` the words of all runs, and `groups` is empty or has a
    // group for each run. It reads `hyper` only at a whole group's settings: those of the first
    // group, if the element's group does not exist.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        let (elements, (stored, state)) = (k.gradients.len(), FORMATS);
        crate::update::masters(
            stored, elements, (k.weights.len(), k.has_bf16), (k.halves.len(), k.corrections.len())
        )?;
        let words = Size::of(elements / RUN).times(state.run_words());
        Violation::unless_length("m", words, k.m.len())?;
        Violation::unless_length("v", words, k.v.len())?;
        crate::update::grouped(elements, k.groups.len(), k.hyper.len(), slot::LEN)?;
        Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
        crate::block::vector_grid(elements)
    }
}

/// A group's settings, in the form that the update uses.
#[derive(Clone, Copy)]
struct Settings {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    /// The factor on a weight that remains after weight decay.
    decay_factor: f32,
    /// The learning rate, divided by the first moment's bias correction.
    step_size: f32,
    /// The square root of the second moment's bias correction.
    sqrt_bias_correction2: f32,
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
            let learning_rate = load(hyper, start + slot::LEARNING_RATE);
            Self {
                beta1: load(hyper, start + slot::BETA1),
                beta2: load(hyper, start + slot::BETA2),
                epsilon: load(hyper, start + slot::EPSILON),
                decay_factor: 1.0 - learning_rate * load(hyper, start + slot::WEIGHT_DECAY),
                step_size: learning_rate / load(hyper, start + slot::BIAS_CORRECTION1),
                sqrt_bias_correction2: GpuFloat::sqrt(load(hyper, start + slot::BIAS_CORRECTION2)),
                clip: clip_factor(load(hyper, start + slot::MAX_NORM), load(squared_norm, 0)),
            }
        }
    }

    /// Returns the new weights and moments for the clipped gradients `g`.
    #[inline(always)]
    fn step(self, w_old: F4, g: F4, (m_old, v_old): (F4, F4)) -> (F4, F4, F4) {
        let Self { beta1, beta2, epsilon, decay_factor, step_size, sqrt_bias_correction2, .. } = self;
        let m_new = m_old.fma(F4::splat(1.0 - beta1), g - m_old);
        let v_new = (v_old * F4::splat(beta2)).fma(F4::splat(1.0 - beta2) * g, g);
        let direction = m_new / (v_new.sqrt() / F4::splat(sqrt_bias_correction2) + F4::splat(epsilon));
        let w = (w_old * F4::splat(decay_factor)).fma(F4::splat(-step_size), direction);
        (w, m_new, v_new)
    }
}

/// Updates the thread's vector.
///
/// # Safety
/// The vector lies inside each of the four arrays, and inside the copy if there is one.
#[inline(always)]
#[track_caller]
unsafe fn update(
    weights: Weights,
    gradients: &[f32],
    m: *mut f32,
    v: *mut f32,
    settings: Settings,
    index: usize,
    part: VectorPart,
) {
    // SAFETY: the caller guarantees that the vector lies inside each array.
    unsafe {
        let g = F4::load_part(gradients, index, part, 0.0) * F4::splat(settings.clip);
        let m_old = F4::load_part_raw(m, index, part, 0.0);
        let v_old = F4::load_part_raw(v, index, part, 0.0);
        let w_old = weights.load(index, part);
        let (w, m_new, v_new) = settings.step(w_old, g, (m_old, v_old));
        weights.store(w, index, part);
        m_new.store_part(m, index, part);
        v_new.store_part(v, index, part);
    }
}
