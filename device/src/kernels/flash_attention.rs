//! Self-attention over any number of tokens, forward and backward, without a tokens x tokens matrix
//! (Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023).
//! For up to 16 tokens see [`attention`](super::attention).
//!
//! A block keeps some rows of one head resident, and streams the other operand's rows of that head
//! in tiles of [`TILE`] rows:
//!
//! ```text
//! kernel   resident  streamed            computes from a tile                         file
//! forward  queries   tiles of keys       scores -> p, running maximum and sum -> out  forward.rs
//! queries  queries   tiles of keys       scores -> p, dp -> ds -> dq                  backward.rs
//! keys     keys      query heads of its  scores -> p -> dv, dp -> ds -> dk            backward.rs
//!                    group, their tiles
//! delta    -         -                   delta[i] = sum of dout[i] out[i]             backward.rs
//!
//! place.rs: the rows of a head, and the mask; shape.rs: the tile sizes;
//! tile.rs: the products of a tile, and the copies that feed them
//! ```
//! Invariant: the order of every sum depends only on the numbers of tokens, columns and heads:
//! - A score is one chain over the columns, ascending, times `scale`. dp is such a chain. delta is
//!   the tree of a row ([`warp`](crate::warp)).
//! - Forward takes the keys of a query in tiles of 64 from key 0, for every width. A tile's maximum
//!   updates the running maximum m, and the running sums are multiplied by exp(m before - m). The
//!   weights of the tile's keys are p = exp(score - m). Their sum is eight chains, by key mod 8,
//!   then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). One fused multiply-add with that factor adds
//!   it to the running sum. An output's chain continues over the tile's keys, ascending. At the end
//!   it is multiplied by 1 / sum.
//! - dq is one chain over the keys, ascending, times `scale`. dk and dv are one chain over the
//!   query heads of the group, ascending, and the queries of each, ascending. dk is multiplied by
//!   `scale`.
//!
//! Parameters of all kernels:
//! - `qkv`: q, k and v, packed as `[batch, tokens, (heads + 2 kv_heads) width]`. If `stacked` is
//!   not 0, `[3, batch, tokens, heads width]`. Query head h belongs to the key head h / (heads /
//!   kv_heads).
//! - `documents`: `[batch, tokens]`. A token sees only tokens with its own document number. Empty
//!   means no document mask.
//! - `lengths`: `[batch]`, the number of tokens that exist in each sample. Empty means that all
//!   exist.
//! - `window`: a query sees its own token and the `window - 1` before it. 0 means all tokens, and
//!   [`CAUSAL`] its own and all before it.
//!
//! A masked key has the weight 0. Fully masked tiles are skipped, which changes no bit. A
//! non-finite value may therefore reach rows that do not see it, as 0 times it. No other value
//! does.

mod backward;
mod forward;
pub(crate) mod place;
mod shape;
mod tile;

use crate::family;
use crate::qkv_layout::QkvLayout;
use crate::warp::Row;
use backward::{ROWS_OF_DELTA, delta, keys, queries};
use cuda_std::prelude::*;
use forward::forward;
use half::bf16;
use place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use place::check_sizes;
pub use shape::{BLOCK, FORWARD, KEYS, MAX_WIDTH, QUERIES, Shape, TILE, W64, W128, W128_BACKWARD, W256};

/// The `window` of causal attention: a query sees its own token and all before it.
pub const CAUSAL: u32 = u32::MAX;

family! {
    /// Computes attention: `out[i] = sum_j p[i, j] v[j]` for each head. p is the softmax of `scale
    /// q[i] . k[j]` over the keys j that query i sees. `lse[i]` is its log-sum-exp.
    ///
    /// `out`: `[batch, tokens, heads width]`, `lse`: `[batch, heads, tokens]`. A token that does
    /// not exist gets the output 0 and the `lse` -infinity. The other parameters are the module's.
    /// Overwrites `out` and `lse`.
    flash_forward(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_forward_64 = W64;
        /// Up to 128 columns.
        flash_forward_128 = W128;
        /// Up to 256 columns.
        flash_forward_256 = W256;
    }
    unsafe fn(
        qkv: &[f32],
        documents: &[u32],
        lengths: &[u32],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        out: *mut f32,
        lse: *mut f32,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe { forward::<{ SHAPE.each }, { SHAPE.chunks }>(problem, out, lse) }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token. `lse` has an
    // element for each token of a head. Each block has rows of its own, and accesses only those
    // below `tokens`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(1) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.layout.heads), p.lse.len())?;
        Grid::cover(sizes.blocks(p.layout.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes the gradient of q: `dq[i] = scale sum_j ds[i, j] k[j]` with `ds[i, j] = p[i, j]
    /// (dout[i] . v[j] - delta[i])`.
    ///
    /// The parameters are as in [`flash_forward`], whose `lse` is an input.
    /// [`flash_delta`](struct@flash_delta) computes `delta`. `dout` has the shape of `out`, and
    /// `dqkv` has the shape of `qkv`. Overwrites q's part of `dqkv`.
    flash_bwd_dq(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dq_64 = W64;
        /// Up to 128 columns.
        flash_bwd_dq_128 = W128_BACKWARD;
        /// Up to 256 columns.
        flash_bwd_dq_256 = W256;
    }
    unsafe fn(
        qkv: &[f32],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[f32],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        dqkv: *mut f32,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe { queries::<{ SHAPE.each }, { SHAPE.chunks }>(problem, lse, delta, dout, dqkv) }
    }
    // SAFETY: the argument for `flash_forward` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        sizes.check_gradients(p.layout.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.layout.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes the gradients of k and v: `dk[j] = scale sum_i ds[i, j] q[i]` and `dv[j] = sum_i
    /// p[i, j] dout[i]`, over the queries i of all heads of the group.
    ///
    /// The parameters are as in [`flash_bwd_dq`]. Overwrites k's and v's parts of `dqkv`.
    flash_bwd_dkv(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dkv_64 = W64;
        /// Up to 128 columns.
        flash_bwd_dkv_128 = W128_BACKWARD;
        /// Up to 256 columns.
        flash_bwd_dkv_256 = W256;
    }
    unsafe fn(
        qkv: &[f32],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[f32],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        dqkv: *mut f32,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe { keys::<{ SHAPE.each }, { SHAPE.chunks }>(problem, lse, delta, dout, dqkv) }
    }
    // SAFETY: the argument for `flash_bwd_dq` holds here too.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        sizes.check_gradients(p.layout.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.layout.kv_heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes `delta[b, h, i] = sum_c dout[b, i, h, c] out[b, i, h, c]`.
    ///
    /// `out`, `dout`: `[batch, tokens, heads, width]`, `delta`: `[batch, heads, tokens]`.
    /// Overwrites `delta`.
    flash_delta<S: Stored> { flash_delta_f32: f32; flash_delta_bf16: bf16; }
    unsafe fn(out: &[S], dout: &[S], tokens: u32, heads: u32, width: u32, delta: *mut f32) {
        // SAFETY: the rows lie inside `out` and `dout`, and have elements in `delta`; their lanes
        // stay converged.
        unsafe {
            let Some(row) = Row::new(out.len(), width as usize) else { return };
            let first = row.later((ROWS_OF_DELTA - 1) * row.number, width as usize);
            if first.start < out.len() {
                self::delta(first, out, dout, [tokens, heads, width], delta)
            }
        }
    }
    // SAFETY: `out` has whole rows of `width`, one for each head of each token of a whole number of
    // samples. `dout` is as long, and `delta` has an element for each row. A thread accesses a row
    // only if it begins inside `out`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_aligned("width", k.width, crate::vector::F4::LEN)?;
        let suits = k.width > 0 && Size::of(k.width).at_most(MAX_WIDTH);
        Violation::unless(suits, "width", "1 to 256", k.width)?;
        let of_sample = Size::of(k.tokens).times(k.heads);
        let rows = of_sample.times(crate::warp::rows_in("out", k.out.len(), of_sample.times(k.width))?);
        Violation::unless(rows.at_most(u32::MAX as usize), "out", "fewer than 2^32 rows", k.out.len())?;
        Violation::unless_length("dout", k.out.len(), k.dout.len())?;
        Violation::unless_length("delta", rows, k.delta.len())?;
        let lanes = crate::warp::rows_at_once(crate::warp::ROW_BLOCK, k.width as usize);
        Grid::cover(rows, ROWS_OF_DELTA.saturating_mul(lanes))
    }
}
