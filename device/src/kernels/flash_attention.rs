//! Self-attention over any number of tokens, forward and backward, without a matrix of tokens x tokens (Dao, "FlashAttention-2: Faster
//! Attention with Better Parallelism and Work Partitioning", 2023). For up to 16 tokens see [`attention`](super::attention).
//!
//! A block owns some rows of one head, and passes over the others of that head in tiles of [`TILE`] rows:
//!
//! ```text
//! kernel     owns      passes over              makes of a tile                                   file
//! forward    queries   tiles of keys            scores -> p, running maximum and sum -> out       forward.rs
//! queries    queries   tiles of keys            scores -> p, dp -> ds -> dq                       backward.rs
//! keys       keys      query heads of its       scores -> p -> dv, dp -> ds -> dk                 backward.rs
//!                      group, tiles of queries
//! delta      -         -                        delta[i] = sum of dout[i] out[i]                  backward.rs
//!
//! place.rs: where the rows of a head lie, and who sees whom; shape.rs: how much a block has at once;
//! tile.rs: the products of a tile, and the copies that feed them
//! ```
//! Invariant: the order of every sum follows from the numbers of tokens, columns and heads alone:
//! - A score is one chain over the columns, ascending, times `scale`; dp is such a chain, delta the tree of a row ([`warp`](crate::warp)).
//! - Forward takes the keys of a query in tiles of 64 from key 0, whatever the width. A tile's maximum joins the maximum so far, m. The
//!   sums so far are multiplied by exp(m before - m). The weights of the tile's keys are p = exp(score - m). Their sum is eight chains,
//!   by key mod 8, then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)); it is added to the sum so far in one fused multiply-add with that factor. An
//!   output's chain goes on over the tile's keys, ascending. At the end it is multiplied by 1 / sum.
//! - dq is one chain over the keys, ascending, times `scale`. dk and dv are one chain over the query heads of the group, ascending, and
//!   the queries of each, ascending; dk is times `scale`.
//!
//! All kernels are given:
//! - `qkv`: q, k and v, packed, `[batch, tokens, (heads + 2 kv_heads) width]`, or with `stacked` not 0, `[3, batch, tokens, heads width]`. Query head
//!   h belongs to the key head h / (heads / kv_heads).
//! - `documents`: `[batch, tokens]`: a token sees only tokens of its own number; or empty.
//! - `lengths`: `[batch]`: so many tokens of a sample exist; or empty: all do.
//! - `window`: a query sees its own token and the `window - 1` before it; 0: all tokens; [`CAUSAL`]: its own and all before it.
//!
//! A key that is not seen has the weight 0. Tiles of which nothing is seen are left out; they would change no bit. So a value that is
//! not finite may reach rows that do not see it, as 0 times it, and no other value does.

mod backward;
mod forward;
pub(crate) mod place;
mod shape;
mod tile;

use crate::family;
use crate::warp::Row;
use backward::{delta, keys, queries};
use cuda_std::prelude::*;
use forward::forward;
use half::bf16;
use place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use place::Sizes;
pub use shape::{BLOCK, FORWARD, KEYS, MAX_WIDTH, QUERIES, Shape, TILE, W64, W128, W128_BACKWARD, W256};

/// `window`: a query sees its own token and all before it.
pub const CAUSAL: u32 = u32::MAX;

family! {
    /// Attention: `out[i] = sum_j p[i, j] v[j]` for each head, where p is the softmax of `scale q[i] . k[j]` over the keys j that query i
    /// sees, and `lse[i]` the logarithm of its denominator.
    ///
    /// `out`: `[batch, tokens, heads width]`, `lse`: `[batch, heads, tokens]`. A token that does not exist gets 0, and -infinity for its
    /// `lse`. The other parameters are the module's. Overwrites `out` and `lse`.
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
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        out: *mut f32,
        lse: *mut f32,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe { forward::<{ SHAPE.each }, { SHAPE.chunks }>(problem, out, lse) }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token; `lse` has an element for each token of a head. Each
    // block has rows of its own, and touches only those below `tokens`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(1) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.heads), p.lse.len())?;
        Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// The gradient of q: `dq[i] = scale sum_j ds[i, j] k[j]` with `ds[i, j] = p[i, j] (dout[i] . v[j] - delta[i])`.
    ///
    /// As for [`flash_forward`]; `lse` as it gave it, `delta` as [`flash_delta`](struct@flash_delta) did, `dout` as `out`, `dqkv` as `qkv`. Overwrites q's
    /// part of `dqkv`.
    flash_queries(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_queries_64 = W64;
        /// Up to 128 columns.
        flash_queries_128 = W128_BACKWARD;
        /// Up to 256 columns.
        flash_queries_256 = W256;
    }
    unsafe fn(
        qkv: &[f32],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[f32],
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        dqkv: *mut f32,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe { queries::<{ SHAPE.each }, { SHAPE.chunks }>(problem, lse, delta, dout, dqkv) }
    }
    // SAFETY: as for `flash_forward`; `dqkv` is as long as `qkv`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// The gradients of k and v: `dk[j] = scale sum_i ds[i, j] q[i]` and `dv[j] = sum_i p[i, j] dout[i]`, over the queries i of all heads
    /// of the group.
    ///
    /// As for [`flash_queries`]. Overwrites k's and v's parts of `dqkv`.
    flash_keys(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_keys_64 = W64;
        /// Up to 128 columns.
        flash_keys_128 = W128_BACKWARD;
        /// Up to 256 columns.
        flash_keys_256 = W256;
    }
    unsafe fn(
        qkv: &[f32],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[f32],
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        dqkv: *mut f32,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe { keys::<{ SHAPE.each }, { SHAPE.chunks }>(problem, lse, delta, dout, dqkv) }
    }
    // SAFETY: as for `flash_queries`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.kv_heads, SHAPE.rows()), 1)
    }
}

family! {
    /// `delta[b, h, i] = sum_c dout[b, i, h, c] out[b, i, h, c]`; `out`, `dout`: `[batch, tokens, heads, width]`, `delta`: `[batch, heads,
    /// tokens]`. Overwrites `delta`.
    flash_delta<S: Stored> { flash_delta_f32: f32; flash_delta_bf16: bf16; }
    unsafe fn(out: &[S], dout: &[S], tokens: u32, heads: u32, width: u32, delta: *mut f32) {
        let Some(row) = Row::new(out.len(), width as usize) else { return };
        // SAFETY: the row lies inside `out` and `dout`, and has an element in `delta`; its lanes stay together.
        unsafe { self::delta(row, out, dout, [tokens, heads, width], delta) }
    }
    // SAFETY: `out` has whole rows of `width`, one for each head of each token of a whole number of samples; `dout` is as long, and
    // `delta` has an element for each row. A thread touches a row only where it begins inside `out`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_aligned("width", k.width, crate::vector::F4::LEN)?;
        let suits = k.width > 0 && Size::of(k.width).at_most(MAX_WIDTH);
        Violation::unless(suits, "width", "1 to 256", k.width)?;
        let rows = Size::of(k.tokens).times(k.heads);
        let samples = crate::warp::rows_in("out", k.out.len(), rows.times(k.width))?;
        Violation::unless_length("dout", k.out.len(), k.dout.len())?;
        Violation::unless_length("delta", rows.times(samples), k.delta.len())?;
        Grid::cover(rows.times(samples), crate::warp::rows_at_once(crate::warp::ROW_BLOCK, k.width as usize))
    }
}
