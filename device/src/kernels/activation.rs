//! Activations: tanh and the tanh form of GELU, forward and backward.
//!
//! Invariant: one element of the output depends on the same element of the inputs alone.

use crate::math;
use crate::vector::F4;
use crate::{contract, for_own_vector, map4};
use cuda_std::prelude::*;

/// y = tanh(x); `x`, `y`: `[n]`. Overwrites `y`.
#[kernel]
pub unsafe fn tanh_forward(x: &[f32], y: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            map4!(F4::load_part(x, index, part, 0.0), math::tanh).store_part(y, index, part);
        }
    });
}

contract! { tanh_forward { block: crate::block::BLOCK } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    crate::block::vector_grid(k.x.len())
}}

/// dx = dy (1 - y^2), where y = tanh(x); `y`, `dy`, `dx`: `[n]`. Overwrites `dx`.
#[kernel]
pub unsafe fn tanh_backward(y: &[f32], dy: &[f32], dx: *mut f32) {
    for_own_vector!(y.len(), |index, part| {
        // SAFETY: the vector lies inside `y`, and the others are as long.
        unsafe {
            let y = F4::load_part(y, index, part, 0.0);
            let dy = F4::load_part(dy, index, part, 0.0);
            (dy * F4::splat(1.0).fma(-y, y)).store_part(dx, index, part);
        }
    });
}

contract! { tanh_backward { block: crate::block::BLOCK } |k| {
    Violation::unless_length("dy", k.y.len(), k.dy.len())?;
    Violation::unless_length("dx", k.y.len(), k.dx.len())?;
    crate::block::vector_grid(k.y.len())
}}

/// y = gelu(x), the tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); `x`, `y`: `[n]`. Overwrites `y`.
#[kernel]
pub unsafe fn gelu_forward(x: &[f32], y: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            map4!(F4::load_part(x, index, part, 0.0), math::gelu).store_part(y, index, part);
        }
    });
}

contract! { gelu_forward { block: crate::block::BLOCK } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    crate::block::vector_grid(k.x.len())
}}

/// dx = dy gelu'(x); `x`, `dy`, `dx`: `[n]`. Overwrites `dx`.
#[kernel]
pub unsafe fn gelu_backward(x: &[f32], dy: &[f32], dx: *mut f32) {
    for_own_vector!(x.len(), |index, part| {
        // SAFETY: the vector lies inside `x`, and the others are as long.
        unsafe {
            let x = F4::load_part(x, index, part, 0.0);
            let dy = F4::load_part(dy, index, part, 0.0);
            (dy * map4!(x, math::gelu_derivative)).store_part(dx, index, part);
        }
    });
}

contract! { gelu_backward { block: crate::block::BLOCK } |k| {
    Violation::unless_length("dy", k.x.len(), k.dy.len())?;
    Violation::unless_length("dx", k.x.len(), k.dx.len())?;
    crate::block::vector_grid(k.x.len())
}}
