//! FlashAttention-2 on tensor cores, accumulated in f32, for any number of tokens. Parameters and
//! gradients are those of [`flash_attention`](super::flash_attention). Tensors are BF16, with half
//! the memory, or f32 that is multiplied as TF32.
//!
//! A block keeps some rows of one head resident, and streams the other operand's rows of that head
//! in tiles. Its four warps share only the tiles. A warp has rows of its own and all columns of a
//! tile, so four lanes hold a whole row of scores. Warps in pairs share more: see `pairs.rs`.
//!
//! ```text
//! kernel   resident  streamed              computes from a tile                        file
//! forward  queries   k, v                  s = q k^T -> p, running maximum and sum     forward.rs
//!                                          out += p v
//! queries  queries   k, v                  s = q k^T -> p;  dp = dout v^T -> ds        backward.rs
//!                                          dq += ds k
//! keys     keys      q, dout of the heads  s = k q^T -> p;  dp = v dout^T -> ds        backward.rs,
//!                    of its group          dv += p dout;  dk += ds q                   pairs.rs
//! dkv_ds   keys      as for `keys`         dk and dv, and ds, which is stored          pairs.rs
//! scores   keys      as for `keys`         p and ds, which are stored                  squares.rs
//! gradient as there  one of q, k, dout     its sums += stored p or ds times rows       squares.rs
//!
//! global memory                   shared memory, two slots     registers
//! rows of a tile  -- cp.async ->  swizzled rows  -- ldmatrix ->  scores  -- rounded ->
//!                                 (mma/fragments.rs)                   A operand of the second product
//!                                                               (accumulator layout: no shuffle)
//! ```
//! Invariant: the order of every sum depends only on the numbers of tokens, columns and heads.
//! Scores, dp and outputs are mma products as described in
//! [`mma::fragments`](mod@crate::mma::fragments), which add the same numbers at once in every shape.
//! A row's maximum may move between blocks of 64 keys. A lane adds the weights of its own keys of a
//! row, ascending, and then the row's four lanes add theirs. The bits do not depend on the shape,
//! the grid or the run, and are those of
//! [`flash_attention_wgmma`](super::flash_attention_wgmma).
//!
//! p and ds are f32, rounded once for the second product. f32 q, k, v and dout are rounded to TF32
//! for each product. The sum of p adds the unrounded values. Exponentials are base 2: p = 2^(score
//! scale log2 e - maximum), so `scale` must be above 0.

mod backward;
mod forward;
mod pairs;
mod shape;
mod squares;
mod tile;

use super::flash_attention::place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use super::flash_attention::place::{check_backward, check_sizes};
use crate::family;
use crate::qkv_layout::QkvLayout;
use backward::{keys, queries};
use cuda_std::prelude::*;
use forward::forward;
pub(crate) use forward::{is_known, within_growth};
use half::bf16;
use pairs::pairs;
pub use shape::{BLOCK, Shape};
pub use squares::{Gradient, stored_scores};
use squares::{from_scores, scores};

/// The BF16 shapes of the forward kernel, by their widest head.
pub const FORWARD_BF16: [Shape; 3] =
    [Shape::of_bf16(2, 64, 64), Shape::of_bf16(2, 64, 128), Shape::of_bf16(1, 64, 256).in_one_slot()];
/// The BF16 shapes of the kernel for the gradient of q.
pub const QUERIES_BF16: [Shape; 3] =
    [Shape::of_bf16(2, 64, 64), Shape::of_bf16(2, 32, 128), Shape::of_bf16(1, 16, 256)];
/// The BF16 shapes of the kernel for the gradients of k and v. For the widest heads a block
/// computes half of the columns.
pub const KEYS_BF16: [Shape; 3] =
    [Shape::of_bf16(2, 32, 64), Shape::of_bf16(1, 64, 128).in_pairs(), Shape::of_bf16(1, 16, 256).in_parts(2)];

/// The BF16 shape of the kernel that stores p and ds.
pub const SCORES_BF16: Shape = Shape::of_bf16(1, 32, 256);
/// The BF16 shapes of the kernels that compute gradients from stored scores: of ds that the kernel
/// of dk and dv has stored, and of p and ds.
pub const FROM_SCORES_BF16: [Shape; 2] = [Shape::of_bf16(2, 64, 128), Shape::of_bf16(1, 64, 256)];

/// The f32 shapes of the forward kernel. For wider heads, a block's rows do not fit in the shared
/// memory of a GB10.
pub const FORWARD_TF32: [Shape; 2] = [Shape::of_f32(2, 64, 64), Shape::of_f32(1, 32, 128)];
/// The f32 shapes of the kernel for the gradient of q.
pub const QUERIES_TF32: [Shape; 2] = [Shape::of_f32(2, 32, 64), Shape::of_f32(1, 16, 128)];
/// The f32 shapes of the kernel for the gradients of k and v.
pub const KEYS_TF32: [Shape; 2] = [Shape::of_f32(2, 32, 64), Shape::of_f32(1, 16, 128)];

family! {
    /// Computes attention. The parameters are as in
    /// [`flash_forward`](struct@super::flash_attention::flash_forward). BF16 widths are multiples
    /// of 8.
    flash_forward_mma<S: Stored>(shape: Shape as SHAPE) {
        FORWARD_BF16[0] => { flash_forward_of_bf16_64: bf16; }
        FORWARD_BF16[1] => { flash_forward_of_bf16_128: bf16; }
        FORWARD_BF16[2] => { flash_forward_of_bf16_256: bf16; }
        FORWARD_TF32[0] => { flash_forward_of_tf32_64: f32; }
        FORWARD_TF32[1] => { flash_forward_of_tf32_128: f32; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        out: *mut S,
        lse: *mut f32,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            forward::<S, { SHAPE.m_tiles }, { SHAPE.tiles() }, { SHAPE.chunks() }, { SHAPE.made() }, { SHAPE.slots }>(
                problem, out, lse,
            );
        }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token. `lse` has an
    // element for each token of a head. Each block has rows of its own, and accesses only those
    // below `tokens`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(1, 0) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.layout.heads), p.lse.len())?;
        Grid::cover(sizes.blocks(p.layout.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes the gradient of q. The parameters are as in
    /// [`flash_bwd_dq`](struct@super::flash_attention::flash_bwd_dq). BF16 widths are multiples of
    /// 8.
    flash_bwd_dq_mma<S: Stored>(shape: Shape as SHAPE) {
        QUERIES_BF16[0] => { flash_bwd_dq_of_bf16_64: bf16; }
        QUERIES_BF16[1] => { flash_bwd_dq_of_bf16_128: bf16; }
        QUERIES_BF16[2] => { flash_bwd_dq_of_bf16_256: bf16; }
        QUERIES_TF32[0] => { flash_bwd_dq_of_tf32_64: f32; }
        QUERIES_TF32[1] => { flash_bwd_dq_of_tf32_128: f32; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[S],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        dqkv: *mut S,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            queries::<S, { SHAPE.m_tiles }, { SHAPE.tiles() }, { SHAPE.chunks() }, { SHAPE.made() }>(
                problem, lse, delta, dout, dqkv,
            );
        }
    }
    // SAFETY: the argument for `flash_forward_mma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2, 0) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::cover(sizes.blocks(p.layout.heads, SHAPE.rows()), 1)
    }
}

family! {
    /// Computes the gradients of k and v. The parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv). BF16 widths are multiples
    /// of 8.
    flash_bwd_dkv_mma<S: Stored>(shape: Shape as SHAPE) {
        KEYS_BF16[0] => { flash_bwd_dkv_of_bf16_64: bf16; }
        KEYS_BF16[1] => { flash_bwd_dkv_of_bf16_128: bf16; }
        KEYS_BF16[2] => { flash_bwd_dkv_of_bf16_256: bf16; }
        KEYS_TF32[0] => { flash_bwd_dkv_of_tf32_64: f32; }
        KEYS_TF32[1] => { flash_bwd_dkv_of_tf32_128: f32; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[S],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        dqkv: *mut S,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            if const { SHAPE.paired } {
                return pairs::<S, { SHAPE.chunks() }, false>(problem, lse, delta, dout, dqkv, 0, core::ptr::null_mut());
            }
            keys::<S, { SHAPE.m_tiles }, { SHAPE.tiles() }, { SHAPE.chunks() }, { SHAPE.made() }>(
                problem, lse, delta, dout, dqkv,
            );
        }
    }
    // SAFETY: the argument for `flash_bwd_dq_mma` holds here too; block_idx_y is the part of
    // the columns.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        Grid::new(sizes.blocks(p.layout.kv_heads, SHAPE.rows()), SHAPE.parts, 1)
    }
}

family! {
    /// Computes the gradients of k and v, and stores ds, of `count` key heads from `before` on, of
    /// all samples' heads. `ds` is as in [`flash_bwd_scores_mma`](struct@flash_bwd_scores_mma), and
    /// the other parameters as in [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv).
    flash_bwd_dkv_ds_mma<S: Stored>(shape: Shape as SHAPE) {
        KEYS_BF16[1] => { flash_bwd_dkv_ds_of_bf16_128: bf16; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[S],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        ds: *mut S,
        dqkv: *mut S,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let _ = count;
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe { pairs::<S, { SHAPE.chunks() }, true>(problem, lse, delta, dout, dqkv, before as usize, ds) };
    }
    // SAFETY: the heads lie inside `qkv`, `dqkv`, `dout`, `lse` and `delta`. `ds` has the squares
    // of these heads. Each block has keys of its own, and writes only rows below `tokens`.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        Violation::unless_length("ds", heads.times(stored_scores(p.layout.tokens, p.window != 0)), p.ds.len())?;
        Grid::cover(Size::of(p.layout.tokens).div_ceil(SHAPE.rows()).times(p.count), 1)
    }
}

family! {
    /// Stores p and ds of `count` key heads from `before` on, of all samples' heads, for
    /// [`flash_bwd_from_scores_mma`](struct@flash_bwd_from_scores_mma): each has
    /// [`stored_scores`] elements for each query head of these. The other parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv).
    flash_bwd_scores_mma<S: Stored>(shape: Shape as SHAPE) {
        SCORES_BF16 => { flash_bwd_scores_of_bf16_256: bf16; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[S],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        p: *mut S,
        ds: *mut S,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let _ = count;
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            scores::<S, { SHAPE.m_tiles }, { SHAPE.tiles() }, { SHAPE.chunks() }, { SHAPE.chunks() / 2 }>(
                problem, before as usize, lse, delta, dout, p, ds,
            );
        }
    }
    // SAFETY: the heads lie inside `qkv`, `dout`, `lse` and `delta`. `p` and `ds` have the squares
    // of these heads, of which each block writes those of its own keys.
    contract unsafe { block: BLOCK, shared: SHAPE.shared_bytes(0, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        let stored = heads.times(stored_scores(p.layout.tokens, p.window != 0));
        Violation::unless_length("p", stored, p.p.len())?;
        Violation::unless_length("ds", stored, p.ds.len())?;
        Grid::cover(Size::of(p.layout.tokens).div_ceil(SHAPE.rows()).times(p.count), 1)
    }
}

family! {
    /// Computes a gradient from stored scores, for `count` key heads from `before` on, of all
    /// samples' heads: dq or dk from ds, dv from p. `dout` is read only for dv.
    flash_bwd_from_scores_mma<S: Stored>(variant: (Gradient, Shape) as VARIANT) {
        (Gradient::Queries, FROM_SCORES_BF16[0]) => { flash_bwd_dq_from_scores_of_bf16_128: bf16; }
        (Gradient::Queries, FROM_SCORES_BF16[1]) => { flash_bwd_dq_from_scores_of_bf16_256: bf16; }
        (Gradient::Keys, FROM_SCORES_BF16[1]) => { flash_bwd_dk_from_scores_of_bf16_256: bf16; }
        (Gradient::Values, FROM_SCORES_BF16[1]) => { flash_bwd_dv_from_scores_of_bf16_256: bf16; }
    }
    unsafe fn(
        qkv: &[S],
        documents: &[u32],
        lengths: &[u32],
        scores: &[S],
        dout: &[S],
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        dqkv: *mut S,
    ) {
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let _ = count;
        const SHAPE: Shape = VARIANT.1;
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            from_scores::<
                S,
                { SHAPE.m_tiles },
                { SHAPE.tiles() },
                { SHAPE.chunks() },
                { SHAPE.made() },
                { VARIANT.0 as usize },
            >(problem, before as usize, scores, dout, dqkv);
        }
    }
    // SAFETY: the heads lie inside `qkv`, `dqkv` and `dout`, and their squares inside `scores`.
    // Each block has rows of its own, and writes only those below `tokens`.
    contract unsafe { block: BLOCK, shared: VARIANT.1.squares_bytes() } |p| {
        let sizes = check_sizes!(p, VARIANT.1.widths());
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        Violation::unless_length("scores", heads.times(stored_scores(p.layout.tokens, p.window != 0)), p.scores.len())?;
        Violation::unless_length("dout", sizes.outputs(), p.dout.len())?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        let own = if VARIANT.0 == Gradient::Queries { heads } else { Size::of(p.count) };
        Grid::cover(Size::of(p.layout.tokens).div_ceil(VARIANT.1.rows()).times(own), 1)
    }
}
