//! Correctly rounded float operations that `core` lacks.
//!
//! Invariant: each is one IEEE 754 operation with the same bits on every device.

use crate::machine;

/// Float operations of the GPU that are exact to the last bit on every device.
pub trait GpuFloat: Copy {
    /// Returns `self * a + b`, rounded once (`fma.rn`).
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the square root, correctly rounded (`sqrt.rn`).
    fn sqrt(self) -> Self;
}

impl GpuFloat for f32 {
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        machine::mul_add(self, a, b)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        machine::sqrt(self)
    }
}
