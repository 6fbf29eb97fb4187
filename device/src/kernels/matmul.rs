//! Matrix multiply: `out = epilogue(op(A) op(B) + bias + beta C)`, in strided batches.
//!
//! Each output element is one chain of fused multiply-adds over ascending k, so the result does not depend on the
//! tile: the three entry points differ in tile shape alone and give the same bits. A block stages 16-deep tiles of A
//! and B in shared memory, two buffers in turn, while each thread keeps its outputs in registers (the classic tiled
//! SGEMM; Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008).
//!
//! Parameters of all three, row-major, for each `z` of `batches`:
//! - `a`: op(A) is `[m, k]`; element (i, p) at `z stride_a + i lda + p`, or `+ p lda + i` with [`TRANSPOSE_A`].
//! - `b`: op(B) is `[k, n]`; element (p, j) at `z stride_b + p ldb + j`, or `+ j ldb + p` with [`TRANSPOSE_B`].
//! - `bias`: `[n]` at `z stride_bias`, added to every row; empty: none.
//! - `c`, `out`, `pre`: `[m, n]`, element (i, j) at `z stride_c + i ldc + j`. `c` is read only when `beta` is not 0 and
//!   may be `out`. With [`GELU`] `out` is gelu of the sum; with [`KEEP`] the sum itself goes to `pre`.

use crate::math;
use crate::tile::SharedTile;
use crate::vector::{F4, Part};
use crate::{contract, map4};
use cuda_std::prelude::*;

/// A is stored as `[k, m]`.
pub const TRANSPOSE_A: u32 = 1;
/// B is stored as `[n, k]`.
pub const TRANSPOSE_B: u32 = 2;
/// The output is gelu of the sum.
pub const GELU: u32 = 4;
/// The sum before gelu goes to `pre`.
pub const KEEP: u32 = 8;

/// Depth of a tile.
const DEPTH: u32 = 16;
/// Floats between rows of a tile beyond its width: spreads a column over the banks, keeps 16-byte alignment.
const PAD: u32 = 4;

/// Floats of one stage: a tile of `rows` x 16 and one of 16 x `cols`.
const fn stage_len(rows: u32, cols: u32) -> u32 {
    DEPTH * (rows + PAD + cols + PAD)
}

/// One matrix multiply as a thread sees it.
struct Problem<'p> {
    a: Operand<'p>,
    b: Operand<'p>,
    bias: &'p [f32],
    bias_start: usize,
    c: *const f32,
    out: *mut f32,
    pre: *mut f32,
    start: usize,
    m: u32,
    n: u32,
    k: u32,
    ldc: u32,
    beta: f32,
    flags: u32,
}

/// One operand: `rows` x `k` from `start` on, contiguous along k or along the rows, `stride` between the others.
struct Operand<'p> {
    values: &'p [f32],
    start: usize,
    rows: u32,
    k: u32,
    stride: u32,
    along_k: bool,
}

impl Operand<'_> {
    /// Where the `piece`th group of four stands in a tile of `width` rows: row and k within the tile.
    #[inline(always)]
    fn place(&self, piece: u32, width: u32) -> (u32, u32) {
        if self.along_k {
            (piece / (DEPTH / 4), piece % (DEPTH / 4) * 4)
        } else {
            (piece % (width / 4) * 4, piece / (width / 4))
        }
    }

    /// The `piece`th group of four of the tile at (`first_row`, `first_k`); zero outside the operand.
    #[inline(always)]
    unsafe fn fetch(&self, piece: u32, width: u32, first_row: u32, first_k: u32) -> F4 {
        let (row, k) = self.place(piece, width);
        let (row, k) = (first_row + row, first_k + k);
        let (outer, inner, outer_end, inner_end) =
            if self.along_k { (row, k, self.rows, self.k) } else { (k, row, self.k, self.rows) };
        if outer >= outer_end || inner >= inner_end {
            return F4::splat(0.0);
        }
        let index = self.start + outer as usize * self.stride as usize + inner as usize;
        // SAFETY: what remains of this row or column lies in the operand, which the contract checked.
        unsafe { F4::load_part(self.values, index, part(index, inner_end - inner), 0.0) }
    }

    /// Stores the `piece`th group of four to the tile, k-major.
    #[inline(always)]
    fn stage(&self, piece: u32, width: u32, tile: SharedTile<f32>, values: F4) {
        let (row, k) = self.place(piece, width);
        let at = k * (width + PAD) + row;
        if self.along_k {
            let [a, b, c, d] = values.0;
            tile.set(at, a);
            tile.set(at + (width + PAD), b);
            tile.set(at + 2 * (width + PAD), c);
            tile.set(at + 3 * (width + PAD), d);
        } else {
            tile.set4(at, values);
        }
    }
}

/// How the next four of `left` elements at `index` are moved: at once where that is a vector.
#[inline(always)]
fn part(index: usize, left: u32) -> Part {
    if left >= 4 && index.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(left as usize) }
}

/// Repeats a block for each index below `$count`, at most 8, with the index constant: what is indexed by it stays in
/// registers however large the block is.
macro_rules! unroll {
    ($index:ident < $count:expr => $body:block) => {
        unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $index:ident, $count:expr, $body:block, $($at:literal)*) => {
        $(if $at < $count {
            let $index: usize = $at;
            $body
        })*
    };
}

/// Adds `depth` products to each of a thread's sums.
#[inline(always)]
fn accumulate<const TM: usize, const TN: usize>(
    sums: &mut [[f32; TN]; TM],
    [a, b]: [SharedTile<f32>; 2],
    (rows, cols): (u32, u32),
    (row, col): (u32, u32),
    depth: u32,
) {
    for p in 0..depth {
        let mut left = [0.0; TM];
        let mut right = [0.0; TN];
        unroll!(group < TM / 4 => {
            let at = p * (rows + PAD) + group as u32 * (rows / (TM as u32 / 4)) + row;
            left[group * 4..][..4].copy_from_slice(&a.get4(at).0);
        });
        unroll!(group < TN / 4 => {
            let at = p * (cols + PAD) + group as u32 * (cols / (TN as u32 / 4)) + col;
            right[group * 4..][..4].copy_from_slice(&b.get4(at).0);
        });
        for i in 0..TM {
            for j in 0..TN {
                sums[i][j] = left[i].mul_add(right[j], sums[i][j]);
            }
        }
    }
}

/// The two tiles of a stage, 0 or 1.
#[inline(always)]
unsafe fn stage_tiles(stage: u32, rows: u32, cols: u32) -> [SharedTile<f32>; 2] {
    let (a_len, start) = (DEPTH * (rows + PAD), stage * stage_len(rows, cols));
    // SAFETY: two stages follow each other in what the contract declares.
    unsafe { [SharedTile::new(start * 4, a_len), SharedTile::new((start + a_len) * 4, DEPTH * (cols + PAD))] }
}

/// One block's tile: `THREADS_M x THREADS_N` threads of `TM x TN` outputs each; `PIECES_A`, `PIECES_B` groups of four
/// fetched by each thread for each stage.
#[inline(always)]
unsafe fn tile<
    const THREADS_M: u32,
    const THREADS_N: u32,
    const TM: usize,
    const TN: usize,
    const PIECES_A: usize,
    const PIECES_B: usize,
>(
    problem: Problem<'_>,
) {
    let Problem { a, b, m, n, k, .. } = &problem;
    let (m, n, k) = (*m, *n, *k);
    let threads = THREADS_M * THREADS_N;
    let (rows, cols) = (THREADS_M * TM as u32, THREADS_N * TN as u32);
    let (first_row, first_col) = (thread::block_idx_y() * rows, thread::block_idx_x() * cols);
    let thread = thread::thread_idx_x();
    let (row, col) = (thread / THREADS_N * 4, thread % THREADS_N * 4);

    let mut sums = [[0.0f32; TN]; TM];
    let mut next_a = [F4::splat(0.0); PIECES_A];
    let mut next_b = [F4::splat(0.0); PIECES_B];
    let depths = k.div_ceil(DEPTH);
    let mut stage = 0;
    for depth in 0..=depths {
        if depth < depths {
            // SAFETY: as for `tile`.
            unsafe {
                unroll!(piece < PIECES_A => {
                    next_a[piece] = a.fetch(thread + piece as u32 * threads, rows, first_row, depth * DEPTH);
                });
                unroll!(piece < PIECES_B => {
                    next_b[piece] = b.fetch(thread + piece as u32 * threads, cols, first_col, depth * DEPTH);
                });
            }
        }
        if depth > 0 {
            // SAFETY: the stage lies in shared memory.
            let tiles = unsafe { stage_tiles(stage, rows, cols) };
            let left_over = k - (depth - 1) * DEPTH;
            if left_over >= DEPTH {
                accumulate(&mut sums, tiles, (rows, cols), (row, col), DEPTH);
            } else {
                accumulate(&mut sums, tiles, (rows, cols), (row, col), left_over);
            }
            stage ^= 1;
        }
        if depth < depths {
            // SAFETY: the stage lies in shared memory. It was last read before the barrier of the round before.
            let [left, right] = unsafe { stage_tiles(stage, rows, cols) };
            unroll!(piece < PIECES_A => { a.stage(thread + piece as u32 * threads, rows, left, next_a[piece]); });
            unroll!(piece < PIECES_B => { b.stage(thread + piece as u32 * threads, cols, right, next_b[piece]); });
            thread::sync_threads();
        }
    }
    unroll!(i < TM => {
        let i_out = first_row + i as u32 / 4 * (rows / (TM as u32 / 4)) + row + i as u32 % 4;
        unroll!(group < TN / 4 => {
            let j_out = first_col + group as u32 * (cols / (TN as u32 / 4)) + col;
            if i_out < m && j_out < n {
                let [w, x, y, z] = [0, 1, 2, 3].map(|j| sums[i][group * 4 + j]);
                // SAFETY: row and columns lie inside the output.
                unsafe { finish(&problem, i_out, j_out, F4([w, x, y, z])) };
            }
        });
    });
}

/// Bias, old content, gelu, and the write of up to four neighbours at (`i`, `j`).
#[inline(always)]
unsafe fn finish(problem: &Problem<'_>, i: u32, j: u32, mut sum: F4) {
    let Problem { bias, bias_start, c, out, pre, start, n, ldc, beta, flags, .. } = problem;
    let at = start + i as usize * *ldc as usize + j as usize;
    let own = part(at, n - j);
    // SAFETY: row `i` and these columns lie in `out`, `c`, `pre` and `bias`, which the contract checked.
    unsafe {
        if !bias.is_empty() {
            let at = bias_start + j as usize;
            let bias = F4::load_part(bias, at, part(at, n - j), 0.0);
            sum = sum.zip(bias, |sum, bias| sum + bias);
        }
        if *beta != 0.0 {
            sum = sum.zip(F4::load_part_raw(*c, at, own, 0.0), |sum, c| beta.mul_add(c, sum));
        }
        if flags & KEEP != 0 {
            sum.store_part(*pre, at, own);
        }
        if flags & GELU != 0 {
            sum = map4!(sum, math::gelu);
        }
        sum.store_part(*out, at, own);
    }
}

/// The entry points: the same parameters, another tile.
macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $threads_m:literal x $threads_n:literal threads, $tm:literal x $tn:literal each, $pa:literal + $pb:literal pieces;)*) => {$(
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
            unsafe { tile::<$threads_m, $threads_n, $tm, $tn, $pa, $pb>(problem) };
        }
    )*};
}

entries! {
    /// Tiles of 128 x 128, 256 threads: large matrices.
    matmul_128x128: 16 x 16 threads, 8 x 8 each, 2 + 2 pieces;
    /// Tiles of 64 x 64, 256 threads: enough blocks where 128 x 128 would leave processors idle.
    matmul_64x64: 16 x 16 threads, 4 x 4 each, 1 + 1 pieces;
    /// Tiles of 16 x 64, 64 threads: a few rows, such as one sample's 12 tokens.
    matmul_16x64: 4 x 16 threads, 4 x 4 each, 1 + 4 pieces;
}

/// The grid that covers `[m, n]` with tiles, a layer for each batch.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $rows:literal, $cols:literal) => {
        Grid::new($p.n.div_ceil($cols) as usize, $p.m.div_ceil($rows) as usize, $p.batches as usize)
    };
}

/// Every element that a batch reads or writes lies inside its argument, and no two batches write the same one.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check {
    ($p:ident) => {{
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

contract!(
    matmul_128x128 { block: 256, shared: 8 * stage_len(128, 128) } | p | {
        check!(p);
        grid!(p, 128, 128)
    }
);
contract!(
    matmul_64x64 { block: 256, shared: 8 * stage_len(64, 64) } | p | {
        check!(p);
        grid!(p, 64, 64)
    }
);
contract!(
    matmul_16x64 { block: 64, shared: 8 * stage_len(16, 64) } | p | {
        check!(p);
        grid!(p, 16, 64)
    }
);
