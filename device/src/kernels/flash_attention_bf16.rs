//! Self-attention of BF16 tensors over any number of tokens, by matrix instructions with sums in f32: as
//! [`flash_attention`](super::flash_attention), whose parameters and gradients these are, with what memory holds halved.
//!
//! A block owns some rows of one head, and passes over the others of that head in tiles. Its four warps share nothing but the tiles: a
//! warp has rows of its own, all columns of a tile, and so a whole row of scores in four lanes.
//!
//! ```text
//! kernel     a warp owns   passes over            makes of a tile                                                  file
//! forward    queries       k, v                   s = q k^T -> p, running maximum and sum;  out += p v             forward.rs
//! queries    queries       k, v                   s = q k^T -> p;  dp = dout v^T -> ds;  dq += ds k                backward.rs
//! keys       keys          q, dout of the heads   s = k q^T -> p;  dp = v dout^T -> ds;  dv += p dout, dk += ds q  backward.rs
//!                          of its group
//!
//! global memory                shared memory, two slots          registers
//! rows of a tile  -- cp.async -->  swizzled rows  -- ldmatrix -->  scores  -- rounded to BF16 -->  a factor of the second product
//!                                  (squares.rs)      (.trans)              (as the first product left them: no lane moves any)
//! ```
//! Invariant: the order of every sum follows from the numbers of tokens, columns and heads alone, and from the family's table. Scores, dp
//! and outputs are products as [`squares`](crate::squares) says: on one device they depend neither on the grid nor on the run; emulator
//! and GPU may differ as those of [`matmul_bf16`](super::matmul_bf16) do. p and ds are f32, rounded to BF16 once, for the second product. The
//! sum of p adds them unrounded. Exponents are of 2: p = 2^(score scale log2 e - maximum), so `scale` is above 0.

mod backward;
mod forward;
mod shape;
mod tile;

use super::flash_attention::place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use super::flash_attention::place::Sizes;
use crate::family;
use backward::{keys, queries};
use cuda_std::prelude::*;
use forward::forward;
use half::bf16;
pub use shape::{BLOCK, Shape};

/// The shapes of the forward kernel, by the widest head of each.
pub const FORWARD: [Shape; 3] = [Shape::new(2, 64, 64), Shape::new(2, 64, 128), Shape::new(1, 32, 256)];
/// The shapes of the kernel for the gradient of q.
pub const QUERIES: [Shape; 3] = [Shape::new(1, 64, 64), Shape::new(2, 32, 128), Shape::new(1, 16, 256)];
/// The shapes of the kernel for the gradients of k and v. Of the widest heads a block makes half of the columns.
pub const KEYS: [Shape; 3] = [Shape::new(2, 32, 64), Shape::new(1, 32, 128), Shape::new(1, 16, 256).in_parts(2)];

family! {
    /// Attention of BF16 tensors; the parameters are those of [`flash_forward`](struct@super::flash_attention::flash_forward), and widths are
    /// multiples of 8.
    flash_forward_bf16(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_forward_of_bf16_64 = FORWARD[0];
        /// Up to 128 columns.
        flash_forward_of_bf16_128 = FORWARD[1];
        /// Up to 256 columns.
        flash_forward_of_bf16_256 = FORWARD[2];
    }
    unsafe fn(
        qkv: &[bf16],
        documents: &[u32],
        lengths: &[u32],
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        out: *mut bf16,
        lse: *mut f32,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe { forward::<{ SHAPE.squares }, { SHAPE.tiles() }, { SHAPE.chunks() }>(problem, out, lse) }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token; `lse` has an element for each token of a head. Each
    // block has rows of its own, and touches only those below `tokens`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(1, 0) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.heads), p.lse.len())?;
        Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// The gradient of q; the parameters are those of [`flash_queries`](struct@super::flash_attention::flash_queries), and widths are multiples of
    /// 8.
    flash_queries_bf16(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_queries_of_bf16_64 = QUERIES[0];
        /// Up to 128 columns.
        flash_queries_of_bf16_128 = QUERIES[1];
        /// Up to 256 columns.
        flash_queries_of_bf16_256 = QUERIES[2];
    }
    unsafe fn(
        qkv: &[bf16],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        dqkv: *mut bf16,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe { queries::<{ SHAPE.squares }, { SHAPE.tiles() }, { SHAPE.chunks() }>(problem, lse, delta, dout, dqkv) }
    }
    // SAFETY: as for `flash_forward_bf16`; `dqkv` is as long as `qkv`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2, 0) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// The gradients of k and v; the parameters are those of [`flash_keys`](struct@super::flash_attention::flash_keys), and widths are multiples of
    /// 8.
    flash_keys_bf16(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_keys_of_bf16_64 = KEYS[0];
        /// Up to 128 columns.
        flash_keys_of_bf16_128 = KEYS[1];
        /// Up to 256 columns.
        flash_keys_of_bf16_256 = KEYS[2];
    }
    unsafe fn(
        qkv: &[bf16],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        width: u32,
        stacked: u32,
        window: u32,
        scale: f32,
        dqkv: *mut bf16,
    ) {
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the width suits the shape.
        unsafe {
            keys::<{ SHAPE.squares }, { SHAPE.tiles() }, { SHAPE.chunks() }, { SHAPE.made() }>(
                problem, lse, delta, dout, dqkv,
            );
        }
    }
    // SAFETY: as for `flash_queries_bf16`; the grid has a layer along y for each part of the columns.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = Sizes::new(p.qkv.len(), [p.tokens, p.heads, p.kv_heads, p.width, p.stacked], SHAPE.widths())?;
        sizes.check_masks(p.documents.len(), p.lengths.len())?;
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::new(sizes.blocks(p.kv_heads, SHAPE.rows()), SHAPE.parts, 1)
    }
}
