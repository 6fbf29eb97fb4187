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
use crate::stored::Stored;
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
                    write_own_vectors!(twice S, x.len(), y, [x] |_index| map4!(x, $f))
                };
            }
            match function {
                RELU => of!(math::rectified),
                SIGMOID => of!(S::sigmoid),
                SILU => of!(S::silu),
                _ => of!(math::gelu_exact),
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.function <= GELU_EXACT, "function", "the number of a function of this module", k.function)?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::twice_grid::<S>(k.x.len())
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
                    write_own_vectors!(S, kept.len(), dx, [$kept, $dy] |_index| $dx)
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
        Violation::unless(k.function <= GELU_EXACT, "function", "the number of a function of this module", k.function)?;
        Violation::unless_length("dy", k.kept.len(), k.dy.len())?;
        Violation::unless_length("dx", k.kept.len(), k.dx.len())?;
        crate::block::own_grid::<S>(k.kept.len())
    }
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
                for_own_vector!(length, |index, part| {
                    let y_here = map4!(first.load(gate, index, part), S::silu) * second.load(gate, index, part);
                    y_here.store_part(y, index, part);
                });
            } else {
                write_own_vectors!(S, length, y, [gate, up] |_index| map4!(gate, S::silu) * up);
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors up to `length`, the length of `y`. `y` is
    // whole rows of `cols`, and `gate` and `up` are as long, or `gate` twice as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        swiglu_lengths(k.length, k.cols, k.gate.len(), k.up.len())?;
        Violation::unless_length("y", k.length, k.y.len())?;
        swiglu_grid::<S>(k.length, k.up.is_empty())
    }
}

family! {
    /// Computes dgate = dy up silu'(gate), dup = dy silu(gate). `gate` and `up` are as in
    /// [`swiglu_forward`]. `dgate` and `dup` have their shapes, and `dy` is `[rows, cols]`.
    /// Overwrites `dgate` and `dup`.
    swiglu_backward<S: Stored> { swiglu_backward_f32: f32; swiglu_backward_bf16: bf16; }
    unsafe fn(gate: &[S], up: &[S], dy: &[S], cols: usize, dgate: *mut S, dup: *mut S) {
        // SAFETY: the vector lies inside `dy`, and the others have its elements.
        unsafe {
            if up.is_empty() {
                let [first, second] = halves(cols);
                for_own_vector!(dy.len(), |index, part| {
                    let (x, up) = (first.load(gate, index, part), second.load(gate, index, part));
                    let [of_gate, of_up] = swiglu_gradients::<S>(x, up, F4::load_part(dy, index, part, 0.0));
                    first.store(of_gate, dgate, index, part);
                    second.store(of_up, dgate, index, part);
                });
            } else {
                write_own_vectors!(S, dy.len(), [dgate, dup], [gate, up, dy] |_index| {
                    swiglu_gradients::<S>(gate, up, dy)
                });
            }
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `dy`. `dy` is whole rows of `cols`, and
    // the others are as long, or `gate` and `dgate` twice as long.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        swiglu_lengths(k.dy.len(), k.cols, k.gate.len(), k.up.len())?;
        Violation::unless_length("dgate", k.gate.len(), k.dgate.len())?;
        Violation::unless_length("dup", k.up.len(), k.dup.len())?;
        swiglu_grid::<S>(k.dy.len(), k.up.is_empty())
    }
}

/// Returns `dy up silu'(gate)` and `dy silu(gate)`.
#[inline(always)]
fn swiglu_gradients<S: Stored>(gate: F4, up: F4, dy: F4) -> [F4; 2] {
    let [a, b, c, d] = gate.0;
    let [a, b, c, d] =
        [S::silu_and_derivative(a), S::silu_and_derivative(b), S::silu_and_derivative(c), S::silu_and_derivative(d)];
    [dy * up * F4([a[1], b[1], c[1], d[1]]), dy * F4([a[0], b[0], c[0], d[0]])]
}

/// Returns the grid of a SwiGLU kernel. A thread has four elements of packed operands.
#[cfg(not(target_arch = "nvptx64"))]
fn swiglu_grid<S>(length: usize, packed: bool) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    if packed { crate::block::vector_grid(length) } else { crate::block::own_grid::<S>(length) }
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
