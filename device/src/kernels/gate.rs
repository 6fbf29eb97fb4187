//! Activations for gating: ReLU, sigmoid, SiLU and exact GELU; and SwiGLU, a product with SiLU.
//!
//! The activations share a kernel for each direction, and `function` selects one. The whole launch
//! branches once. A branch for each vector would make a thread wait for the first vector before it
//! loads the next.
//!
//! ```text
//! swiglu     gate            up              y        of one tensor, rows of 2 cols
//!         | r0 | r1 |  *  | r0 | r1 | -> | r0 | r1 |  | gate r0 | up r0 | gate r1 | up r1 | -> y
//! ```
//! Invariant: an element of an output depends only on the same element of the inputs.

use crate::activations::Activations;
use crate::block::BLOCK;
use crate::math;
use crate::vector::F4;
use crate::window::Window;
use crate::{family, for_own_vector, map4, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

/// The kernels' `function` for max(x, 0). A NaN stays NaN. Backward gets x or y.
pub const RELU: u32 = 0;
/// The kernels' `function` for [`sigmoid`](crate::activations::Activations::sigmoid). Backward gets
/// y.
pub const SIGMOID: u32 = 1;
/// The kernels' `function` for [`silu`](crate::activations::Activations::silu). Backward gets x.
pub const SILU: u32 = 2;
/// The kernels' `function` for [`math::gelu_exact`]. Backward gets x.
pub const GELU_EXACT: u32 = 3;

family! {
    /// Computes y = f(x), where `function` selects f. Shapes: `x`, `y`: `[n]`. Overwrites `y`.
    activation_forward<S: Stored> { activation_forward_f32: f32; activation_forward_bf16: bf16; }
    unsafe fn(x: &[S], function: u32, y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            macro_rules! of {
                ($f:path) => {
                    write_own_vectors!(S, x.len(), y, |index, part| map4!(F4::load_part(x, index, part, 0.0), $f))
                };
            }
            match function {
                RELU => of!(rectified),
                SIGMOID => of!(S::sigmoid),
                SILU => of!(S::silu),
                _ => of!(math::gelu_exact),
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.function <= GELU_EXACT, "function", "a number of this module", k.function)?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::vector_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes dx = dy f'(x), where `function` selects f. `kept` is x or y, as f needs. Shapes:
    /// `kept`, `dy`, `dx`: `[n]`. Overwrites `dx`.
    activation_backward<S: Stored> { activation_backward_f32: f32; activation_backward_bf16: bf16; }
    unsafe fn(kept: &[S], dy: &[S], function: u32, dx: *mut S) {
        // SAFETY: the vector lies inside `kept`, and the others are as long.
        unsafe {
            macro_rules! of {
                (|$kept:ident, $dy:ident| $dx:expr) => {
                    write_own_vectors!(S, kept.len(), dx, |index, part| {
                        let $kept = F4::load_part(kept, index, part, 0.0);
                        let $dy = F4::load_part(dy, index, part, 0.0);
                        $dx
                    })
                };
            }
            match function {
                RELU => of!(|kept, dy| kept.zip(dy, |kept, dy| if kept <= 0.0 { 0.0 } else { dy })),
                SIGMOID => of!(|kept, dy| dy * kept.fma(-kept, kept)),
                SILU => of!(|kept, dy| dy * map4!(kept, S::silu_derivative)),
                _ => of!(|kept, dy| dy * map4!(kept, math::gelu_exact_derivative)),
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `kept`; `dy` and `dx` are as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.function <= GELU_EXACT, "function", "a number of this module", k.function)?;
        Violation::unless_length("dy", k.kept.len(), k.dy.len())?;
        Violation::unless_length("dx", k.kept.len(), k.dx.len())?;
        crate::block::vector_grid::<S>(k.kept.len())
    }
}

#[inline(always)]
fn rectified(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

/// Returns the windows of gate and up in rows of 2 `cols`. If they are separate arrays, the kernels
/// ignore rows, and load all vectors before they use the first.
#[inline(always)]
fn halves(cols: usize) -> [Window; 2] {
    [0, cols].map(|start| Window { cols, stride: 2 * cols, start })
}

family! {
    /// Computes y = silu(gate) up. Shapes: `gate`, `up`, `y`: `[rows, cols]`. If `up` is empty,
    /// `gate` holds both: `[rows, 2 cols]`, the gate first. `length` is the length of y. Overwrites
    /// `y`.
    swiglu_forward<S: Stored> { swiglu_forward_f32: f32; swiglu_forward_bf16: bf16; }
    unsafe fn(gate: &[S], up: &[S], cols: usize, length: usize, y: *mut S) {
        // SAFETY: the vector lies inside `y`, and `gate` and `up` have its elements.
        unsafe {
            if up.is_empty() {
                let [first, second] = halves(cols);
                write_own_vectors!(S, length, y, |index, part| {
                    map4!(first.load(gate, index, part), S::silu) * second.load(gate, index, part)
                });
            } else {
                write_own_vectors!(S, length, y, |index, part| {
                    map4!(F4::load_part(gate, index, part, 0.0), S::silu) * F4::load_part(up, index, part, 0.0)
                });
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors up to `length`, the length of `y`. `y` is
    // whole rows of `cols`, and `gate` and `up` are as long, or `gate` twice as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        swiglu_lengths(k.length, k.cols, k.gate.len(), k.up.len())?;
        Violation::unless_length("y", k.length, k.y.len())?;
        crate::block::vector_grid::<S>(k.length)
    }
}

family! {
    /// Computes dgate = dy up silu'(gate), dup = dy silu(gate). `gate` and `up` are as in
    /// [`swiglu_forward`]. `dgate` and `dup` have their shapes, and `dy` is `[rows, cols]`.
    /// Overwrites `dgate` and `dup`.
    swiglu_backward<S: Stored> { swiglu_backward_f32: f32; swiglu_backward_bf16: bf16; }
    unsafe fn(gate: &[S], up: &[S], dy: &[S], cols: usize, dgate: *mut S, dup: *mut S) {
        for_own_vector!(dy.len(), |index, part| {
            // SAFETY: the vector lies inside `dy`, and the others have its elements.
            unsafe {
                let dy = F4::load_part(dy, index, part, 0.0);
                if up.is_empty() {
                    let [first, second] = halves(cols);
                    let (x, up) = (first.load(gate, index, part), second.load(gate, index, part));
                    first.store(dy * up * map4!(x, S::silu_derivative), dgate, index, part);
                    second.store(dy * map4!(x, S::silu), dgate, index, part);
                } else {
                    let (x, up) = (F4::load_part(gate, index, part, 0.0), F4::load_part(up, index, part, 0.0));
                    (dy * up * map4!(x, S::silu_derivative)).store_part(dgate, index, part);
                    (dy * map4!(x, S::silu)).store_part(dup, index, part);
                }
            }
        });
    }
    // SAFETY: a thread accesses only its own vector inside `dy`. `dy` is whole rows of `cols`, and
    // the others are as long, or `gate` and `dgate` twice as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        swiglu_lengths(k.dy.len(), k.cols, k.gate.len(), k.up.len())?;
        Violation::unless_length("dgate", k.gate.len(), k.dgate.len())?;
        Violation::unless_length("dup", k.up.len(), k.dup.len())?;
        crate::block::vector_grid::<f32>(k.dy.len())
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn swiglu_lengths(length: usize, cols: usize, gate: usize, up: usize) -> Result<(), cuda_std::launch::Violation> {
    use cuda_std::launch::{Size, Violation};
    crate::warp::rows_in("dy", length, cols)?;
    if up == 0 {
        return Violation::unless_length("gate", Size::of(length).times(2), gate);
    }
    Violation::unless_length("gate", length, gate)?;
    Violation::unless_length("up", length, up)
}
