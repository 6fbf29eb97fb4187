//! The mean over a sample's tokens, forward and backward.
//!
//! ```text
//! cols = 8, thread t has four elements of y (or dy), from 4 t on:
//!              sample 0                 sample 1
//!   columns    0..3      4..7           0..3      4..7
//!   token 0    t 0       t 1            t 2       t 3      a thread loops over the tokens
//!   token 1    t 0       t 1            t 2       t 3      of its columns
//!   ..
//! ```
//! If `cols` is not a multiple of four, a thread processes its elements one by one, because they
//! may belong to several samples.
//!
//! Invariant: tokens are summed in ascending order for every shape.

use crate::block::divide;
use crate::stored::Stored;
use crate::vector::{F4, load, store};
use crate::{family, for_own_vector};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `y[b, c] = (sum_t x[b, t, c]) / tokens`. Shapes: `x`: `[batch, tokens, cols]`, `y`:
    /// `[batch, cols]` of `length` elements. Overwrites `y`.
    mean_tokens_forward<S: Stored> { mean_tokens_forward_f32: f32; mean_tokens_forward_bf16: bf16; }
    unsafe fn(x: &[S], tokens: usize, cols: usize, length: usize, y: *mut S) {
        let divisor = tokens as f32;
        for_own_vector!(length, |index, part| {
            // SAFETY: the vector lies inside `y`. Its element `[b, c]` reads x[b, .., c], which the
            // contract has checked.
            unsafe {
                if cols.is_multiple_of(F4::LEN) {
                    let mut at = first_token(index, tokens, cols);
                    let mut sum = F4::splat(0.0);
                    let mut token = 0;
                    // Four at a time, so that the GPU's loads overlap.
                    crate::only_on_gpu! {
                        while token + 3 < tokens {
                            let [a, b, c, d] = [0, 1, 2, 3].map(|next| F4::load(x, at + next * cols));
                            sum = sum + a + b + c + d;
                            at += 4 * cols;
                            token += 4;
                        }
                    }
                    while token < tokens {
                        sum = sum + F4::load(x, at);
                        at += cols;
                        token += 1;
                    }
                    (sum / F4::splat(divisor)).store(y, index);
                    return;
                }
                let mut place = index;
                while place < index + part.count() {
                    let mut at = first_token(place, tokens, cols);
                    let mut sum = 0.0;
                    let mut token = 0;
                    while token < tokens {
                        sum += load(x, at).widen();
                        at += cols;
                        token += 1;
                    }
                    store(y, place, S::narrow(sum / divisor));
                    place += 1;
                }
            }
        });
    }
    // SAFETY: a thread writes only the four elements from its own index on that lie below `length`,
    // which is the length of `y`. `y` has whole rows of `cols`, and `x` is `tokens` times as long,
    // so the `tokens` elements of each lie inside `x`.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless(k.tokens > 0, "tokens", "at least 1", k.tokens)?;
        crate::warp::rows_in("y", k.length, k.cols)?;
        Violation::unless_length("x", Size::of(k.length).times(k.tokens), k.x.len())?;
        Violation::unless_length("y", k.length, k.y.len())?;
        crate::block::vector_grid(k.length)
    }
}

family! {
    /// Computes `dx[b, t, c] = dy[b, c] / tokens`; `dy`: `[batch, cols]`, `dx`: `[batch, tokens,
    /// cols]`. Overwrites `dx`.
    mean_tokens_backward<S: Stored> { mean_tokens_backward_f32: f32; mean_tokens_backward_bf16: bf16; }
    unsafe fn(dy: &[S], tokens: usize, cols: usize, dx: *mut S) {
        let divisor = tokens as f32;
        for_own_vector!(dy.len(), |index, part| {
            // SAFETY: the vector lies inside `dy`. Its element `[b, c]` writes dx[b, .., c], which
            // the contract has checked.
            unsafe {
                if cols.is_multiple_of(F4::LEN) {
                    let share = F4::load(dy, index) / F4::splat(divisor);
                    let mut at = first_token(index, tokens, cols);
                    let mut token = 0;
                    while token < tokens {
                        share.store(dx, at);
                        at += cols;
                        token += 1;
                    }
                    return;
                }
                let mut place = index;
                while place < index + part.count() {
                    let share = S::narrow(load(dy, place).widen() / divisor);
                    let mut at = first_token(place, tokens, cols);
                    let mut token = 0;
                    while token < tokens {
                        store(dx, at, share);
                        at += cols;
                        token += 1;
                    }
                    place += 1;
                }
            }
        });
    }
    // SAFETY: a thread reads only the four elements from its own index on that lie inside `dy`.
    // `dy` has whole rows of `cols`, and `dx` is `tokens` times as long, so the `tokens` elements
    // of each lie inside `dx`.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless(k.tokens > 0, "tokens", "at least 1", k.tokens)?;
        crate::warp::rows_in("dy", k.dy.len(), k.cols)?;
        Violation::unless_length("dx", Size::of(k.dy.len()).times(k.tokens), k.dx.len())?;
        crate::block::vector_grid(k.dy.len())
    }
}

/// Returns the index of `x[b, 0, c]` in `[batch, tokens, cols]` for the index `place` of `[b, c]`.
///
/// # Safety
/// `cols` is not 0.
#[inline(always)]
unsafe fn first_token(place: usize, tokens: usize, cols: usize) -> usize {
    // SAFETY: `cols` is not 0, as the caller guarantees.
    let (sample, column) = unsafe { divide(place, cols) };
    sample * tokens * cols + column
}
