//! FlashAttention-3 (Shah et al., 2024) on Hopper's tensor cores, in BF16, for any number of
//! tokens. Parameters and gradients are those of [`flash_attention`](super::flash_attention), and
//! `samples`, their number, with the tensor maps of `qkv` and `dout`: [`qkv_map`] and [`dout_map`].
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
//!                    of its group          dv += p dout;  dk += ds q;  may store ds
//! scores   keys      as for `keys`         p and ds, which are stored                  squares.rs
//! gradient as there  one of q, k, dout     its sums += stored p or ds times rows       squares.rs
//!
//! global memory                   shared memory, slots        registers
//! rows of a tile  -- boxes ---->  swizzled rows  -- wgmma ->  scores  -- rounded ->
//!                                                       A operand of the second product (wgmma)
//!                                                       (accumulator layout: no shuffle)
//! ```
//! The copy engine (TMA) copies boxes of rows from the tensor maps (copies.rs). A block of the
//! kernels `forward` and `queries` computes several tiles of queries, one after another (items.rs),
//! and one of `keys` may compute two of keys. The copies of the next begin while one ends.
//!
//! Invariant: results have the bits of [`flash_attention_mma`](super::flash_attention_mma): the
//! instruction adds 16 products at once, as there ([`mma`](mod@crate::mma)), and rows are rescaled
//! between the same keys.

mod backward;
mod copies;
mod forward;
mod heads;
mod items;
mod rows;
mod shape;
mod squares;
mod tile;

use super::flash_attention::place::Problem;
#[cfg(not(target_arch = "nvptx64"))]
use super::flash_attention::place::{check_backward, check_sizes};
use super::flash_attention_mma::Gradient;
use crate::family;
use crate::machine::hints::block_bounds;
use crate::qkv_layout::QkvLayout;
use backward::{keys, queries};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{Grid, Size, Violation};
use cuda_std::tensor_map::TensorMap;
use cuda_std::warpgroup_kernel as kernel;
use forward::forward;
use half::bf16;
use heads::Inputs;
#[cfg(not(target_arch = "nvptx64"))]
use heads::check_map;
#[cfg(not(target_arch = "nvptx64"))]
pub use heads::{dout_map, qkv_map};
pub use shape::Shape;
#[cfg(not(target_arch = "nvptx64"))]
use squares::MOST_STORED;
pub use squares::stored_scores;
use squares::{from_scores, scores};

/// The shapes of the forward kernel, by their widest head.
pub const FORWARD: [Shape; 3] = [
    Shape { groups: 3, tile: 128, slots: 2, held: 0, width: 64 },
    Shape { groups: 2, tile: 128, slots: 2, held: 0, width: 128 },
    Shape { groups: 2, tile: 64, slots: 2, held: 0, width: 256 },
];

/// The shapes of the kernel for the gradient of q.
pub const QUERIES: [Shape; 2] = [
    Shape { groups: 3, tile: 64, slots: 5, held: 0, width: 64 },
    Shape { groups: 2, tile: 64, slots: 4, held: 0, width: 128 },
];
/// The shapes of the kernel for the gradients of k and v.
pub const KEYS: [Shape; 2] = [
    Shape { groups: 2, tile: 64, slots: 4, held: 1, width: 64 },
    Shape { groups: 2, tile: 64, slots: 4, held: 0, width: 128 },
];
/// The shape of the kernel that stores scores.
pub const SCORES: Shape = Shape { groups: 2, tile: 64, slots: 2, held: 4, width: 256 };
/// The shapes of the kernels of stored scores.
pub const FROM_SCORES: [Shape; 2] = [
    Shape { groups: 2, tile: 64, slots: 4, held: 0, width: 128 },
    Shape { groups: 2, tile: 64, slots: 3, held: 0, width: 256 },
];

/// Checks the number of samples and the tensor map of `qkv`.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check_qkv_map {
    ($p:ident, $sizes:ident) => {
        Violation::unless($p.samples as usize == $sizes.samples, "samples", "the samples of `qkv`", $p.samples)?;
        let expected = qkv_map($p.qkv, [$p.layout.heads, $p.layout.kv_heads, $p.layout.width], $p.layout.stacked != 0);
        check_map("qkv_map", &$p.qkv_map, &expected)?;
    };
}

/// Returns the grid of a kernel whose blocks compute items one after another: at most `blocks`
/// blocks for `items` items.
#[cfg(not(target_arch = "nvptx64"))]
fn check_items(items: Size, blocks: u32) -> Result<Grid, Violation> {
    Violation::unless((1..1 << 31).contains(&blocks), "blocks", "1 to 2^31 - 1", blocks)?;
    let items = Grid::cover(items, 1)?.x;
    // The kernel numbers slots for items, of which up to half are empty, and two rounds more.
    Violation::unless(items <= 1 << 29, "qkv", "at most 2^29 tiles of queries", items)?;
    Grid::new(items.min(blocks), 1, 1)
}

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
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        blocks: u32,
        out: *mut bf16,
        lse: *mut f32,
    ) {
        block_bounds::<{ SHAPE.threads() }, 1>();
        let _ = blocks;
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let inputs = Inputs { problem, samples, qkv_map, dout: &[], dout_map: qkv_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            forward::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.slots },
                { SHAPE.made() },
            >(inputs, out, lse);
        }
    }
    // SAFETY: the heads lie inside `qkv` and `out`, which have a row for each token. `lse` has an
    // element for each token of a head. Each block has rows of its own, and accesses only those
    // below `tokens`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(1, 0) } |p| {
        let sizes = check_sizes!(p, SHAPE.widths());
        check_qkv_map!(p, sizes);
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        Violation::unless_length("out", sizes.outputs(), p.out.len())?;
        Violation::unless_length("lse", sizes.rows(p.layout.heads), p.lse.len())?;
        check_items(sizes.blocks(p.layout.heads, SHAPE.rows()), p.blocks)
    }
}

family! {
    /// Computes the gradient of q. The parameters are as in
    /// [`flash_bwd_dq`](struct@super::flash_attention::flash_bwd_dq), and `blocks` as in
    /// [`flash_forward_wgmma`](struct@flash_forward_wgmma). Widths are multiples of 8.
    flash_bwd_dq_wgmma(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dq_wgmma_64 = QUERIES[0];
        /// Up to 128 columns.
        flash_bwd_dq_wgmma_128 = QUERIES[1];
    }
    unsafe fn(
        qkv: &[bf16],
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        dout_map: TensorMap<bf16>,
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        blocks: u32,
        dqkv: *mut bf16,
    ) {
        block_bounds::<{ SHAPE.threads() }, 1>();
        let _ = blocks;
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let inputs = Inputs { problem, samples, qkv_map, dout, dout_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            queries::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.slots },
                { SHAPE.made() },
            >(inputs, lse, delta, dqkv);
        }
    }
    // SAFETY: the argument for `flash_forward_wgmma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(2, 0) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        check_qkv_map!(p, sizes);
        check_map("dout_map", &p.dout_map, &dout_map(p.dout, p.layout.heads, p.layout.width))?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        check_items(sizes.blocks(p.layout.heads, SHAPE.rows()), p.blocks)
    }
}

family! {
    /// Computes the gradients of k and v. The parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv), and `pairs`: if it is not 0,
    /// which only heads of up to 64 columns allow, a block computes two tiles of keys. Widths are
    /// multiples of 8.
    flash_bwd_dkv_wgmma(shape: Shape as SHAPE) {
        /// Up to 64 columns.
        flash_bwd_dkv_wgmma_64 = KEYS[0];
        /// Up to 128 columns.
        flash_bwd_dkv_wgmma_128 = KEYS[1];
    }
    unsafe fn(
        qkv: &[bf16],
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        dout_map: TensorMap<bf16>,
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        pairs: u32,
        dqkv: *mut bf16,
    ) {
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let inputs = Inputs { problem, samples, qkv_map, dout, dout_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            keys::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.slots },
                { SHAPE.made() },
                { SHAPE.held },
                false,
            >(inputs, lse, delta, dqkv, pairs != 0, 0, core::ptr::null_mut());
        }
    }
    // SAFETY: the argument for `flash_forward_wgmma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        check_qkv_map!(p, sizes);
        check_map("dout_map", &p.dout_map, &dout_map(p.dout, p.layout.heads, p.layout.width))?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        let suits = p.pairs == 0 || SHAPE.parts() == 1;
        Violation::unless(suits, "pairs", "0 for heads of more than 64 columns", p.pairs)?;
        let rows = if p.pairs == 0 { SHAPE.rows() } else { SHAPE.rows().saturating_mul(2) };
        Grid::cover(sizes.blocks(p.layout.kv_heads, rows), 1)
    }
}

family! {
    /// Computes the gradients of k and v for `count` key heads from `before` on, of all samples'
    /// heads, and stores their ds for
    /// [`flash_bwd_from_scores_wgmma`](struct@flash_bwd_from_scores_wgmma): [`stored_scores`]
    /// elements for each query head of these. The other parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv). Widths are multiples of 8.
    flash_bwd_dkv_ds_wgmma(shape: Shape as SHAPE) {
        /// Up to 128 columns.
        flash_bwd_dkv_ds_wgmma_128 = KEYS[1];
    }
    unsafe fn(
        qkv: &[bf16],
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        dout_map: TensorMap<bf16>,
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        dqkv: *mut bf16,
        ds: *mut bf16,
    ) {
        let _ = count;
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let inputs = Inputs { problem, samples, qkv_map, dout, dout_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            keys::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.tiles() / 8 },
                { SHAPE.parts() as u32 },
                { SHAPE.slots },
                { SHAPE.made() },
                { SHAPE.held },
                true,
            >(inputs, lse, delta, dqkv, false, before, ds);
        }
    }
    // SAFETY: the argument for `flash_forward_wgmma` holds here too; `dqkv` is as long as `qkv`.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(2, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        check_qkv_map!(p, sizes);
        check_map("dout_map", &p.dout_map, &dout_map(p.dout, p.layout.heads, p.layout.width))?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        Violation::unless_length("ds", heads.times(stored_scores(p.layout.tokens, p.window != 0)), p.ds.len())?;
        Violation::unless(p.ds.len() <= MOST_STORED, "ds", "at most 2^33 elements", p.ds.len())?;
        Grid::cover(Size::of(p.layout.tokens).div_ceil(SHAPE.rows()).times(p.count), 1)
    }
}

family! {
    /// Stores p and ds of `count` key heads from `before` on, of all samples' heads, for
    /// [`flash_bwd_from_scores_wgmma`](struct@flash_bwd_from_scores_wgmma): each has
    /// [`stored_scores`] elements for each query head of these. The other parameters are as in
    /// [`flash_bwd_dkv`](struct@super::flash_attention::flash_bwd_dkv).
    flash_bwd_scores_wgmma(shape: Shape as SHAPE) {
        /// Up to 256 columns.
        flash_bwd_scores_wgmma_256 = SCORES;
    }
    unsafe fn(
        qkv: &[bf16],
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        lse: &[f32],
        delta: &[f32],
        dout: &[bf16],
        dout_map: TensorMap<bf16>,
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        p: *mut bf16,
        ds: *mut bf16,
    ) {
        block_bounds::<{ SHAPE.threads() }, 1>();
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let _ = count;
        let inputs = Inputs { problem, samples, qkv_map, dout, dout_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            scores::<
                { SHAPE.groups },
                { SHAPE.tile },
                { SHAPE.tiles() },
                { SHAPE.parts() as u32 },
                { SHAPE.slots },
                { SHAPE.held },
            >(inputs, before, lse, delta, p, ds);
        }
    }
    // SAFETY: the heads lie inside `qkv`, `dout`, `lse` and `delta`. `p` and `ds` have the tiles of
    // these heads, of which each block writes those of its own keys.
    contract unsafe { block: SHAPE.threads(), shared: SHAPE.shared_bytes(1, 2) } |p| {
        let sizes = check_backward!(p, SHAPE.widths());
        check_qkv_map!(p, sizes);
        check_map("dout_map", &p.dout_map, &dout_map(p.dout, p.layout.heads, p.layout.width))?;
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        let stored = heads.times(stored_scores(p.layout.tokens, p.window != 0));
        Violation::unless_length("p", stored, p.p.len())?;
        Violation::unless_length("ds", stored, p.ds.len())?;
        Violation::unless(p.ds.len() <= MOST_STORED, "ds", "at most 2^33 elements", p.ds.len())?;
        Grid::cover(Size::of(p.layout.tokens).div_ceil(SHAPE.rows()).times(p.count), 1)
    }
}

family! {
    /// Computes a gradient from stored scores, for `count` key heads from `before` on, of all
    /// samples' heads: dq or dk from ds, dv from p. `dout` is read only for dv.
    flash_bwd_from_scores_wgmma(variant: (Gradient, Shape) as VARIANT) {
        flash_bwd_dq_from_scores_wgmma_128 = (Gradient::Queries, FROM_SCORES[0]);
        flash_bwd_dq_from_scores_wgmma_256 = (Gradient::Queries, FROM_SCORES[1]);
        flash_bwd_dk_from_scores_wgmma_256 = (Gradient::Keys, FROM_SCORES[1]);
        flash_bwd_dv_from_scores_wgmma_256 = (Gradient::Values, FROM_SCORES[1]);
    }
    unsafe fn(
        qkv: &[bf16],
        qkv_map: TensorMap<bf16>,
        documents: &[u32],
        lengths: &[u32],
        scores: &[bf16],
        dout: &[bf16],
        dout_map: TensorMap<bf16>,
        samples: u32,
        layout: QkvLayout,
        window: u32,
        scale: f32,
        before: u32,
        count: u32,
        dqkv: *mut bf16,
    ) {
        block_bounds::<{ VARIANT.1.threads() }, 1>();
        let problem = Problem::new(qkv, [documents, lengths], layout, window, scale);
        let _ = count;
        let inputs = Inputs { problem, samples, qkv_map, dout, dout_map };
        // SAFETY: the contract has checked that all heads lie inside the arguments, and that the
        // width suits the shape.
        unsafe {
            from_scores::<
                { VARIANT.1.groups },
                { VARIANT.1.tile },
                { VARIANT.1.parts() as u32 },
                { VARIANT.1.slots },
                { VARIANT.1.made() },
                { VARIANT.0 as usize },
            >(inputs, before, scores, dqkv);
        }
    }
    // SAFETY: the heads lie inside `qkv`, `dqkv` and `dout`, and their squares inside `scores`.
    // Each block has rows of its own, and writes only those below `tokens`.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes(0, 0) } |p| {
        let sizes = check_sizes!(p, VARIANT.1.widths());
        check_qkv_map!(p, sizes);
        check_map("dout_map", &p.dout_map, &dout_map(p.dout, p.layout.heads, p.layout.width))?;
        Violation::unless(p.scale > 0.0, "scale", "above 0", p.scale)?;
        let heads = sizes.check_part(p.layout.kv_heads, [p.before, p.count])?;
        Violation::unless_length("scores", heads.times(stored_scores(p.layout.tokens, p.window != 0)), p.scores.len())?;
        Violation::unless(p.scores.len() <= MOST_STORED, "scores", "at most 2^33 elements", p.scores.len())?;
        Violation::unless_length("dout", sizes.outputs(), p.dout.len())?;
        Violation::unless_length("dqkv", p.qkv.len(), p.dqkv.len())?;
        let own = if VARIANT.0 == Gradient::Queries { heads } else { Size::of(p.count) };
        Grid::cover(Size::of(p.layout.tokens).div_ceil(VARIANT.1.rows()).times(own), 1)
    }
}
