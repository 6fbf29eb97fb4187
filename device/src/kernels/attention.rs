//! Self-attention over up to 16 tokens, forward and backward, without a mask (Vaswani et al.,
//! 2017). RMSNorm normalizes queries and keys first (QK-norm; Henry et al., "Query-Key
//! Normalization for Transformers", 2020).
//!
//! Half a warp computes one head of one sample. Its 16 lanes take three roles in turn:
//!
//! ```text
//! block b = one warp:  lanes 0..15 have head 2 b, lanes 16..31 head 2 b + 1
//!
//! lane l of a head has    in                                       in these phases
//!   columns 4 l .. 4 l+3  every token, in registers and in shared  copies, out, dv, dq, dk, dgains
//!   row l                 q, k and the pairs of token l (if any)   RMSNorm, softmax, ds
//!   GROUPS x GROUPS       places of the pairs (see `head.rs`)      scores, dp
//!
//! shared memory of a head, in floats (a row of 64 starts every 68, a row of 16 every 20):
//!   forward    | q: 16 rows of 64 | k: 16 rows of 64 | scores, then p: 16 x 16 |
//!              | factors of k: 16 |
//!   backward   | x: 16 rows of 64 | y: 16 rows of 64 | p across | ds | ds across |
//!              | 2 x 16 factors | 2 x 16 means | 16 unused |
//! ```
//! After both heads, the forward kernel keeps one copy of the gains of q and k.
//! "Across" means transposed: the row of token j holds its pairs with every i.
//!
//! BF16 is widened when it is read, and a result is rounded once, when it is written.
//!
//! A lane keeps its columns of every token in registers, so token numbers are compile-time
//! constants. `GROUPS` is the number of groups of four tokens, rounded up.
//!
//! Invariant: a sum over tokens is one ascending chain. A sum over a head's columns is four chains,
//! by column mod 4, then ((0 + 1) + (2 + 3)). Both hold for every lane that computes such a sum.

mod head;

use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::vector::{F4, load, store};
use crate::warp::{LANES, larger, sum4};
use crate::{family, math, unroll_on_gpu};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{Size, Violation};
use cuda_std::{GpuFloat, prelude::*};
use half::bf16;
use head::*;

/// The columns of a head.
pub const HEAD: usize = 64;
/// The maximum of tokens of a head.
pub const MAX_TOKENS: usize = 16;
/// The threads in a block: one warp.
pub const ATTENTION_BLOCK: u32 = LANES;

/// The heads of a block.
const HEADS: u32 = ATTENTION_BLOCK / OWN_LANES;
const FORWARD_LEN: u32 = 2 * ROWS_LEN + PAIRS_LEN + NUMBERS_LEN;
/// The 16 unused floats make the second head of a block start 16 banks after the first, as in the
/// forward kernel.
const BACKWARD_LEN: u32 = 2 * ROWS_LEN + 3 * PAIRS_LEN + 4 * NUMBERS_LEN + 16;
const _: () = assert!(FORWARD_LEN % 32 == 16 && BACKWARD_LEN % 32 == 16);
/// The shared memory of the forward kernel in bytes: q, k, the scores and the factors of each head,
/// and the gains once.
pub const FORWARD_BYTES: u32 = (HEADS * FORWARD_LEN + GAINS_LEN) * 4;
/// The shared memory of the backward kernel in bytes: for each head two arrays of rows, three of
/// pairs, the factors, the means and 16 unused floats.
pub const BACKWARD_BYTES: u32 = HEADS * BACKWARD_LEN * 4;

family! {
    /// Computes attention: `out[b, i, h] = sum_j p[b, h, i, j] v[b, j, h]`.
    ///
    /// p is the softmax over j of `scale Q[b, i, h] . K[b, j, h]`. `Q[b, i, h] = s q gains[0]` with
    /// `s = 1 / sqrt(mean q^2 + epsilon)` over the head's 64 columns. K is computed from k
    /// likewise, with `gains[1]`.
    ///
    /// Shapes: `qkv` (q, k, v): `[3, batch, tokens, heads, 64]`, `gains`: `[2, 64]`, `out`: as q,
    /// `probabilities` (p): `[batch, heads, tokens, tokens]`, `inverse_rms` (s): `[2, batch,
    /// tokens, heads]`. tokens <= 16. Overwrites `out`, `probabilities` and `inverse_rms`.
    attention_forward<S: Stored> { attention_forward_f32: f32; attention_forward_bf16: bf16; }
    unsafe fn(
        qkv: &[S],
        gains: &[f32],
        tokens: u32,
        heads: u32,
        epsilon: f32,
        scale: f32,
        out: *mut S,
        probabilities: *mut f32,
        inverse_rms: *mut f32,
    ) {
        // SAFETY: the contract checks that `tokens` and `heads` are not 0, and that the head lies
        // inside every argument.
        unsafe {
            let head = Head::new(qkv.len(), tokens, heads);
            with_groups!(tokens, forward(head, qkv, gains, epsilon, scale, out, probabilities, inverse_rms));
        }
    }
    // SAFETY: `heads` counts the heads of a whole number of samples. A half warp past the end
    // recomputes the first head and writes nothing. A head has at most 16 tokens, which lie inside
    // `qkv` and `out`. Its pairs and factors lie inside `probabilities` and `inverse_rms`, which
    // hold one for each.
    contract unsafe { block: ATTENTION_BLOCK, shared: FORWARD_BYTES } |k| {
        let heads = heads_in(k.qkv.len(), k.tokens, k.heads)?;
        Violation::unless_length("gains", 2 * HEAD, k.gains.len())?;
        Violation::unless_length("out", k.qkv.len() / 3, k.out.len())?;
        Violation::unless_length("probabilities", heads.times(k.tokens).times(k.tokens), k.probabilities.len())?;
        Violation::unless_length("inverse_rms", heads.times(k.tokens).times(2), k.inverse_rms.len())?;
        Grid::cover(heads, HEADS as usize)
    }
}

/// # Safety
/// The head lies inside every argument, and `GROUPS` covers its tokens.
#[inline(always)]
unsafe fn forward<const GROUPS: usize, S: Stored>(
    head: Head,
    qkv: &[S],
    gains: &[f32],
    epsilon: f32,
    scale: f32,
    out: *mut S,
    probabilities: *mut f32,
    inverse_rms: *mut f32,
) {
    let Head { tokens, lane, exists, .. } = head;
    // SAFETY: the tiles fill the declared shared memory. The caller guarantees that the head lies
    // inside every argument; a head past the end is replaced by the first.
    unsafe {
        let tile = |offset, len| head.tile(FORWARD_LEN, offset, len);
        let (q, k, p) = (tile(0, ROWS_LEN), tile(ROWS_LEN, ROWS_LEN), tile(2 * ROWS_LEN, PAIRS_LEN));
        let k_factors = tile(2 * ROWS_LEN + PAIRS_LEN, NUMBERS_LEN);
        let shared_gains = SharedTile::new(HEADS * FORWARD_LEN * 4, GAINS_LEN);
        head.copy::<GROUPS, S>(q, qkv, 0);
        head.copy::<GROUPS, S>(k, qkv, head.length);
        let at = thread::thread_idx_x() * F4::LEN as u32;
        shared_gains.copy4(at, gains, at as usize);
        commit_copies();
        wait_copies::<0>();
        sync();

        let (mut factor, mut of_k) = (0.0, 0.0);
        if head.has_row() {
            let [q_at, k_at] = [0, head.length].map(|part| part + head.row(lane));
            let (q_small, k_small);
            [q_small, factor] = apply_gains((q, lane), (qkv, q_at), (shared_gains, 0), epsilon);
            [k_small, of_k] = apply_gains((k, lane), (qkv, k_at), (shared_gains, 1), epsilon);
            if exists {
                store(inverse_rms, head.scale_index(0), factor * q_small);
                store(inverse_rms, head.scale_index(1), of_k * k_small);
            }
        }
        k_factors.set(lane, of_k);
        sync();
        head.qk_scores::<GROUPS>(q, k, p);
        sync();

        // These reads overlap the softmax.
        let mut v = [F4::splat(0.0); MAX_TOKENS];
        for_each_token!(GROUPS, tokens, |row| { v[row] = F4::load(qkv, head.index(row) + 2 * head.length) });
        if head.has_row() {
            let (mut row, k_factors) = (pair_row::<GROUPS>(p, lane), pair_row::<GROUPS>(k_factors, 0));
            // `larger` may drop a NaN. The sum propagates it.
            let mut largest = f32::NEG_INFINITY;
            for_each_token!(GROUPS, tokens, |j| {
                let score = &mut row[j / 4].0[j % 4];
                *score = *score * factor * k_factors[j / 4].0[j % 4] * scale;
                largest = larger(largest, *score);
            });
            let mut sum = 0.0;
            for_each_token!(GROUPS, tokens, |j| {
                let exp = math::exp_negative(row[j / 4].0[j % 4] - largest);
                row[j / 4].0[j % 4] = exp;
                sum += exp;
            });
            let inverse = F4::splat(1.0 / sum);
            unroll_on_gpu!(at < GROUPS => { row[at] = row[at] * inverse });
            set_pair_row::<GROUPS>(p, lane, &row);
        }
        sync();

        let mut row = 0;
        while exists && row < tokens {
            let mixed = head.pv_accumulate::<GROUPS>(p, row, &v);
            unroll_on_gpu!(at < 2 => {
                let i = row + at as u32;
                if i < tokens {
                    mixed[at].store(out, head.index(i as usize));
                    if head.has_row() {
                        store(probabilities, head.probability_index(i as usize), p.get(i * PAIR_ROW + lane));
                    }
                }
            });
            row += 2;
        }
    }
}

family! {
    /// Computes the gradients of [`attention_forward`](struct@attention_forward) from `dout`. Let
    /// `dp[i, j] = dout[i] . v[j]` and `ds[i, j] = scale p[i, j] (dp[i, j] - sum_j p[i, j] dp[i,
    /// j])`:
    ///
    /// ```text
    /// dQ[i] = sum_j ds[i, j] K[j]    dK[j] = sum_i ds[i, j] Q[i]    dv[j] = sum_i p[i, j] dout[i]
    /// dq[i] = s (g dQ[i] - n mean(g dQ[i] n))    dgain = sum_i dQ[i] n
    ///   with n = q[i] s, g = gains[0]; the same for k
    /// ```
    /// Shapes are as in the forward kernel. `dout` has the shape of `out`, and `dqkv` (dq, dk, dv)
    /// has the shape of `qkv`. `dgains`: `[batch heads, 2, 64]`, one row for each head of each
    /// sample. [`sum_rows`](struct@crate::reduce::sum_rows) reduces these rows. Overwrites `dqkv`
    /// and `dgains`.
    attention_backward<S: Stored> { attention_backward_f32: f32; attention_backward_bf16: bf16; }
    unsafe fn(
        qkv: &[S],
        gains: &[f32],
        inverse_rms: &[f32],
        probabilities: &[f32],
        dout: &[S],
        tokens: u32,
        heads: u32,
        scale: f32,
        dqkv: *mut S,
        dgains: *mut f32,
    ) {
        // SAFETY: the contract checks that `tokens` and `heads` are not 0, and that the head lies
        // inside every argument.
        unsafe {
            let head = Head::new(qkv.len(), tokens, heads);
            with_groups!(tokens, backward(head, qkv, gains, inverse_rms, probabilities, dout, scale, dqkv, dgains));
        }
    }
    // SAFETY: `heads` counts the heads of a whole number of samples. A half warp past the end
    // writes nothing. A head's tokens lie inside `qkv`, `dout` and `dqkv`. Its pairs and factors
    // lie inside `probabilities` and `inverse_rms`, which hold one for each. Its gains' gradient is
    // a row of `dgains`.
    contract unsafe { block: ATTENTION_BLOCK, shared: BACKWARD_BYTES } |k| {
        let heads = heads_in(k.qkv.len(), k.tokens, k.heads)?;
        Violation::unless_length("gains", 2 * HEAD, k.gains.len())?;
        Violation::unless_length("inverse_rms", heads.times(k.tokens).times(2), k.inverse_rms.len())?;
        Violation::unless_length("probabilities", heads.times(k.tokens).times(k.tokens), k.probabilities.len())?;
        Violation::unless_length("dout", k.qkv.len() / 3, k.dout.len())?;
        Violation::unless_length("dqkv", k.qkv.len(), k.dqkv.len())?;
        Violation::unless_length("dgains", heads.times(2 * HEAD), k.dgains.len())?;
        Grid::cover(heads, HEADS as usize)
    }
}

/// # Safety
/// The caller meets the requirements of `forward`.
#[inline(always)]
unsafe fn backward<const GROUPS: usize, S: Stored>(
    head: Head,
    qkv: &[S],
    gains: &[f32],
    inverse_rms: &[f32],
    probabilities: &[f32],
    dout: &[S],
    scale: f32,
    dqkv: *mut S,
    dgains: *mut f32,
) {
    let Head { tokens, lane, exists, length, .. } = head;
    // SAFETY: the tiles fill the declared shared memory. The caller guarantees that the head lies
    // inside every argument; a head past the end is replaced by the first.
    unsafe {
        let tile = |offset, len| head.tile(BACKWARD_LEN, offset, len);
        let (x, y) = (tile(0, ROWS_LEN), tile(ROWS_LEN, ROWS_LEN));
        let pairs = |at: u32| tile(2 * ROWS_LEN + at * PAIRS_LEN, PAIRS_LEN);
        let (p_across, ds, ds_across) = (pairs(0), pairs(1), pairs(2));
        let numbers = |at: u32| tile(2 * ROWS_LEN + 3 * PAIRS_LEN + at * NUMBERS_LEN, NUMBERS_LEN);
        let (factors, means) = ([numbers(0), numbers(1)], [numbers(2), numbers(3)]);
        head.copy::<GROUPS, S>(x, dout, 0);
        head.copy::<GROUPS, S>(y, qkv, 2 * length);
        commit_copies();
        if head.has_row() {
            let mut across = [F4::splat(0.0); GROUPS];
            for_each_token!(GROUPS, tokens, |i| {
                across[i / 4].0[i % 4] = load(probabilities, head.probability_index(i));
            });
            set_pair_row::<GROUPS>(p_across, lane, &across);
            factors[0].set(lane, load(inverse_rms, head.scale_index(0)));
            factors[1].set(lane, load(inverse_rms, head.scale_index(1)));
        }
        wait_copies::<0>();
        sync();
        head.qk_scores::<GROUPS>(x, y, ds);
        let dout = head.columns::<GROUPS>(x);
        sync();

        // All lanes have finished reading dout and v there. The copies of f32 q and k overlap
        // the computation of dv.
        head.copy::<GROUPS, S>(x, qkv, 0);
        head.copy::<GROUPS, S>(y, qkv, length);
        commit_copies();
        let mut row = 0;
        while exists && row < tokens {
            let dv = head.pv_accumulate::<GROUPS>(p_across, row, &dout);
            unroll_on_gpu!(at < 2 => {
                let j = row as usize + at;
                if j < tokens as usize {
                    dv[at].store(dqkv, head.index(j) + 2 * length);
                }
            });
            row += 2;
        }
        // Lanes past the tokens write too: `pv_accumulate` reads whole vectors of four of
        // `ds_across`.
        if lane < 4 * GROUPS as u32 {
            let (mut row, mut p) = (pair_row::<GROUPS>(ds, lane), [0.0; MAX_TOKENS]);
            let mut sum = 0.0;
            for_each_token!(GROUPS, tokens, |j| {
                p[j] = p_across.get(j as u32 * PAIR_ROW + lane);
                sum = GpuFloat::mul_add(p[j], row[j / 4].0[j % 4], sum);
            });
            for_each_token!(GROUPS, tokens, |j| {
                let gradient = p[j] * (row[j / 4].0[j % 4] - sum) * scale;
                row[j / 4].0[j % 4] = gradient;
                ds_across.set(j as u32 * PAIR_ROW + lane, gradient);
            });
            set_pair_row::<GROUPS>(ds, lane, &row);
        }
        wait_copies::<0>();
        sync();
        // A lane reads only what it copied itself.
        let (mut q, mut k) = (head.columns::<GROUPS>(x), head.columns::<GROUPS>(y));
        for_each_token!(GROUPS, tokens, |row| {
            q[row] = q[row] * F4::splat(factors[0].get(row as u32));
            k[row] = k[row] * F4::splat(factors[1].get(row as u32));
        });
        let gain = |part| F4::load(gains, part * HEAD + head.column as usize);
        let gains = [gain(0), gain(1)];
        gradient::<GROUPS, S>(head, 0, ds, &k, &q, gains, [x, y], factors[0], means[0], dqkv, dgains);
        gradient::<GROUPS, S>(head, 1, ds_across, &q, &k, gains, [x, y], factors[1], means[1], dqkv, dgains);
    }
}

/// Writes dq (`part` 0) or dk (1), and its row of the gains' gradient. `normal` is the normalized q
/// or k. Its gradient is the sum of `others` weighted by `pairs`.
///
/// # Safety
/// The caller meets the requirements of `backward`. Since the last barrier only this lane has
/// accessed its columns of `n` and `d`.
#[inline(always)]
unsafe fn gradient<const GROUPS: usize, S: Stored>(
    head: Head,
    part: usize,
    pairs: SharedTile<f32>,
    others: &[F4; MAX_TOKENS],
    normal: &[F4; MAX_TOKENS],
    gains: [F4; 2],
    [n, d]: [SharedTile<f32>; 2],
    factors: SharedTile<f32>,
    means: SharedTile<f32>,
    dqkv: *mut S,
    dgains: *mut f32,
) {
    let tokens = head.tokens;
    for_each_token!(GROUPS, tokens, |row| { n.set4(row as u32 * ROW + head.column, normal[row]) });
    let mut dgain = F4::splat(0.0);
    let mut row = 0;
    while row < tokens {
        let mixed = head.pv_accumulate::<GROUPS>(pairs, row, others);
        unroll_on_gpu!(at < 2 => {
            let (i, dy) = (row + at as u32, mixed[at] * gains[1 - part]);
            if i < tokens {
                dgain = dgain.fma(dy, n.get4(i * ROW + head.column));
                d.set4(i * ROW + head.column, dy * gains[part]);
            }
        });
        row += 2;
    }
    sync();
    if head.has_row() {
        let mut sum = F4::splat(0.0);
        let mut at = head.lane * ROW;
        while at < head.lane * ROW + HEAD as u32 {
            sum = sum.fma(d.get4(at), n.get4(at));
            at += F4::LEN as u32;
        }
        means.set(head.lane, sum4(sum) / HEAD as f32);
    }
    sync();
    // SAFETY: a head that exists has its tokens in `dqkv` and its row in `dgains`.
    unsafe {
        if head.exists {
            dgain.store(dgains, (head.number * 2 + part) * HEAD + head.column as usize);
            let mut row = 0;
            while row < tokens {
                let at = row * ROW + head.column;
                let dx = d.get4(at).fma(F4::splat(-means.get(row)), n.get4(at)) * F4::splat(factors.get(row));
                dx.store(dqkv, head.index(row as usize) + part * head.length);
                row += 1;
            }
        }
    }
}

/// Returns the number of (sample, head) pairs in q, k and v, which have `length` elements in all,
/// or the shape's violation.
#[cfg(not(target_arch = "nvptx64"))]
fn heads_in(length: usize, tokens: u32, heads: u32) -> Result<Size, Violation> {
    Violation::unless((1..=MAX_TOKENS as u32).contains(&tokens), "tokens", "1 to 16", tokens)?;
    Violation::unless(heads > 0, "heads", "at least 1", heads)?;
    let samples = crate::warp::rows_in("qkv", length, Size::of(tokens).times(heads).times(3 * HEAD))?;
    Ok(Size::of(samples).times(heads))
}
