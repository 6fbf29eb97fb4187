//! Matrix multiply: `out = epilogue(op(A) op(B) + bias + beta C)`, in strided batches.
//!
//! Each output element is one chain of fused multiply-adds over ascending k, so the result does not depend on the
//! tile: the entry points differ in [`Tile`] alone and give the same bits. A block copies stages of A and B to shared
//! memory, several ahead of the one in use, while each thread keeps its outputs in registers (Volkov and Demmel,
//! "Benchmarking GPUs to tune dense linear algebra", 2008; the copies run asynchronously, as in NVIDIA's CUTLASS).
//!
//! Parameters of all, row-major, for each `z` of `batches`:
//! - `a`: op(A) is `[m, k]`; element (i, p) at `z stride_a + i lda + p`, or `+ p lda + i` with [`TRANSPOSE_A`].
//! - `b`: op(B) is `[k, n]`; element (p, j) at `z stride_b + p ldb + j`, or `+ j ldb + p` with [`TRANSPOSE_B`].
//! - `bias`: `[n]` at `z stride_bias`, added to every row; empty: none.
//! - `c`, `out`, `pre`: `[m, n]`, element (i, j) at `z stride_c + i ldc + j`. `c` is read only when `beta` is not 0 and
//!   may be `out`. With [`GELU`] `out` is gelu of the sum; with [`KEEP`] the sum itself goes to `pre`.

mod block;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod checks;
pub(crate) mod epilogue;
mod operand;
mod tile;

use crate::contract;
use block::{Problem, compute};
use cuda_std::prelude::*;
use operand::{Operand, is_even};
pub use tile::Tile;

/// A is stored as `[k, m]`.
pub const TRANSPOSE_A: u32 = 1;
/// B is stored as `[n, k]`.
pub const TRANSPOSE_B: u32 = 2;
/// The output is gelu of the sum.
pub const GELU: u32 = 4;
/// The sum before gelu goes to `pre`.
pub const KEEP: u32 = 8;

/// 16 x 16, 64 threads.
pub const T16X16: Tile = Tile { warps: [2, 1], each: [2, 2], depth: 64, stages: 4, at_once: 8, latency: 20, cycles: 8 };
/// 32 x 32, 128 threads.
pub const T32X32: Tile =
    Tile { warps: [4, 1], each: [2, 4], depth: 32, stages: 3, at_once: 4, latency: 41, cycles: 22 };
/// 32 x 64, 128 threads.
pub const T32X64: Tile =
    Tile { warps: [2, 2], each: [4, 4], depth: 32, stages: 3, at_once: 2, latency: 45, cycles: 30 };
/// 64 x 128, 128 threads.
pub const T64X128: Tile =
    Tile { warps: [2, 2], each: [8, 8], depth: 16, stages: 3, at_once: 1, latency: 119, cycles: 88 };
/// 128 x 256, 256 threads.
pub const T128X256: Tile =
    Tile { warps: [2, 4], each: [16, 8], depth: 16, stages: 3, at_once: 1, latency: 344, cycles: 326 };

/// The entry points: the same parameters, another tile.
macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $tile:ident;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub unsafe fn $name(
            a: &[f32],
            b: &[f32],
            bias: &[f32],
            c: *const f32,
            out: *mut f32,
            pre: *mut f32,
            m: u32,
            n: u32,
            k: u32,
            lda: u32,
            ldb: u32,
            ldc: u32,
            batches: u32,
            stride_a: usize,
            stride_b: usize,
            stride_c: usize,
            stride_bias: usize,
            beta: f32,
            flags: u32,
        ) {
            const { assert!(is_even($tile, $tile.rows()) && is_even($tile, $tile.cols())) };
            let z = thread::block_idx_z() as usize;
            if z >= batches as usize {
                return;
            }
            let (a_along_k, b_along_k) = (flags & TRANSPOSE_A == 0, flags & TRANSPOSE_B != 0);
            let a = Operand { values: a, start: z * stride_a, rows: m, k, stride: lda, along_k: a_along_k };
            let b = Operand { values: b, start: z * stride_b, rows: n, k, stride: ldb, along_k: b_along_k };
            let (start, bias_start) = (z * stride_c, z * stride_bias);
            let problem = Problem { a, b, bias, bias_start, c, out, pre, start, m, n, k, ldc, beta, flags };
            // SAFETY: each batch lies inside its arguments by the contract.
            unsafe {
                compute::<{ $tile.each[0] }, { $tile.each[1] }, { $tile.depth }, { $tile.stages - 2 }, { $tile.at_once }>(problem, $tile);
            }
        }
    )*};
}

entries! {
    /// 16 x 16, 64 threads.
    matmul_16x16: T16X16;
    /// 32 x 32, 128 threads.
    matmul_32x32: T32X32;
    /// 32 x 64, 128 threads.
    matmul_32x64: T32X64;
    /// 64 x 128, 128 threads.
    matmul_64x128: T64X128;
    /// 128 x 256, 256 threads.
    matmul_128x256: T128X256;
}

/// Calls `$with!` with the kernel and the tile of every entry point, after `$arguments`.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! matmul_tiles {
    ($with:ident! $($arguments:tt)*) => {
        $with! {
            $($arguments)*
            matmul_16x16: T16X16,
            matmul_32x32: T32X32,
            matmul_32x64: T32X64,
            matmul_64x128: T64X128,
            matmul_128x256: T128X256,
        }
    };
}

/// Every tile.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: &[Tile] = &[T16X16, T32X32, T32X64, T64X128, T128X256];

/// The grid that covers `[m, n]` with tiles, a layer for each batch.
///
/// Every element that a batch reads or writes lies inside its argument, and no two batches write the same one.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $tile:ident) => {{
        let p = $p;
        let [m, n, k, lda, ldb, ldc, batches] = [p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.batches].map(|x| x as usize);
        let transposed = |flag| p.flags & flag != 0;
        let (a_rows, a_cols) = if transposed(TRANSPOSE_A) { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if transposed(TRANSPOSE_B) { (n, k) } else { (k, n) };
        holds("a", p.a.len(), batches, p.stride_a, a_rows, a_cols, lda)?;
        holds("b", p.b.len(), batches, p.stride_b, b_rows, b_cols, ldb)?;
        holds("out", p.out.len(), batches, p.stride_c, m, n, ldc)?;
        if p.beta != 0.0 {
            holds("c", p.c.len(), batches, p.stride_c, m, n, ldc)?;
        }
        if transposed(KEEP) {
            holds("pre", p.pre.len(), batches, p.stride_c, m, n, ldc)?;
        }
        if !p.bias.is_empty() {
            holds("bias", p.bias.len(), batches, p.stride_bias, 1, n, n)?;
        }
        let apart = batches <= 1 || p.stride_c >= m * ldc || (p.stride_c >= n && ldc >= batches * p.stride_c);
        Violation::unless(apart, "stride_c", "batches that do not write the same element", p.stride_c)?;
        let tiles = |extent: u32, tile: u32| extent.div_ceil(tile) as usize;
        Grid::new(tiles(p.m, $tile.rows()).saturating_mul(tiles(p.n, $tile.cols())), 1, batches)
    }};
}

/// Ok when `batches` matrices of `rows` x `cols`, `stride` and `ld` elements apart, lie inside `len` elements.
#[cfg(not(target_arch = "nvptx64"))]
fn holds(
    argument: &'static str,
    len: usize,
    batches: usize,
    stride: usize,
    rows: usize,
    cols: usize,
    ld: usize,
) -> Result<(), cuda_std::launch::Violation> {
    if batches == 0 || rows == 0 || cols == 0 {
        return Ok(());
    }
    let last = (|| {
        let batch = (batches - 1).checked_mul(stride)?;
        let row = (rows - 1).checked_mul(ld)?;
        batch.checked_add(row)?.checked_add(cols)
    })();
    if ld >= cols && last.is_some_and(|last| last <= len) {
        return Ok(());
    }
    let expected = std::format!("{batches} matrices of {rows} x {cols}, rows {ld} and matrices {stride} apart");
    Err(cuda_std::launch::Violation::new(argument, expected, std::format!("{len} elements")))
}

contract!(matmul_16x16 { block: T16X16.threads(), shared: T16X16.shared_bytes() } | p | grid!(p, T16X16));
contract!(matmul_32x32 { block: T32X32.threads(), shared: T32X32.shared_bytes() } | p | grid!(p, T32X32));
contract!(matmul_32x64 { block: T32X64.threads(), shared: T32X64.shared_bytes() } | p | grid!(p, T32X64));
contract!(matmul_64x128 { block: T64X128.threads(), shared: T64X128.shared_bytes() } | p | grid!(p, T64X128));
contract!(matmul_128x256 { block: T128X256.threads(), shared: T128X256.shared_bytes() } | p | grid!(p, T128X256));
