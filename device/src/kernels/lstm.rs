//! The cell of a long short-term memory (Hochreiter and Schmidhuber, 1997), forward and backward.
//!
//! ```text
//! a row of gates: | i | f | g | o |   `width` columns each, before their functions
//! c' = sigmoid(i) tanh(g) + sigmoid(f) c        h = sigmoid(o) tanh(c')
//! ```
//! Invariant: an element of a result depends only on the elements of its row and column.

use crate::block::BLOCK;
use crate::stored::Stored;
use crate::vector::{F4, VectorPart};
use crate::window::Window;
use crate::{family, for_own_vector, map4, math, unroll_on_gpu};
use cuda_std::prelude::*;
use half::bf16;

/// The gates of four columns, after their functions.
struct Gates {
    i: F4,
    f: F4,
    g: F4,
    o: F4,
}

impl Gates {
    /// # Safety
    /// `gates` has the four windows of `width` columns, which is not 0. `part` is whole, or ends at
    /// a window's end.
    #[inline(always)]
    unsafe fn load<S: Stored>(gates: &[S], width: usize, index: usize, part: VectorPart) -> Self {
        // SAFETY: the caller guarantees it.
        let [i, f, g, o] = unsafe { [0, 1, 2, 3].map(|gate| window(gate, width).load(gates, index, part)) };
        Self {
            i: map4!(i, math::sigmoid),
            f: map4!(f, math::sigmoid),
            g: map4!(g, math::tanh),
            o: map4!(o, math::sigmoid),
        }
    }
}

/// Returns the columns of a gate.
#[inline(always)]
fn window(gate: usize, width: usize) -> Window {
    Window { cols: width, stride: 4 * width, start: gate * width }
}

/// Returns the elements of an array that may be absent, as zeros.
///
/// # Safety
/// The array is absent, or `part` of it lies at the index.
#[inline(always)]
unsafe fn or_zero<S: Stored>(x: &[S], index: usize, part: VectorPart) -> F4 {
    // SAFETY: the caller guarantees it.
    if x.is_empty() { F4::splat(0.0) } else { unsafe { F4::load_part(x, index, part, 0.0) } }
}

family! {
    /// Computes c' and h. Shapes: `gates`: `[rows, 4 width]`; `c`, `c_out`, `h`: `[rows, width]`.
    /// Without `c` it is 0. Overwrites `c_out` and `h`.
    lstm_forward<S: Stored> { lstm_forward_f32: f32; lstm_forward_bf16: bf16; }
    unsafe fn(gates: &[S], c: &[S], width: usize, c_out: *mut S, h: *mut S) {
        for_own_vector!(gates.len() / 4, |index, part| {
            // SAFETY: the vector lies inside `c`, `c_out` and `h`, and its windows inside `gates`.
            unsafe {
                let Gates { i, f, g, o } = Gates::load(gates, width, index, part);
                let next = (i * g).fma(f, or_zero(c, index, part));
                next.store_part(c_out, index, part);
                (o * map4!(next, math::tanh)).store_part(h, index, part);
            }
        });
    }
    // SAFETY: `gates` has whole rows of four windows, and the other arrays, unless they are absent,
    // a quarter of its elements. A thread accesses its own vector of each.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let elements = cells_in(k.gates.len(), k.width)?;
        check_optional("c", k.c.len(), elements)?;
        Violation::unless_length("c_out", elements, k.c_out.len())?;
        Violation::unless_length("h", elements, k.h.len())?;
        crate::block::vector_grid(elements)
    }
}

family! {
    /// Computes the gradients of `gates` and `c` from `dh` and `dc_out`, those of h and c', each of
    /// which may be absent. The other parameters are those of
    /// [`lstm_forward`](struct@lstm_forward), with its `c_out`. Overwrites `dgates` and `dc`, which
    /// is absent if `c` is.
    lstm_backward<S: Stored> { lstm_backward_f32: f32; lstm_backward_bf16: bf16; }
    unsafe fn(
        gates: &[S],
        c: &[S],
        c_out: &[S],
        dh: &[S],
        dc_out: &[S],
        width: usize,
        dgates: *mut S,
        dc: *mut S,
    ) {
        for_own_vector!(gates.len() / 4, |index, part| {
            // SAFETY: the vector lies inside the arrays of cells that are there, and its windows
            // inside `gates` and `dgates`.
            unsafe {
                let Gates { i, f, g, o } = Gates::load(gates, width, index, part);
                let one = F4::splat(1.0);
                let t = map4!(F4::load_part(c_out, index, part, 0.0), math::tanh);
                let dh = or_zero(dh, index, part);
                let dnext = or_zero(dc_out, index, part) + dh * o * (one - t * t);
                let before = or_zero(c, index, part);
                let gradients = [
                    dnext * g * (i * (one - i)),
                    dnext * before * (f * (one - f)),
                    dnext * i * (one - g * g),
                    dh * t * (o * (one - o)),
                ];
                unroll_on_gpu!(gate < 4 => { window(gate, width).store(gradients[gate], dgates, index, part); });
                if !c.is_empty() {
                    (dnext * f).store_part(dc, index, part);
                }
            }
        });
    }
    // SAFETY: the argument for `lstm_forward` holds here too. `dgates` is as long as `gates`, and
    // `dc` as `c`.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let elements = cells_in(k.gates.len(), k.width)?;
        check_optional("c", k.c.len(), elements)?;
        Violation::unless_length("c_out", elements, k.c_out.len())?;
        check_optional("dh", k.dh.len(), elements)?;
        check_optional("dc_out", k.dc_out.len(), elements)?;
        Violation::unless_length("dgates", k.gates.len(), k.dgates.len())?;
        Violation::unless_length("dc", k.c.len(), k.dc.len())?;
        crate::block::vector_grid(elements)
    }
}

/// Returns the number of cells whose gates have this length.
#[cfg(not(target_arch = "nvptx64"))]
fn cells_in(gates: usize, width: usize) -> Result<usize, cuda_std::launch::Violation> {
    let rows = crate::warp::rows_in("gates", gates, cuda_std::launch::Size::of(width).times(4))?;
    Ok(rows * width)
}

#[cfg(not(target_arch = "nvptx64"))]
fn check_optional(name: &'static str, length: usize, elements: usize) -> Result<(), cuda_std::launch::Violation> {
    if length == 0 { Ok(()) } else { cuda_std::launch::Violation::unless_length(name, elements, length) }
}
