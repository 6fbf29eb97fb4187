//! AdEMAMix: AdamW with a second, slower momentum (Pagliardini, Ablin and Grangier, 2024,
//! arXiv:2409.03137), with clipping by the global norm.
//!
//! Invariant: everything that changes from step to step is in the `hyper` slot on the device, so a
//! captured launch can be replayed.

use crate::adam::Settings;
use crate::update::{Weights, group_settings};
use crate::vector::{F4, load};
use crate::{contract, for_own_vector};
use cuda_std::prelude::*;
use half::bf16;

/// The layout of the `hyper` slot: that of AdamW, and two more settings.
pub mod slot {
    pub use crate::adam::slot::*;

    /// The decay of the slow momentum in this step.
    pub const BETA3: usize = 8;
    /// The weight of the slow momentum in this step.
    pub const ALPHA: usize = 9;
    /// The number of floats in the slot.
    pub const LEN: usize = 10;
}

/// Runs one AdEMAMix step over one flat region:
///
/// ```text
/// g = gradient * min(1, max_norm / (sqrt(squared_norm) + 1e-6))     torch.nn.utils.clip_grad_norm_
/// w = w * (1 - learning_rate * weight_decay)
/// m = m + (1 - beta1) * (g - m)
/// slow = slow + (1 - beta3) * (g - slow)
/// v = beta2 * v + (1 - beta2) * g * g
/// sum = m + alpha * bias_correction1 * slow
/// w = w - learning_rate / bias_correction1 * sum / (sqrt(v) / sqrt(bias_correction2) + epsilon)
/// ```
/// A cautious decay is only of weights that have the sign of the sum, or a product of 0 with it.
/// Shapes: `weights`, `gradients`, `m`, `slow`, `v`: `[n]`, `hyper`: `[groups, 10]`, see [`slot`],
/// `groups`: `[ceil(n / 64)]`, the parameter group of each run of 64 elements, or empty if there is
/// one group. `squared_norm`: `[1]`, of all gradients. `copy`: `[n]`, the new weights, each rounded
/// once. If `has_bf16` is 0, `copy` is empty and not written. Elements whose group does not exist
/// become NaN. Updates `weights`, `m`, `slow` and `v`, and overwrites `copy`.
#[kernel]
pub unsafe fn ademamix(
    weights: *mut f32,
    copy: *mut bf16,
    has_bf16: u32,
    gradients: &[f32],
    m: *mut f32,
    slow: *mut f32,
    v: *mut f32,
    hyper: &[f32],
    groups: &[u32],
    squared_norm: &[f32],
) {
    for_own_vector!(gradients.len(), |index, part| {
        // SAFETY: the vector lies inside `gradients`, and the others are as long. `groups` is empty
        // or has the group of its run. `group_settings` returns an index at which `hyper` has a
        // whole group's settings, and the first of them are those that `Settings` loads.
        unsafe {
            let (start, known) = group_settings(groups, index, slot::LEN, hyper.len());
            let settings = Settings::load(hyper, start, squared_norm);
            let rest3 = F4::splat(1.0 - load(hyper, start + slot::BETA3));
            let share = load(hyper, start + slot::ALPHA) * load(hyper, start + slot::BIAS_CORRECTION1);
            let weights = Weights { weights, copy, has_bf16 };
            let g = F4::load_part(gradients, index, part, 0.0) * F4::splat(settings.clip * known);
            let moments_old = (F4::load_part_raw(m, index, part, 0.0), F4::load_part_raw(v, index, part, 0.0));
            let slow_old = F4::load_part_raw(slow, index, part, 0.0);
            let w_old = weights.load(index, part);
            let (m_new, v_new) = settings.moments(g, moments_old);
            let slow_new = slow_old.fma(rest3, g - slow_old);
            weights.store(settings.weights(w_old, m_new.fma(F4::splat(share), slow_new), v_new), index, part);
            m_new.store_part(m, index, part);
            slow_new.store_part(slow, index, part);
            v_new.store_part(v, index, part);
        }
    });
}

// SAFETY: a thread accesses only the four elements from its own index on that lie inside
// `gradients`. `weights`, `m`, `slow`, `v` and a copy are as long, and `groups` is empty or has a
// group for each 64 of them. It reads `hyper` only at a whole group's settings: those of the first
// group, if the element's group does not exist.
contract! { unsafe ademamix { block: crate::block::BLOCK } |k| {
    Violation::unless_length("weights", k.gradients.len(), k.weights.len())?;
    Weights::copies(k.gradients.len(), k.has_bf16, k.copy.len())?;
    Violation::unless_length("m", k.gradients.len(), k.m.len())?;
    Violation::unless_length("slow", k.gradients.len(), k.slow.len())?;
    Violation::unless_length("v", k.gradients.len(), k.v.len())?;
    crate::update::grouped(k.gradients.len(), k.groups.len(), k.hyper.len(), slot::LEN)?;
    Violation::unless_length("squared_norm", 1, k.squared_norm.len())?;
    crate::block::vector_grid(k.gradients.len())
}}
