//! FlashAttention-3 (Shah et al., 2024) on Hopper's tensor cores, in BF16, for any number of
//! tokens. Parameters and gradients are those of [`flash_attention`](super::flash_attention).
//!
//! A block keeps some rows of one head resident, and streams the other operand's rows of that head
//! in tiles. Its first warpgroup copies, and the others multiply, each for 64 resident rows of its
//! own. Barriers in shared memory hand the tiles over, so each warpgroup has its own pace: one
//! computes exponentials while the products of another run.
//!
//! ```text
//! kernel   resident  streamed              computes from a tile                        file
//! forward  queries   k, v                  s = q k^T -> p, running maximum and sum     forward.rs
//!                                          out += p v
//! queries  queries   k, v                  s = q k^T -> p;  dp = dout v^T -> ds        backward.rs
//!                                          dq += ds k
//! keys     keys      q, dout of the heads  s = k q^T -> p;  dp = v dout^T -> ds        backward.rs
//!                    of its group          dv += p dout;  dk += ds q
//!
//! global memory                   shared memory, two slots    registers
//! rows of a tile  -- cp.async ->  swizzled rows  -- wgmma ->  scores  -- rounded ->
//!                                                       A operand of the second product (wgmma)
//!                                                       (accumulator layout: no shuffle)
//! ```
//! A block of the forward kernel computes several tiles of queries, one after another: every
//! `blocks`th. The copies of the next begin while one ends.
//!
//! Invariant: the order of every sum depends only on the numbers of tokens, columns and heads, and
//! on the family's table. On one device it does not depend on the grid or the run. Scores, dp and
//! outputs are chains over ascending k on the emulator. A GPU's instruction adds 16 products at
//! once, as in [`mma`](mod@crate::mma). A lane adds the weights of its own keys of a row,
//! ascending, and then the row's four lanes add theirs. Rows are rescaled as in
//! [`flash_attention_mma`](super::flash_attention_mma), for larger tiles of keys.

mod backward;
mod forward;
mod shape;
mod tile;

use super::flash_attention::place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use super::flash_attention::place::check_sizes;
use crate::family;
use crate::machine::hints::block_bounds;
use backward::{keys, queries};
use cuda_std::warpgroup_kernel as kernel;
use forward::forward;
use half::bf16;
pub use shape::Shape;

/// The shapes of the forward kernel, by their widest head.
pub const FORWARD: [Shape; 3] = [
    Shape { groups: 3, tile: 128, width: 64 },
    Shape { groups: 2, tile: 128, width: 128 },
    Shape { groups: 2, tile: 64, width: 256 },
];

/// The shapes of the kernel for the gradient of q.
pub const QUERIES: [Shape; 2] = [Shape { groups: 3, tile: 64, width: 64 }, Shape { groups: 2, tile: 64, width: 128 }];
/// The shapes of the kernel for the gradients of k and v.
pub const KEYS: [Shape; 2] = [Shape { groups: 2, tile: 64, width: 64 }, Shape { groups: 2, tile: 64, width: 128 }];

family! {
    /// Computes attention. The parameters are as in
    /// [`flash_forward`](struct@super::flash_attention::flash_forward), and `blocks`, the number of
    /// blocks to launch at most: that of the device's multiprocessors. Widths are multiples of 8.
    flash_forward_wgmma(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_forward_wgmma_64 = FORWARD[0];
        /// Up to 128 columns.
        flash_forward_wgmma_128 = FORWARD[1];
        /// Up to 256 columns.
        flash_forward_wgmma_256 = FORWARD[2];
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
        blocks: u32,
        out: *mut bf16,
        lse: *mut f32,
    ) {
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            forward::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.made() },
            >(problem, blocks, out, lse);
        }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token. `lse` has an
    // element for each token of a head. Each block has rows of its own, and accesses only those
    // below `tokens`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(1, 0) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.heads), p.lse.len())?;
        // The kernel adds it to the number of a tile, in 32 bits.
        Violation::unless((1..1 << 31).contains(&p.blocks), "blocks", "1 to 2^31 - 1", p.blocks)?;
        let tiles = Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)?.x;
        Grid::new(tiles.min(p.blocks), 1, 1)
    }
}

family! {
    /// Computes the gradient of q. The parameters are as in
    /// [`flash_bwd_dq`](struct@super::flash_attention::flash_bwd_dq). Widths are multiples of 8.
    flash_bwd_dq_wgmma(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dq_wgmma_64 = QUERIES[0];
        /// Up to 128 columns.
        flash_bwd_dq_wgmma_128 = QUERIES[1];
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
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            queries::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.made() },
            >(problem, lse, delta, dout, dqkv);
        }
    }
    // SAFETY: the argument for `flash_forward_wgmma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(2, 0) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes the gradients of k and v. The parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv). Widths are multiples of 8.
    flash_bwd_dkv_wgmma(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dkv_wgmma_64 = KEYS[0];
        /// Up to 128 columns.
        flash_bwd_dkv_wgmma_128 = KEYS[1];
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
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            keys::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.made() },
            >(problem, lse, delta, dout, dqkv);
        }
    }
    // SAFETY: the argument for `flash_forward_wgmma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        sizes.check_gradients(p.heads, [p.lse.len(), p.delta.len(), p.dout.len()])?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.kv_heads, SHAPE.rows()), 1)
    }
}
