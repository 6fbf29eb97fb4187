//! Matrix multiply by matrix instructions: as [`matmul`](super::matmul), with factors rounded to TF32 or BF16.
//!
//! `out = epilogue(op(round(A)) op(round(B)) + bias + beta C)`. Products are exact and sums f32, but a GPU's matrix instruction
//! adds several products at once: a result is within a stated bound of the exact one, and its bits may differ from the
//! emulator's (see [`mma`](crate::mma)). On one device the bits do not depend on the tile, the grid or the run.
//!
//! A block copies stages of both operands to shared memory as they lie, several ahead of the one in use; warps read them as
//! factors, round (TF32) or pair (BF16) them in registers, and multiply (NVIDIA's CUTLASS is built so).
//!
//! Parameters are those of [`matmul`](super::matmul). `matmul_tf32_*` take f32 operands and round them. `matmul_bf16_*` take
//! pairs of BF16, two elements of a row in one word, so `lda`, `ldb`, `stride_a` and `stride_b`, which count elements, are
//! multiples of eight.

mod block;
mod operand;
mod tile;

#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_outputs, sum_chunks};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::Chunk;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::{GELU, KEEP};
use super::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use crate::contract;
#[cfg(not(target_arch = "nvptx64"))]
use crate::format::Format;
use crate::format::{Bf16, Tf32};
use block::{Problem, finish, sum};
use cuda_std::prelude::*;
use operand::Operand;
pub use tile::Tile;

/// 64 x 64, 128 threads.
pub const T64X64: Tile = Tile { warps: [2, 2], blocks: [1, 1], latency: 46, cycles: 24 };
/// 64 x 128, 128 threads.
pub const T64X128: Tile = Tile { warps: [2, 2], blocks: [1, 2], latency: 77, cycles: 45 };
/// 128 x 256, 256 threads.
pub const T128X256: Tile = Tile { warps: [2, 4], blocks: [2, 2], latency: 167, cycles: 167 };

/// The entry points: the same parameters, another format and tile.
macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $format:ident of $word:ty, $tile:ident;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub unsafe fn $name(
            a: &[$word],
            b: &[$word],
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
            chunk: u32,
            batches: u32,
            stride_a: usize,
            stride_b: usize,
            stride_c: usize,
            stride_bias: usize,
            beta: f32,
            flags: u32,
        ) {
            let z = thread::block_idx_z() as usize;
            if z >= batches as usize {
                return;
            }
            // The grid has a layer along y for each chunk.
            let (chunks, own) = (thread::grid_dim_y() as usize, thread::block_idx_y());
            let Chunk { first, end, .. } = Chunk::new(k, chunk, own);
            let (start, bias_start) = ((z * chunks + own as usize) * stride_c, z * stride_bias);
            let epilogue = Epilogue { bias, bias_start, c, out, pre, start, n, ldc, beta, flags };
            let k = end - first;
            let behind = |along_k: bool, ld: u32| first as usize * if along_k { 1 } else { ld as usize };
            let a = |along_k| Operand::new(a, z * stride_a + behind(along_k, lda), m, k, lda, along_k);
            let b = |along_k| Operand::new(b, z * stride_b + behind(along_k, ldb), n, k, ldb, along_k);
            let problem = |a_along_k, b_along_k| Problem { a: a(a_along_k), b: b(b_along_k), epilogue, m, n, k };
            let (a_along_k, b_along_k) = (flags & TRANSPOSE_A == 0, flags & TRANSPOSE_B != 0);
            // SAFETY: each batch lies inside its arguments by the contract.
            unsafe {
                const ROWS: usize = $tile.blocks[0];
                const COLS: usize = $tile.blocks[1];
                // On the GPU a loop of its own for each way to store, which has no branches.
                #[cfg(target_arch = "nvptx64")]
                let sums = match (a_along_k, b_along_k) {
                    (true, false) => sum::<$format, ROWS, COLS>(problem(true, false), $tile),
                    (false, false) => sum::<$format, ROWS, COLS>(problem(false, false), $tile),
                    (true, true) => sum::<$format, ROWS, COLS>(problem(true, true), $tile),
                    (false, true) => sum::<$format, ROWS, COLS>(problem(false, true), $tile),
                };
                #[cfg(not(target_arch = "nvptx64"))]
                let sums = sum::<$format, ROWS, COLS>(problem(a_along_k, b_along_k), $tile);
                finish(problem(a_along_k, b_along_k), $tile, sums);
            }
        }
    )*};
}

entries! {
    /// TF32, 64 x 64, 128 threads.
    matmul_tf32_64x64: Tf32 of f32, T64X64;
    /// TF32, 64 x 128, 128 threads.
    matmul_tf32_64x128: Tf32 of f32, T64X128;
    /// TF32, 128 x 256, 256 threads.
    matmul_tf32_128x256: Tf32 of f32, T128X256;
    /// BF16, 64 x 64, 128 threads.
    matmul_bf16_64x64: Bf16 of u32, T64X64;
    /// BF16, 64 x 128, 128 threads.
    matmul_bf16_64x128: Bf16 of u32, T64X128;
    /// BF16, 128 x 256, 256 threads.
    matmul_bf16_128x256: Bf16 of u32, T128X256;
}

/// Calls `$with!` with the kernel and the tile of every entry point of TF32 or of BF16, after `$arguments`.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! matmul_tensor_tiles {
    ($with:ident!(tf32 $($arguments:tt)*)) => {
        $with! {
            $($arguments)*
            matmul_tf32_64x64: T64X64,
            matmul_tf32_64x128: T64X128,
            matmul_tf32_128x256: T128X256,
        }
    };
    ($with:ident!(bf16 $($arguments:tt)*)) => {
        $with! {
            $($arguments)*
            matmul_bf16_64x64: T64X64,
            matmul_bf16_64x128: T64X128,
            matmul_bf16_128x256: T128X256,
        }
    };
}

/// Every tile.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: &[Tile] = &[T64X64, T64X128, T128X256];

/// The grid that covers `[m, n]` with tiles, a layer for each chunk and each batch.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $format:ident, $tile:ident) => {{
        let p = $p;
        let [m, n, k, lda, ldb] = [p.m, p.n, p.k, p.lda, p.ldb].map(|x| x as usize);
        let (a, b) = if p.flags & TRANSPOSE_A != 0 { ([k, m], lda) } else { ([m, k], lda) };
        let (c, d) = if p.flags & TRANSPOSE_B != 0 { ([n, k], ldb) } else { ([k, n], ldb) };
        let (batches, per_word) = (p.batches as usize, $format::PER_WORD as usize);
        checks::holds("a", p.a.len().saturating_mul(per_word), batches, p.stride_a, a, b)?;
        checks::holds("b", p.b.len().saturating_mul(per_word), batches, p.stride_b, c, d)?;
        let chunks = sum_chunks!(p);
        check_outputs!(p, chunks);
        if per_word > 1 {
            for (name, elements) in [("lda", lda), ("ldb", ldb), ("stride_a", p.stride_a), ("stride_b", p.stride_b)] {
                Violation::unless(elements.is_multiple_of(8), name, "a multiple of eight", elements)?;
            }
        }
        let tiles = |extent: u32, tile: u32| extent.div_ceil(tile) as usize;
        Grid::new(tiles(p.m, $tile.rows()).saturating_mul(tiles(p.n, $tile.cols())), chunks, batches)
    }};
}

contract!(matmul_tf32_64x64 { block: T64X64.threads(), shared: T64X64.shared_bytes() } | p | grid!(p, Tf32, T64X64));
contract!(
    matmul_tf32_64x128 { block: T64X128.threads(), shared: T64X128.shared_bytes() } | p | grid!(p, Tf32, T64X128)
);
contract!(
    matmul_tf32_128x256 { block: T128X256.threads(), shared: T128X256.shared_bytes() } | p | grid!(p, Tf32, T128X256)
);
contract!(matmul_bf16_64x64 { block: T64X64.threads(), shared: T64X64.shared_bytes() } | p | grid!(p, Bf16, T64X64));
contract!(
    matmul_bf16_64x128 { block: T64X128.threads(), shared: T64X128.shared_bytes() } | p | grid!(p, Bf16, T64X128)
);
contract!(
    matmul_bf16_128x256 { block: T128X256.threads(), shared: T128X256.shared_bytes() } | p | grid!(p, Bf16, T128X256)
);
