//! The scalar functions of `math.rs` over a range of bit patterns. `examples/scalars` verifies them
//! with this kernel.
//!
//! Invariant: a thread derives its inputs from its index, so a run over all 2^32 inputs uploads
//! nothing.

use crate::math;
use crate::vector::F4;
use crate::{contract, for_own_vector, map4};
use cuda_std::prelude::*;

/// The kernel's `function` for [`math::exp`].
pub const EXP: u32 = 0;
/// The kernel's `function` for [`math::log`].
pub const LOG: u32 = 1;
/// The kernel's `function` for [`math::tanh`].
pub const TANH: u32 = 2;
/// The kernel's `function` for [`math::gelu`].
pub const GELU: u32 = 3;
/// The kernel's `function` for [`math::gelu_derivative`].
pub const GELU_DERIVATIVE: u32 = 4;
/// The kernel's `function` for [`math::rsqrt`].
pub const RSQRT: u32 = 5;
/// The kernel's `function` for [`math::sigmoid`].
pub const SIGMOID: u32 = 6;
/// The kernel's `function` for [`math::silu`].
pub const SILU: u32 = 7;
/// The kernel's `function` for [`math::gelu_exact`].
pub const GELU_EXACT: u32 = 8;
/// The kernel's `function` for [`math::exp2_weight`], with a factor of 1 and a base of 0: a GPU's
/// `ex2.approx.ftz`.
pub const EX2: u32 = 9;
/// The kernel's `function` for [`math::sin`].
pub const SIN: u32 = 10;
/// The kernel's `function` for [`math::cos`].
pub const COS: u32 = 11;
/// The kernel's `function` for [`math::log1p`].
pub const LOG1P: u32 = 12;
/// The kernel's `function` for [`math::erf`].
pub const ERF: u32 = 13;
/// The kernel's `function` for [`math::erf_derivative`].
pub const ERF_DERIVATIVE: u32 = 14;

/// Computes `y[i] = f(x)`, where the bits of `x` are `first + i stride`, modulo 2^32. `function` is
/// one of the constants above and selects f. Shapes: `y`: `[length]`. Overwrites `y`.
#[kernel]
pub unsafe fn scalars(y: *mut f32, length: usize, function: u32, first: u32, stride: u32) {
    for_own_vector!(length, |index, part| {
        let bits = first.wrapping_add((index as u32).wrapping_mul(stride));
        let next = |count: u32| f32::from_bits(bits.wrapping_add(stride.wrapping_mul(count)));
        let x = F4([next(0), next(1), next(2), next(3)]);
        let result = match function {
            EXP => map4!(x, math::exp),
            LOG => map4!(x, math::log),
            TANH => map4!(x, math::tanh),
            GELU => map4!(x, math::gelu),
            GELU_DERIVATIVE => map4!(x, math::gelu_derivative),
            RSQRT => map4!(x, math::rsqrt),
            SIGMOID => map4!(x, math::sigmoid),
            SILU => map4!(x, math::silu),
            GELU_EXACT => map4!(x, math::gelu_exact),
            EX2 => map4!(x, ex2),
            SIN => map4!(x, math::sin),
            COS => map4!(x, math::cos),
            LOG1P => map4!(x, math::log1p),
            ERF => map4!(x, math::erf),
            _ => map4!(x, math::erf_derivative),
        };
        // SAFETY: the vector lies inside `y`.
        unsafe { result.store_part(y, index, part) };
    });
}

/// Returns 2^x by the instruction of attention's weights.
#[inline(always)]
fn ex2(x: f32) -> f32 {
    math::exp2_weight(x, 1.0, 0.0)
}

// SAFETY: a thread writes only the four elements from its own index on that lie below `length`,
// which is that of `y`.
contract! { unsafe scalars { block: crate::block::BLOCK } |k| {
    Violation::unless_length("y", k.length, k.y.len())?;
    Violation::unless(k.function <= ERF_DERIVATIVE, "function", "the number of a function of this module", k.function)?;
    crate::block::vector_grid(k.length)
}}
