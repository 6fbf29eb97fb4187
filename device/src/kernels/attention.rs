//! Self-attention over a few tokens, forward and backward (Vaswani et al., 2017), without a mask.
//!
//! A block holds one head of one sample in shared memory: up to [`MAX_TOKENS`] tokens of [`HEAD`] floats. Invariant:
//! every output element is one chain of fused multiply-adds in ascending order, whatever the thread that computes it.

use crate::block::divide;
use crate::contract;
use crate::math;
use crate::tile::SharedTile;
use crate::vector::{F4, load, store};
use crate::warp::max;
use cuda_std::{GpuFloat, prelude::*};

/// The width of a head.
pub const HEAD: usize = 64;
/// The most tokens that a block holds.
pub const MAX_TOKENS: usize = 16;
/// Threads in a block.
pub const ATTENTION_BLOCK: u32 = 64;

/// Vectors in a head's row.
const QUADS: u32 = (HEAD / F4::LEN) as u32;
/// Floats from one token's row to the next in shared memory: 4 more than the head, so that rows start in other banks.
const ROW: u32 = HEAD as u32 + 4;
/// Floats from one row of the tokens x tokens matrices to the next.
const PAIR_ROW: u32 = MAX_TOKENS as u32 + 1;
const ROWS_LEN: u32 = MAX_TOKENS as u32 * ROW;
const PAIRS_LEN: u32 = MAX_TOKENS as u32 * PAIR_ROW;
/// Shared bytes of the forward kernel: q, k, v and the probabilities.
pub const FORWARD_BYTES: u32 = (3 * ROWS_LEN + PAIRS_LEN) * 4;
/// Shared bytes of the backward kernel: q, k, v, dout, the probabilities and the gradients of the scores.
pub const BACKWARD_BYTES: u32 = (4 * ROWS_LEN + 2 * PAIRS_LEN) * 4;

/// One (sample, head): where its rows and its probabilities lie.
#[derive(Clone, Copy)]
struct Head {
    /// The index of token 0's first float.
    first: usize,
    /// Floats from one token to the next.
    stride: usize,
    /// The index of the first probability.
    probabilities: usize,
    tokens: u32,
}

impl Head {
    /// This block's.
    ///
    /// # Safety
    /// `tokens` and `heads` are not 0.
    #[inline(always)]
    unsafe fn new(tokens: u32, heads: u32) -> Self {
        let block = thread::block_idx_x();
        // SAFETY: the caller's contract.
        let (sample, head) = unsafe { divide(block as usize, heads as usize) };
        let stride = heads as usize * HEAD;
        Self {
            first: sample * tokens as usize * stride + head * HEAD,
            stride,
            probabilities: block as usize * tokens as usize * tokens as usize,
            tokens,
        }
    }

    /// This thread's vectors of the head, as (token, column).
    #[inline(always)]
    fn vectors(self) -> impl Iterator<Item = (u32, u32)> {
        Share { next: thread::thread_idx_x(), end: self.tokens * QUADS }
            .map(|item| (item / QUADS, item % QUADS * F4::LEN as u32))
    }

    /// This thread's pairs of tokens.
    #[inline(always)]
    fn pairs(self) -> impl Iterator<Item = (u32, u32)> {
        Share { next: thread::thread_idx_x(), end: self.tokens * self.tokens }.map(move |item| {
            // SAFETY: there are tokens, as `new` was promised.
            let (i, j) = unsafe { divide(item as usize, self.tokens as usize) };
            (i as u32, j as u32)
        })
    }

    /// The index in global memory of a vector.
    #[inline(always)]
    fn index(self, row: u32, column: u32) -> usize {
        self.first + row as usize * self.stride + column as usize
    }
}

/// A thread's items of a block's: every 64th.
struct Share {
    next: u32,
    end: u32,
}

impl Iterator for Share {
    type Item = u32;
    #[inline(always)]
    fn next(&mut self) -> Option<u32> {
        let item = self.next;
        self.next = item + ATTENTION_BLOCK;
        if item < self.end { Some(item) } else { None }
    }
}

/// `sum_d a[i, d] b[j, d]`, d ascending.
#[inline(always)]
fn dot(a: SharedTile<f32>, i: u32, b: SharedTile<f32>, j: u32) -> f32 {
    let mut sum = 0.0;
    let mut column = 0;
    while column < HEAD as u32 {
        let [a0, a1, a2, a3] = a.get4(i * ROW + column).0;
        let [b0, b1, b2, b3] = b.get4(j * ROW + column).0;
        sum = GpuFloat::mul_add(a0, b0, sum);
        sum = GpuFloat::mul_add(a1, b1, sum);
        sum = GpuFloat::mul_add(a2, b2, sum);
        sum = GpuFloat::mul_add(a3, b3, sum);
        column += F4::LEN as u32;
    }
    sum
}

/// `sum_j pairs[first + j step] rows[j, column..column + 4]`, j ascending.
#[inline(always)]
fn mix(tokens: u32, pairs: SharedTile<f32>, first: u32, step: u32, rows: SharedTile<f32>, column: u32) -> F4 {
    let mut sum = F4::splat(0.0);
    let mut j = 0;
    while j < tokens {
        sum = sum.fma(F4::splat(pairs.get(first + j * step)), rows.get4(j * ROW + column));
        j += 1;
    }
    sum
}

/// `out[b, i, h] = sum_j p[b, h, i, j] v[b, j, h]`, p = softmax over j of `scale q[b, i, h] . k[b, j, h]`; `q`, `k`,
/// `v`, `out`: `[batch, tokens, heads, 64]`, `probabilities` (p): `[batch, heads, tokens, tokens]`, tokens <= 16. A
/// block a (sample, head). Overwrites `out` and `probabilities`.
#[kernel]
pub unsafe fn attention_forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    tokens: u32,
    heads: u32,
    scale: f32,
    out: *mut f32,
    probabilities: *mut f32,
) {
    // SAFETY: the contract checks both.
    let head = unsafe { Head::new(tokens, heads) };
    // SAFETY: the tiles fill the declared shared memory; the head lies inside `q`, `k`, `v`, `out` and `probabilities`.
    unsafe {
        let [q_tile, k_tile, v_tile] = [0, 1, 2].map(|at| SharedTile::<f32>::new(at * ROWS_LEN * 4, ROWS_LEN));
        let p_tile = SharedTile::<f32>::new(3 * ROWS_LEN * 4, PAIRS_LEN);

        for (row, column) in head.vectors() {
            let (from, to) = (head.index(row, column), row * ROW + column);
            q_tile.set4(to, F4::load(q, from));
            k_tile.set4(to, F4::load(k, from));
            v_tile.set4(to, F4::load(v, from));
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            p_tile.set(i * PAIR_ROW + j, dot(q_tile, i, k_tile, j) * scale);
        }
        thread::sync_threads();

        let i = thread::thread_idx_x();
        if i < tokens {
            let mut largest = f32::NEG_INFINITY;
            let mut j = 0;
            while j < tokens {
                largest = max(largest, p_tile.get(i * PAIR_ROW + j));
                j += 1;
            }
            let mut sum = 0.0;
            j = 0;
            while j < tokens {
                let exp = math::exp(p_tile.get(i * PAIR_ROW + j) - largest);
                p_tile.set(i * PAIR_ROW + j, exp);
                sum += exp;
                j += 1;
            }
            let inverse = 1.0 / sum;
            j = 0;
            while j < tokens {
                p_tile.set(i * PAIR_ROW + j, p_tile.get(i * PAIR_ROW + j) * inverse);
                j += 1;
            }
        }
        thread::sync_threads();

        for (i, j) in head.pairs() {
            let probability = p_tile.get(i * PAIR_ROW + j);
            store(probabilities, head.probabilities + (i * tokens + j) as usize, probability);
        }
        for (i, column) in head.vectors() {
            mix(tokens, p_tile, i * PAIR_ROW, 1, v_tile, column).store(out, head.index(i, column));
        }
    }
}

contract! { attention_forward { block: ATTENTION_BLOCK, shared: FORWARD_BYTES } |k| {
    let blocks = heads_in(k.q.len(), k.tokens, k.heads)?;
    Violation::unless_length("k", k.q.len(), k.k.len())?;
    Violation::unless_length("v", k.q.len(), k.v.len())?;
    Violation::unless_length("out", k.q.len(), k.out.len())?;
    Violation::unless_length("probabilities", blocks * (k.tokens * k.tokens) as usize, k.probabilities.len())?;
    Grid::new(blocks, 1, 1)
}}

/// The gradients of [`attention_forward`](fn@attention_forward), from `dout`: with `dp[i, j] = dout[i] . v[j]` and
/// `ds[i, j] = scale p[i, j] (dp[i, j] - sum_j p[i, j] dp[i, j])`,
///
/// ```text
/// dq[i] = sum_j ds[i, j] k[j]      dk[j] = sum_i ds[i, j] q[i]      dv[j] = sum_i p[i, j] dout[i]
/// ```
/// Shapes as there; `dout`, `dq`, `dk`, `dv` as `q`. Overwrites `dq`, `dk` and `dv`.
#[kernel]
pub unsafe fn attention_backward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    probabilities: &[f32],
    dout: &[f32],
    tokens: u32,
    heads: u32,
    scale: f32,
    dq: *mut f32,
    dk: *mut f32,
    dv: *mut f32,
) {
    // SAFETY: the contract checks both.
    let head = unsafe { Head::new(tokens, heads) };
    // SAFETY: the tiles fill the declared shared memory; the head lies inside every argument.
    unsafe {
        let [q_tile, k_tile, v_tile, dout_tile] =
            [0, 1, 2, 3].map(|at| SharedTile::<f32>::new(at * ROWS_LEN * 4, ROWS_LEN));
        let p_tile = SharedTile::<f32>::new(4 * ROWS_LEN * 4, PAIRS_LEN);
        let ds_tile = SharedTile::<f32>::new((4 * ROWS_LEN + PAIRS_LEN) * 4, PAIRS_LEN);

        for (row, column) in head.vectors() {
            let (from, to) = (head.index(row, column), row * ROW + column);
            q_tile.set4(to, F4::load(q, from));
            k_tile.set4(to, F4::load(k, from));
            v_tile.set4(to, F4::load(v, from));
            dout_tile.set4(to, F4::load(dout, from));
        }
        for (i, j) in head.pairs() {
            p_tile.set(i * PAIR_ROW + j, load(probabilities, head.probabilities + (i * tokens + j) as usize));
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            ds_tile.set(i * PAIR_ROW + j, dot(dout_tile, i, v_tile, j));
        }
        thread::sync_threads();

        let i = thread::thread_idx_x();
        if i < tokens {
            let mut sum = 0.0;
            let mut j = 0;
            while j < tokens {
                sum = GpuFloat::mul_add(p_tile.get(i * PAIR_ROW + j), ds_tile.get(i * PAIR_ROW + j), sum);
                j += 1;
            }
            j = 0;
            while j < tokens {
                let ds = p_tile.get(i * PAIR_ROW + j) * (ds_tile.get(i * PAIR_ROW + j) - sum) * scale;
                ds_tile.set(i * PAIR_ROW + j, ds);
                j += 1;
            }
        }
        thread::sync_threads();

        for (row, column) in head.vectors() {
            let index = head.index(row, column);
            mix(tokens, ds_tile, row * PAIR_ROW, 1, k_tile, column).store(dq, index);
            mix(tokens, ds_tile, row, PAIR_ROW, q_tile, column).store(dk, index);
            mix(tokens, p_tile, row, PAIR_ROW, dout_tile, column).store(dv, index);
        }
    }
}

contract! { attention_backward { block: ATTENTION_BLOCK, shared: BACKWARD_BYTES } |k| {
    let blocks = heads_in(k.q.len(), k.tokens, k.heads)?;
    Violation::unless_length("k", k.q.len(), k.k.len())?;
    Violation::unless_length("v", k.q.len(), k.v.len())?;
    Violation::unless_length("probabilities", blocks * (k.tokens * k.tokens) as usize, k.probabilities.len())?;
    Violation::unless_length("dout", k.q.len(), k.dout.len())?;
    Violation::unless_length("dq", k.q.len(), k.dq.len())?;
    Violation::unless_length("dk", k.q.len(), k.dk.len())?;
    Violation::unless_length("dv", k.q.len(), k.dv.len())?;
    Grid::new(blocks, 1, 1)
}}

/// How many (sample, head) pairs `length` floats make, or what is wrong with the shape.
#[cfg(not(target_arch = "nvptx64"))]
fn heads_in(length: usize, tokens: u32, heads: u32) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless((1..=MAX_TOKENS as u32).contains(&tokens), "tokens", "1 to 16", tokens)?;
    Violation::unless(heads > 0, "heads", "at least 1", heads)?;
    let samples = crate::warp::rows_in("q", length, tokens as usize * heads as usize * HEAD)?;
    Ok(samples * heads as usize)
}
