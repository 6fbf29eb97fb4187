//! The update that Adam's kernels share: their settings, moments and weights.
//!
//! Invariant: a kernel whose settings begin with those of [`slot`] has AdamW's bits wherever its
//! momentum is AdamW's.

use crate::update::{by_sign, clip_factor};
use crate::vector::{F4, load};
use cuda_std::GpuFloat;

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
    /// The decoupled weight decay. The kernel multiplies it by the learning rate. A number below 0
    /// is a cautious decay, of its absolute value.
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

/// A group's settings, in the form that the update uses.
#[derive(Clone, Copy)]
pub struct Settings {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    /// The factor on a weight that remains after weight decay.
    decay_factor: f32,
    /// True if only weights that have the sign of the update's direction decay.
    is_cautious: bool,
    /// The learning rate, divided by the first moment's bias correction.
    step_size: f32,
    /// The square root of the second moment's bias correction.
    sqrt_bias_correction2: f32,
    /// The factor that clips the gradients.
    pub clip: f32,
}

impl Settings {
    /// Loads the settings that start at `start`.
    ///
    /// # Safety
    /// `hyper` has [`slot::LEN`] floats there, and `squared_norm` one.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(hyper: &[f32], start: usize, squared_norm: &[f32]) -> Self {
        // SAFETY: the caller guarantees that the group's settings lie inside `hyper`.
        unsafe {
            let learning_rate = load(hyper, start + slot::LEARNING_RATE);
            let weight_decay = load(hyper, start + slot::WEIGHT_DECAY);
            Self {
                beta1: load(hyper, start + slot::BETA1),
                beta2: load(hyper, start + slot::BETA2),
                epsilon: load(hyper, start + slot::EPSILON),
                decay_factor: 1.0 - learning_rate * weight_decay.abs(),
                is_cautious: weight_decay < 0.0,
                step_size: learning_rate / load(hyper, start + slot::BIAS_CORRECTION1),
                sqrt_bias_correction2: GpuFloat::sqrt(load(hyper, start + slot::BIAS_CORRECTION2)),
                clip: clip_factor(load(hyper, start + slot::MAX_NORM), load(squared_norm, 0)),
            }
        }
    }

    /// Returns the new weights and moments for the clipped gradients `g`.
    #[inline(always)]
    pub fn step(self, w_old: F4, g: F4, moments_old: (F4, F4)) -> (F4, F4, F4) {
        let (m_new, v_new) = self.moments(g, moments_old);
        (self.weights(w_old, m_new, v_new), m_new, v_new)
    }

    /// Returns the new moments for the clipped gradients `g`.
    #[inline(always)]
    pub fn moments(self, g: F4, (m_old, v_old): (F4, F4)) -> (F4, F4) {
        let Self { beta1, beta2, .. } = self;
        let m_new = m_old.fma(F4::splat(1.0 - beta1), g - m_old);
        (m_new, (v_old * F4::splat(beta2)).fma(F4::splat(1.0 - beta2) * g, g))
    }

    /// Returns the new weights for the momentum `m` and the new second moment.
    #[inline(always)]
    pub fn weights(self, w_old: F4, m: F4, v_new: F4) -> F4 {
        let Self { epsilon, decay_factor, is_cautious, step_size, sqrt_bias_correction2, .. } = self;
        let direction = m / (v_new.sqrt() / F4::splat(sqrt_bias_correction2) + F4::splat(epsilon));
        let factor = if is_cautious { by_sign(w_old, direction, decay_factor, 1.0) } else { F4::splat(decay_factor) };
        (w_old * factor).fma(F4::splat(-step_size), direction)
    }
}
