//! Dropout (Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, 2014). The backward pass
//! draws the same random numbers again.
//!
//! ```text
//! a generator, [4]  seed, 64 bits | step, 64 bits    in memory that outlives steps
//! draw              generator -> draw of this step;  step + 1
//! dropout           elements 4 i .. 4 i + 3: four words of Philox,
//!                   key = seed, counter = (i, call, step)
//! ```
//! Forward and backward draw the same words, so no mask is stored. A replayed step draws new words
//! each time, because its step number is in device memory.
//!
//! Invariant: the mask depends only on seed, step, call and element index. It does not depend on
//! capture, the grid or the device. No two elements of a step have the same counter.

use crate::block::BLOCK;
use crate::philox::philox;
use crate::vector::{F4, load, load_raw, store};
use crate::{contract, family, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

/// Copies `generator` to `draw`, and increments the generator's step. Layout: seed (low word, high
/// word), step (low, high). Shapes: both `[4]`. `generator` and `next` are the same memory.
#[kernel]
pub unsafe fn draw(generator: *const u32, next: *mut u32, draw: *mut u32) {
    if thread::block_idx_x() != 0 || thread::thread_idx_x() != 0 {
        return;
    }
    // SAFETY: each has four elements.
    unsafe {
        let (low, high) = (load_raw(generator, 2), load_raw(generator, 3));
        store(draw, 0, load_raw(generator, 0));
        store(draw, 1, load_raw(generator, 1));
        store(draw, 2, low);
        store(draw, 3, high);
        store(next, 2, low.wrapping_add(1));
        if low == u32::MAX {
            store(next, 3, high.wrapping_add(1));
        }
    }
}

// SAFETY: one thread accesses four elements, which each argument has.
contract! { unsafe draw { block: 32, align: 4 } |k| {
    Violation::unless_length("generator", 4, k.generator.len())?;
    Violation::unless_length("next", 4, k.next.len())?;
    Violation::unless_length("draw", 4, k.draw.len())?;
    Grid::cover(1, 1)
}}

/// The maximum number of elements of a dropout, so that each index has a counter of its own.
pub const MAX_ELEMENTS: usize = 4 << 32;

family! {
    /// Computes `y[i]` = 0 if the call's word i is below `threshold`, otherwise `scale x[i]`.
    /// Shapes: `x`, `y`: `[n]`, n at most 2^34, `draw`: `[4]`. Overwrites `y`.
    dropout<S: Stored> { dropout_f32: f32; dropout_bf16: bf16; }
    unsafe fn(x: &[S], draw: &[u32], call: u32, threshold: u32, scale: f32, y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long; `draw` has four elements.
        unsafe {
            let (key, step) = ([load(draw, 0), load(draw, 1)], [load(draw, 2), load(draw, 3)]);
            write_own_vectors!(twice S, x.len(), y, [x] |index| {
                let [a, b, c, d] = philox([(index / F4::LEN) as u32, call, step[0], step[1]], key);
                let F4([e, f, g, h]) = x * F4::splat(scale);
                let kept = |word, x| if word < threshold { 0.0 } else { x };
                F4([kept(a, e), kept(b, f), kept(c, g), kept(d, h)])
            });
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long, and `draw` has its
    // four elements.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.x.len() <= MAX_ELEMENTS, "x", "at most 2^34 elements", k.x.len())?;
        Violation::unless_length("draw", 4, k.draw.len())?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::twice_grid::<S>(k.x.len())
    }
}
