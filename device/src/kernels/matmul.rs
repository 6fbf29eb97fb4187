//! Matrix multiply: `out = epilogue(alpha op(A) op(B) + bias + beta C)`, in strided batches.
//!
//! Each output element is one chain of fused multiply-adds over ascending k, so the result does not
//! depend on the tile. The entry points differ only in [`Tile`] and give the same bits.
//!
//! A block computes one tile. It copies stages of A and B to shared memory, several stages ahead of
//! the one in use. Each thread keeps its outputs in registers (Volkov and Demmel, "Benchmarking
//! GPUs to tune dense linear algebra", 2008). The copies are asynchronous (cp.async), as in
//! NVIDIA's CUTLASS.
//!
//! ```text
//!                  op(B): k x n               file         content
//!                 +---+-----+--+              tile.rs      a block's tile, its warps and threads
//!                 |   |stage|  |              operand.rs   global memory -> shared memory stage
//!  op(A): m x k   +---+-----+--+              block.rs     stages -> registers -> sums
//!  +-------+      |   |     |  |              epilogue.rs  sums -> bias, beta C, activation -> out
//!  | stage |  ->  |   |tile |  |  out: m x n  split.rs     split-K: a block for each split of k
//!  +-------+      |   |     |  |              cpu.rs       the emulator's version
//!  |       |      +---+-----+--+
//! ```
//! Parameters of all entry points, row-major, for each batch `z` of `batches`:
//! - `a`: op(A) is `[m, k]`. Element (i, p) is at `z stride_a + i lda + p`, or `+ p lda + i` with
//!   [`TRANSPOSE_A`].
//! - `b`: op(B) is `[k, n]`. Element (p, j) is at `z stride_b + p ldb + j`, or `+ j ldb + p` with
//!   [`TRANSPOSE_B`].
//! - `bias`: `[n]` at `z stride_bias`, added to every row. Empty means no bias.
//! - `c`, `out`, `pre`: `[m, n]`. Element (i, j) is at `z stride_c + i ldc + j`. `c` is read only
//!   if `beta` is not 0, or with [`SWIGLU`] or [`GELU_DERIVATIVE`]. It may be `out`.
//! - `flags`: [`GELU`] and [`SILU`] apply that activation to the sum. [`SWIGLU`] makes `out`
//!   silu(c) times the sum. [`GELU_DERIVATIVE`] makes `out` gelu'(c) times the sum. These two
//!   require `beta` 0. [`STORE_PREACT`] stores the sum itself to `pre`.
//! - `k_per_split`: the k of one split of a split-K product. If it is less than k, each `z` has
//!   `ceil(k / k_per_split)` splits, and `out` has a matrix for each: all splits of one `z`, then
//!   those of the next.
//!   [`sum_splits`](struct@sum_splits) reduces them. Such a partial sum has no epilogue: no
//!   `alpha`, bias, `beta` or flag.

pub(crate) mod block;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod checks;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod cpu;
pub(crate) mod epilogue;
pub(crate) mod operand;
pub(crate) mod split;
pub(crate) mod tile;

use crate::family;
use block::{GROUP, Problem};
#[cfg(not(target_arch = "nvptx64"))]
use checks::{check_factors, check_outputs, check_split_k};
use cuda_std::prelude::*;
use epilogue::Epilogue;
pub use epilogue::{EpilogueForm, ProductExtents};
use operand::Operand;
pub use split::*;
use tile::place;
pub use tile::{Cost, Tile};

/// A flag: A is stored as `[k, m]`.
pub const TRANSPOSE_A: u32 = 1;
/// A flag: B is stored as `[n, k]`.
pub const TRANSPOSE_B: u32 = 2;
/// A flag: the output is gelu of the sum.
pub const GELU: u32 = 4;
/// A flag: the sum, before the activation or gate, is stored to `pre`.
pub const STORE_PREACT: u32 = 8;
/// A flag: the output is silu of the sum.
pub const SILU: u32 = 16;
/// A flag: the output is silu(c) times the sum. This is SwiGLU, where `c` is the gate's product
/// (Shazeer, 2020).
pub const SWIGLU: u32 = 32;
/// A flag: the output is gelu'(c) times the sum, where `c` is gelu's input: the end of a backward
/// pass. It requires BF16 storage.
pub const GELU_DERIVATIVE: u32 = 64;
/// The flags of the activations. At most one of them is set.
pub(crate) const ACTIVATIONS: u32 = GELU | SILU | SWIGLU | GELU_DERIVATIVE;

/// 16 x 16, 64 threads.
pub const T16X16: Tile =
    Tile { warps: [2, 1], each: [2, 2], depth: 64, stages: 4, at_once: 8, groups: 8, cost: Cost::new(20, 8, 0) };
/// 32 x 32, 128 threads.
pub const T32X32: Tile =
    Tile { warps: [4, 1], each: [2, 4], depth: 32, stages: 3, at_once: 4, groups: 8, cost: Cost::new(41, 22, 0) };
/// 32 x 64, 128 threads.
pub const T32X64: Tile =
    Tile { warps: [2, 2], each: [4, 4], depth: 32, stages: 3, at_once: 2, groups: 8, cost: Cost::new(45, 30, 0) };
/// 64 x 128, 128 threads.
pub const T64X128: Tile =
    Tile { warps: [2, 2], each: [8, 8], depth: 16, stages: 3, at_once: 1, groups: 8, cost: Cost::new(119, 88, 0) };
/// 128 x 256, 256 threads.
pub const T128X256: Tile =
    Tile { warps: [2, 4], each: [16, 8], depth: 16, stages: 3, at_once: 1, groups: 4, cost: Cost::new(344, 326, 0) };
/// A tile for the emulator only: 128 x 256, 32 threads.
#[cfg(not(target_arch = "nvptx64"))]
pub const ON_CPU: Tile = cpu::TILE;

/// Computes a problem's tile at `$place`, with the constants of the block's tile.
macro_rules! multiply {
    ($problem:expr, $tile:ident, $place:expr) => {{
        use $crate::matmul::{block::compute, operand::is_even};
        #[cfg(not(target_arch = "nvptx64"))]
        if $tile.is_on_cpu() {
            return $crate::matmul::cpu::compute($problem, $place);
        }
        // The emulator's own tile has returned above. `compute` cannot be compiled for it, so
        // another tile takes its place here.
        #[cfg(not(target_arch = "nvptx64"))]
        const GPU: Tile = if $tile.is_on_cpu() { $crate::matmul::T16X16 } else { $tile };
        #[cfg(target_arch = "nvptx64")]
        const GPU: Tile = $tile;
        const { assert!(is_even(GPU, GPU.rows()) && is_even(GPU, GPU.cols()) && GPU.depth.is_multiple_of(GPU.step())) };
        compute::<{ GPU.each[0] }, { GPU.each[1] }, { GPU.stages - 2 }, { GPU.at_once }, { GPU.unrolled() }>(
            $problem, GPU, $place,
        )
    }};
}
pub(crate) use multiply;

/// Returns the grid that covers `[m, n]` with tiles: y indexes the split, z the batch.
///
/// Why these checks suffice: every batch of `a` and `b` lies inside its argument. Every matrix of a
/// batch and split lies inside `out` (and `c`, `pre`, `bias` where they are used), and none
/// overlaps another. Rows, columns and k are few enough that 32 bits also number those of a tile
/// that lie past the end. Past the end, a thread reads the last row or nothing, and writes nothing.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $tile:ident) => {{
        let split_k = check_split_k!($p);
        check_factors!($p, $p.epilogue.flags);
        check_outputs!($p, split_k);
        Grid::new(
            Size::of($p.extents.m).div_ceil($tile.rows()).times(Size::of($p.extents.n).div_ceil($tile.cols())),
            split_k,
            $p.extents.batches,
        )
    }};
}

family! {
    /// Multiplies f32 matrices. The module's documentation describes the parameters.
    matmul(tile: Tile as TILE) {
        /// 16 x 16, 64 threads.
        matmul_16x16 = T16X16;
        /// 32 x 32, 128 threads.
        matmul_32x32 = T32X32;
        /// 32 x 64, 128 threads.
        matmul_32x64 = T32X64;
        /// 64 x 128, 128 threads.
        matmul_64x128 = T64X128;
        /// 128 x 256, 256 threads.
        matmul_128x256 = T128X256;
        /// 128 x 256, 32 threads, for the emulator only.
        #[cfg(not(target_arch = "nvptx64"))]
        matmul_on_cpu = ON_CPU;
    }
    unsafe fn(
        a: &[f32],
        b: &[f32],
        bias: &[f32],
        c: *const f32,
        out: *mut f32,
        pre: *mut f32,
        extents: ProductExtents,
        lda: u32,
        ldb: u32,
        stride_a: usize,
        stride_b: usize,
        epilogue: EpilogueForm,
    ) {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let EpilogueForm { stride_c, stride_bias, ldc, alpha, beta, flags } = epilogue;
        let z = thread::block_idx_z() as usize;
        if z >= batches as usize {
            return;
        }
        let (a_along_k, b_along_k) = (flags & TRANSPOSE_A == 0, flags & TRANSPOSE_B != 0);
        let a = Operand { values: a, start: z * stride_a, rows: m, stride: lda, along_k: a_along_k };
        let b = Operand { values: b, start: z * stride_b, rows: n, stride: ldb, along_k: b_along_k };
        // grid_dim_y is the number of splits of k.
        let (split_k, split) = (thread::grid_dim_y() as usize, thread::block_idx_y());
        let (start, bias_start) = ((z * split_k + split as usize) * stride_c, z * stride_bias);
        let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
        let problem = Problem { a, b, epilogue, k: SplitRange::new(k, k_per_split, split) };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            multiply!(problem, TILE, place([m.div_ceil(TILE.rows()), n.div_ceil(TILE.cols())], GROUP))
        }
    }
    // SAFETY: the comment on `grid!` shows that the checks suffice. `multiply!` gives the kernel
    // the constants of the same tile.
    contract unsafe { block: TILE.threads(), shared: TILE.shared_bytes() } |p| grid!(p, TILE)
}

/// The tiles that run on a GPU.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; matmul::VARIANTS.len() - 1] = {
    let mut tiles = [ON_CPU; matmul::VARIANTS.len() - 1];
    let mut at = 0;
    while at < tiles.len() {
        tiles[at] = matmul::VARIANTS[at].1;
        assert!(!tiles[at].is_on_cpu(), "the emulator's own tiles must be last");
        at += 1;
    }
    tiles
};
