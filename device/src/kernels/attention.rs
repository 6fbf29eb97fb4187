//! Self-attention over a few tokens, queries and keys normalised by RMSNorm first (QK-norm; Henry et al., "Query-Key
//! Normalization for Transformers", 2020; Vaswani et al., 2017), forward and backward, without a mask.
//!
//! A block holds one head of one sample in shared memory: up to [`MAX_TOKENS`] tokens of [`HEAD`] floats. Invariant: every
//! sum over tokens is one ascending chain, every sum over a head's columns four chains, by column mod 4, and then
//! ((0 + 1) + (2 + 3)), whatever the thread that computes it.

use crate::block::divide;
use crate::contract;
use crate::math;
use crate::tile::SharedTile;
use crate::vector::{F4, load, store};
use crate::warp::{max, sum4};
use cuda_std::prelude::*;

/// The width of a head.
pub const HEAD: usize = 64;
/// The most tokens that a block holds.
pub const MAX_TOKENS: usize = 16;
/// Threads in a block: one for every two vectors of 12 tokens.
pub const ATTENTION_BLOCK: u32 = 96;

/// Vectors in a head's row.
const QUADS: u32 = (HEAD / F4::LEN) as u32;
/// Floats from one token's row to the next in shared memory: 4 more than the head, so that rows start in other banks.
const ROW: u32 = HEAD as u32 + 4;
/// Floats from one row of the tokens x tokens matrices to the next.
const PAIR_ROW: u32 = MAX_TOKENS as u32 + 1;
const ROWS_LEN: u32 = MAX_TOKENS as u32 * ROW;
const PAIRS_LEN: u32 = MAX_TOKENS as u32 * PAIR_ROW;
/// A number for each row of q and of k.
const FACTORS_LEN: u32 = 2 * MAX_TOKENS as u32;
/// Shared bytes of the forward kernel: q, k, v, the scores, their exponentials and the factors.
pub const FORWARD_BYTES: u32 = (3 * ROWS_LEN + 2 * PAIRS_LEN + FACTORS_LEN) * 4;
/// Shared bytes of the backward kernel: five arrays of rows, three of pairs, and the factors.
pub const BACKWARD_BYTES: u32 = (5 * ROWS_LEN + 3 * PAIRS_LEN + FACTORS_LEN) * 4;
/// Threads of the backward kernel that sum rows, the first warp; the others sum columns meanwhile.
const ROW_THREADS: u32 = 32;
const _: () = assert!(ATTENTION_BLOCK - ROW_THREADS == HEAD as u32 && FACTORS_LEN <= ROW_THREADS);

/// One (sample, head): where its rows and its probabilities lie.
#[derive(Clone, Copy)]
struct Head {
    /// The index of token 0's first float in q.
    first: usize,
    /// Floats from one token to the next.
    stride: usize,
    /// Floats of q, of k and of v.
    length: usize,
    /// The index of the first probability.
    probabilities: usize,
    tokens: u32,
}

impl Head {
    /// This block's, of q, k and v of `length` floats in all.
    ///
    /// # Safety
    /// `tokens` and `heads` are not 0.
    #[inline(always)]
    unsafe fn new(length: usize, tokens: u32, heads: u32) -> Self {
        let block = thread::block_idx_x();
        // SAFETY: the caller's contract.
        let (sample, head) = unsafe { divide(block as usize, heads as usize) };
        let stride = heads as usize * HEAD;
        Self {
            first: sample * tokens as usize * stride + head * HEAD,
            stride,
            length: length / 3,
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

    /// This thread's row of q (`part` 0) or k (1), as (factor, part, token), if it has one.
    #[inline(always)]
    fn row(self) -> Option<(u32, u32, u32)> {
        let thread = thread::thread_idx_x();
        let part = if thread < self.tokens { 0 } else { 1 };
        if thread < 2 * self.tokens { Some((thread, part, thread - part * self.tokens)) } else { None }
    }

    /// The index in q of a vector.
    #[inline(always)]
    fn index(self, row: u32, column: u32) -> usize {
        self.first + row as usize * self.stride + column as usize
    }

    /// The index of the inverse root mean square of a row of q (`part` 0) or k (1).
    #[inline(always)]
    fn scale_index(self, part: u32, row: u32) -> usize {
        (part as usize * self.length + self.index(row, 0)) / HEAD
    }

    /// The index of a pair's probability.
    #[inline(always)]
    fn probability_index(self, i: u32, j: u32) -> usize {
        self.probabilities + (i * self.tokens + j) as usize
    }
}

/// A thread's items of a block's.
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

/// `sum_d a[i, d] b[j, d]`.
#[inline(always)]
fn dot(a: SharedTile<f32>, i: u32, b: SharedTile<f32>, j: u32) -> f32 {
    let mut sum = F4::splat(0.0);
    let mut column = 0;
    while column < HEAD as u32 {
        sum = sum.fma(a.get4(i * ROW + column), b.get4(j * ROW + column));
        column += F4::LEN as u32;
    }
    sum4(sum)
}

/// `sum_i a[i, column] b[i, column]`, i ascending.
#[inline(always)]
fn column_dot(tokens: u32, a: SharedTile<f32>, b: SharedTile<f32>, column: u32) -> f32 {
    let mut sum = 0.0;
    let mut at = column;
    while at < tokens * ROW {
        sum = GpuFloat::mul_add(a.get(at), b.get(at), sum);
        at += ROW;
    }
    sum
}

/// `sum_j factor pairs[first + j step] rows[j, column..column + 4]`, j ascending.
#[inline(always)]
fn mix(
    tokens: u32,
    pairs: SharedTile<f32>,
    (first, step): (u32, u32),
    factor: f32,
    rows: SharedTile<f32>,
    column: u32,
) -> F4 {
    let mut sum = F4::splat(0.0);
    let mut j = 0;
    while j < tokens {
        sum = sum.fma(F4::splat(pairs.get(first + j * step) * factor), rows.get4(j * ROW + column));
        j += 1;
    }
    sum
}

/// The arrays of rows and of pairs at the start of a block's shared memory, and the factors after them.
///
/// # Safety
/// `(N ROWS_LEN + M PAIRS_LEN + FACTORS_LEN) 4` bytes are declared.
#[inline(always)]
unsafe fn tiles<const N: usize, const M: usize>() -> ([SharedTile<f32>; N], [SharedTile<f32>; M], SharedTile<f32>) {
    // SAFETY: the caller's contract.
    let tile = |offset: u32, len| unsafe { SharedTile::new(offset * 4, len) };
    let (mut rows, mut pairs) = ([tile(0, 0); N], [tile(0, 0); M]);
    let mut offset = 0;
    let mut at = 0;
    while at < N {
        rows[at] = tile(offset, ROWS_LEN);
        offset += ROWS_LEN;
        at += 1;
    }
    at = 0;
    while at < M {
        pairs[at] = tile(offset, PAIRS_LEN);
        offset += PAIRS_LEN;
        at += 1;
    }
    (rows, pairs, tile(offset, FACTORS_LEN))
}

/// `out[b, i, h] = sum_j p[b, h, i, j] v[b, j, h]`, p = softmax over j of `scale Q[b, i, h] . K[b, j, h]`, where
/// `Q[b, i, h] = s q gains[0]`, `s = 1 / sqrt(mean q^2 + epsilon)` over the head's 64 columns, and K the same of k with
/// `gains[1]`; `qkv` (q, k, v): `[3, batch, tokens, heads, 64]`, `gains`: `[2, 64]`, `out`: as q, `probabilities` (p):
/// `[batch, heads, tokens, tokens]`, `inverse_rms` (s): `[2, batch, tokens, heads]`; tokens <= 16. A block a (sample, head).
/// Overwrites `out`, `probabilities` and `inverse_rms`.
#[kernel]
pub unsafe fn attention_forward(
    qkv: &[f32],
    gains: &[f32],
    tokens: u32,
    heads: u32,
    epsilon: f32,
    scale: f32,
    out: *mut f32,
    probabilities: *mut f32,
    inverse_rms: *mut f32,
) {
    // SAFETY: the contract checks both.
    let head = unsafe { Head::new(qkv.len(), tokens, heads) };
    // SAFETY: the tiles fill the declared shared memory; the head lies inside every argument.
    unsafe {
        let ([q, k, v], [scores, exps], factors) = tiles::<3, 2>();
        for (row, column) in head.vectors() {
            let (from, to) = (head.index(row, column), row * ROW + column);
            q.set4(to, F4::load(qkv, from) * F4::load(gains, column as usize));
            k.set4(to, F4::load(qkv, from + head.length) * F4::load(gains, HEAD + column as usize));
            v.set4(to, F4::load(qkv, from + 2 * head.length));
        }
        if let Some((place, part, row)) = head.row() {
            let mut squares = F4::splat(0.0);
            let mut column = 0;
            while column < HEAD as u32 {
                let x = F4::load(qkv, part as usize * head.length + head.index(row, column));
                squares = squares.fma(x, x);
                column += F4::LEN as u32;
            }
            let factor = math::rsqrt(sum4(squares) / HEAD as f32 + epsilon);
            factors.set(place, factor);
            store(inverse_rms, head.scale_index(part, row), factor);
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            let score = dot(q, i, k, j) * factors.get(i) * factors.get(tokens + j) * scale;
            scores.set(i * PAIR_ROW + j, score);
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            let mut largest = f32::NEG_INFINITY;
            let mut at = 0;
            while at < tokens {
                largest = max(largest, scores.get(i * PAIR_ROW + at));
                at += 1;
            }
            exps.set(i * PAIR_ROW + j, math::exp(scores.get(i * PAIR_ROW + j) - largest));
        }
        thread::sync_threads();

        // Each thread sums the row again: that is sooner than another barrier.
        let inverse = |i: u32| {
            let mut sum = 0.0;
            let mut at = 0;
            while at < tokens {
                sum += exps.get(i * PAIR_ROW + at);
                at += 1;
            }
            1.0 / sum
        };
        for (i, j) in head.pairs() {
            store(probabilities, head.probability_index(i, j), exps.get(i * PAIR_ROW + j) * inverse(i));
        }
        for (i, column) in head.vectors() {
            mix(tokens, exps, (i * PAIR_ROW, 1), inverse(i), v, column).store(out, head.index(i, column));
        }
    }
}

contract! { attention_forward { block: ATTENTION_BLOCK, shared: FORWARD_BYTES } |k| {
    let blocks = heads_in(k.qkv.len(), k.tokens, k.heads)?;
    Violation::unless_length("gains", 2 * HEAD, k.gains.len())?;
    Violation::unless_length("out", k.qkv.len() / 3, k.out.len())?;
    Violation::unless_length("probabilities", blocks * (k.tokens * k.tokens) as usize, k.probabilities.len())?;
    Violation::unless_length("inverse_rms", 2 * blocks * k.tokens as usize, k.inverse_rms.len())?;
    Grid::new(blocks, 1, 1)
}}

/// The gradients of [`attention_forward`](fn@attention_forward), from `dout`: with `dp[i, j] = dout[i] . v[j]` and
/// `ds[i, j] = scale p[i, j] (dp[i, j] - sum_j p[i, j] dp[i, j])`,
///
/// ```text
/// dQ[i] = sum_j ds[i, j] K[j]      dK[j] = sum_i ds[i, j] Q[i]      dv[j] = sum_i p[i, j] dout[i]
/// dq[i] = s (g dQ[i] - n mean(g dQ[i] n))     dgain = sum_i dQ[i] n     with n = q[i] s, g = gains[0]; the same for k
/// ```
/// Shapes as there; `dout` as `out`, `dqkv` (dq, dk, dv) as `qkv`; `dgains`: `[batch heads, 2, 64]`, to be finished by
/// [`sum_rows`](fn@crate::reduce::sum_rows). Overwrites `dqkv` and `dgains`.
#[kernel]
pub unsafe fn attention_backward(
    qkv: &[f32],
    gains: &[f32],
    inverse_rms: &[f32],
    probabilities: &[f32],
    dout: &[f32],
    tokens: u32,
    heads: u32,
    scale: f32,
    dqkv: *mut f32,
    dgains: *mut f32,
) {
    // SAFETY: the contract checks both.
    let head = unsafe { Head::new(qkv.len(), tokens, heads) };
    // SAFETY: the tiles fill the declared shared memory; the head lies inside every argument. Once dp is known, nobody
    // reads v, and dQ takes its place.
    unsafe {
        let ([q, k, v, dout_rows, dk], [p, dp, ds], means) = tiles::<5, 3>();
        let dq = v;
        let factor = |part, row| F4::splat(load(inverse_rms, head.scale_index(part, row)));
        let gain = |part: u32, column: u32| F4::load(gains, part as usize * HEAD + column as usize);
        for (row, column) in head.vectors() {
            let (from, to) = (head.index(row, column), row * ROW + column);
            q.set4(to, F4::load(qkv, from) * factor(0, row));
            k.set4(to, F4::load(qkv, from + head.length) * factor(1, row));
            v.set4(to, F4::load(qkv, from + 2 * head.length));
            dout_rows.set4(to, F4::load(dout, from));
        }
        for (i, j) in head.pairs() {
            p.set(i * PAIR_ROW + j, load(probabilities, head.probability_index(i, j)));
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            dp.set(i * PAIR_ROW + j, dot(dout_rows, i, v, j));
        }
        thread::sync_threads();
        for (i, j) in head.pairs() {
            let mut sum = 0.0;
            let mut at = i * PAIR_ROW;
            while at < i * PAIR_ROW + tokens {
                sum = GpuFloat::mul_add(p.get(at), dp.get(at), sum);
                at += 1;
            }
            at = i * PAIR_ROW + j;
            ds.set(at, p.get(at) * (dp.get(at) - sum) * scale);
        }
        thread::sync_threads();
        for (row, column) in head.vectors() {
            let at = row * ROW + column;
            dq.set4(at, mix(tokens, ds, (row * PAIR_ROW, 1), 1.0, k, column) * gain(1, column));
            dk.set4(at, mix(tokens, ds, (row, PAIR_ROW), 1.0, q, column) * gain(0, column));
            let dv = mix(tokens, p, (row, PAIR_ROW), 1.0, dout_rows, column);
            dv.store(dqkv, head.index(row, column) + 2 * head.length);
        }
        thread::sync_threads();

        if let Some((mean, part, row)) = head.row() {
            let (d, n) = if part == 0 { (dq, q) } else { (dk, k) };
            let mut sum = F4::splat(0.0);
            let mut column = 0;
            while column < HEAD as u32 {
                sum = sum.fma(d.get4(row * ROW + column) * gain(part, column), n.get4(row * ROW + column));
                column += F4::LEN as u32;
            }
            means.set(mean, sum4(sum) / HEAD as f32);
        }
        let thread = thread::thread_idx_x();
        if thread >= ROW_THREADS {
            let column = thread - ROW_THREADS;
            let place = thread::block_idx_x() as usize * 2 * HEAD + column as usize;
            store(dgains, place, column_dot(tokens, dq, q, column));
            store(dgains, place + HEAD, column_dot(tokens, dk, k, column));
        }
        thread::sync_threads();

        for (row, column) in head.vectors() {
            let (at, index) = (row * ROW + column, head.index(row, column));
            let pull = |mean| F4::splat(-means.get(mean));
            let own = (dq.get4(at) * gain(0, column)).fma(pull(row), q.get4(at)) * factor(0, row);
            own.store(dqkv, index);
            let own = (dk.get4(at) * gain(1, column)).fma(pull(tokens + row), k.get4(at)) * factor(1, row);
            own.store(dqkv, index + head.length);
        }
    }
}

contract! { attention_backward { block: ATTENTION_BLOCK, shared: BACKWARD_BYTES } |k| {
    let blocks = heads_in(k.qkv.len(), k.tokens, k.heads)?;
    Violation::unless_length("gains", 2 * HEAD, k.gains.len())?;
    Violation::unless_length("inverse_rms", 2 * blocks * k.tokens as usize, k.inverse_rms.len())?;
    Violation::unless_length("probabilities", blocks * (k.tokens * k.tokens) as usize, k.probabilities.len())?;
    Violation::unless_length("dout", k.qkv.len() / 3, k.dout.len())?;
    Violation::unless_length("dqkv", k.qkv.len(), k.dqkv.len())?;
    Violation::unless_length("dgains", blocks * 2 * HEAD, k.dgains.len())?;
    Grid::new(blocks, 1, 1)
}}

/// How many (sample, head) pairs there are in q, k and v of `length` floats in all, or what is wrong with the shape.
#[cfg(not(target_arch = "nvptx64"))]
fn heads_in(length: usize, tokens: u32, heads: u32) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless((1..=MAX_TOKENS as u32).contains(&tokens), "tokens", "1 to 16", tokens)?;
    Violation::unless(heads > 0, "heads", "at least 1", heads)?;
    let samples = crate::warp::rows_in("qkv", length, 3 * tokens as usize * heads as usize * HEAD)?;
    Ok(samples * heads as usize)
}
