//! The soft cap of logits, `cap tanh(x / cap)`, as in Gemma 2 (Gemma Team, "Gemma 2: Improving Open
//! Language Models at a Practical Size", 2024).
//!
//! Invariant: [`SoftCap::NONE`] changes no bit, and adds no instruction to a kernel.

use crate::map4;
use crate::math;
use crate::vector::F4;

/// A cap of values, or none.
#[derive(Clone, Copy)]
pub struct SoftCap {
    cap: f32,
    inverse: f32,
}

impl SoftCap {
    /// No cap.
    pub const NONE: Self = Self { cap: 0.0, inverse: 0.0 };

    /// Makes a cap, which is not 0.
    #[inline(always)]
    pub fn new(cap: f32) -> Self {
        Self { cap, inverse: 1.0 / cap }
    }

    /// Returns true if there is no cap.
    #[inline(always)]
    pub fn is_none(self) -> bool {
        self.cap == 0.0
    }

    /// Caps a value.
    #[inline(always)]
    pub fn of(self, x: f32) -> f32 {
        if self.is_none() { x } else { self.cap * math::tanh(x * self.inverse) }
    }

    /// Caps four values.
    #[inline(always)]
    pub fn of4(self, x: F4) -> F4 {
        if self.is_none() { x } else { F4::splat(self.cap) * self.tanh4(x) }
    }

    /// Returns the derivatives of four capped values, `1 - tanh(x / cap)^2`. Without a cap it
    /// returns none, and does not call `x`.
    #[inline(always)]
    pub fn slopes_of(self, x: impl FnOnce() -> F4) -> Option<F4> {
        if self.is_none() {
            return None;
        }
        let tanh = self.tanh4(x());
        Some(F4::splat(1.0).fma(-tanh, tanh))
    }

    #[inline(always)]
    fn tanh4(self, x: F4) -> F4 {
        map4!(x * F4::splat(self.inverse), math::tanh)
    }
}
