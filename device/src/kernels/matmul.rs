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

use crate::contract;
use crate::math;
use crate::tile::SharedTile;
use crate::vector::{self, F4};
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

/// Bytes of shared memory for tiles of `rows` x 16 and 16 x `cols`, twice.
const fn shared_bytes(rows: u32, cols: u32) -> u32 {
    2 * DEPTH * (rows + PAD + cols + PAD) * 4
}

/// One matrix multiply as a thread sees it.
struct Problem<'p> {
    a: &'p [f32],
    b: &'p [f32],
    bias: &'p [f32],
    c: *const f32,
    out: *mut f32,
    pre: *mut f32,
    m: u32,
    n: u32,
    k: u32,
    lda: u32,
    ldb: u32,
    ldc: u32,
    beta: f32,
    flags: u32,
}

/// One operand: `rows` x `k`, contiguous along k or along the rows.
struct Operand<'p> {
    values: &'p [f32],
    rows: u32,
    k: u32,
    stride: u32,
    along_k: bool,
    /// Whether four neighbours along the contiguous side can be moved at once.
    wide: bool,
}

impl<'p> Operand<'p> {
    #[inline(always)]
    fn new(values: &'p [f32], rows: u32, k: u32, stride: u32, along_k: bool) -> Self {
        let wide = stride % 4 == 0 && values.as_ptr() as usize % 16 == 0;
        Self { values, rows, k, stride, along_k, wide }
    }

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
        let index = outer as usize * self.stride as usize + inner as usize;
        let count = inner_end - inner;
        // SAFETY: `index..index + min(count, 4)` lies in the operand, which the contract checked.
        unsafe {
            if self.wide && count >= 4 {
                F4::load(self.values, index)
            } else {
                F4([
                    vector::load(self.values, index),
                    if count > 1 { vector::load(self.values, index + 1) } else { 0.0 },
                    if count > 2 { vector::load(self.values, index + 2) } else { 0.0 },
                    if count > 3 { vector::load(self.values, index + 3) } else { 0.0 },
                ])
            }
        }
    }

    /// Stores the `piece`th group of four to the tile, k-major.
    #[inline(always)]
    fn stage(&self, piece: u32, width: u32, tile: SharedTile<f32>, values: F4) {
        let (row, k) = self.place(piece, width);
        let at = k * (width + PAD) + row;
        if self.along_k {
            for (step, value) in (0..).zip(values.0) {
                tile.set(at + step * (width + PAD), value);
            }
        } else {
            tile.set4(at, values);
        }
    }
}

/// Adds `depth` products to each of a thread's sums.
#[inline(always)]
fn accumulate<const TM: usize, const TN: usize>(
    sums: &mut [[f32; TN]; TM],
    a: SharedTile<f32>,
    b: SharedTile<f32>,
    (rows, cols): (u32, u32),
    (row, col): (u32, u32),
    depth: u32,
) {
    let (row_groups, col_groups) = (TM as u32 / 4, TN as u32 / 4);
    for p in 0..depth {
        let mut left = [0.0; TM];
        let mut right = [0.0; TN];
        for group in 0..row_groups {
            let at = p * (rows + PAD) + group * (rows / row_groups) + row;
            left[group as usize * 4..][..4].copy_from_slice(&a.get4(at).0);
        }
        for group in 0..col_groups {
            let at = p * (cols + PAD) + group * (cols / col_groups) + col;
            right[group as usize * 4..][..4].copy_from_slice(&b.get4(at).0);
        }
        for i in 0..TM {
            for j in 0..TN {
                sums[i][j] = left[i].mul_add(right[j], sums[i][j]);
            }
        }
    }
}

/// One block's tile: `THREADS_M x THREADS_N` threads of `TM x TN` outputs each; `PIECES_A`, `PIECES_B` groups of four
/// fetched by each thread for each tile.
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
    let Problem { a, b, bias, c, out, pre, m, n, k, lda, ldb, ldc, beta, flags } = problem;
    let threads = THREADS_M * THREADS_N;
    let (rows, cols) = (THREADS_M * TM as u32, THREADS_N * TN as u32);
    let (first_row, first_col) = (thread::block_idx_y() * rows, thread::block_idx_x() * cols);
    let thread = thread::thread_idx_x();
    let (row, col) = (thread / THREADS_N * 4, thread % THREADS_N * 4);

    let a = Operand::new(a, m, k, lda, flags & TRANSPOSE_A == 0);
    let b = Operand::new(b, n, k, ldb, flags & TRANSPOSE_B != 0);
    let (a_len, b_len) = (DEPTH * (rows + PAD), DEPTH * (cols + PAD));
    // SAFETY: the four tiles follow each other in what the contract declares.
    let tiles = unsafe {
        [
            [SharedTile::<f32>::new(0, a_len), SharedTile::new(a_len * 8, b_len)],
            [SharedTile::new(a_len * 4, a_len), SharedTile::new(a_len * 8 + b_len * 4, b_len)],
        ]
    };

    let mut sums = [[0.0f32; TN]; TM];
    let mut next_a = [F4::splat(0.0); PIECES_A];
    let mut next_b = [F4::splat(0.0); PIECES_B];
    let depths = k.div_ceil(DEPTH);
    let mut buffer = 0;
    for depth in 0..=depths {
        if depth < depths {
            // SAFETY: as for `tile`.
            unsafe {
                for (piece, value) in (0..).zip(&mut next_a) {
                    *value = a.fetch(thread + piece * threads, rows, first_row, depth * DEPTH);
                }
                for (piece, value) in (0..).zip(&mut next_b) {
                    *value = b.fetch(thread + piece * threads, cols, first_col, depth * DEPTH);
                }
            }
        }
        if depth > 0 {
            let [left, right] = tiles[buffer];
            let left_over = k - (depth - 1) * DEPTH;
            if left_over >= DEPTH {
                accumulate(&mut sums, left, right, (rows, cols), (row, col), DEPTH);
            } else {
                accumulate(&mut sums, left, right, (rows, cols), (row, col), left_over);
            }
            buffer ^= 1;
        }
        if depth < depths {
            // The buffer that is filled now was last read before the barrier of the round before.
            let [left, right] = tiles[buffer];
            for (piece, value) in (0..).zip(next_a) {
                a.stage(thread + piece * threads, rows, left, value);
            }
            for (piece, value) in (0..).zip(next_b) {
                b.stage(thread + piece * threads, cols, right, value);
            }
            thread::sync_threads();
        }
    }

    let (row_groups, col_groups) = (TM as u32 / 4, TN as u32 / 4);
    let wide = ldc % 4 == 0 && (out as usize | c as usize | pre as usize | bias.as_ptr() as usize) % 16 == 0;
    for i in 0..TM {
        let i_out = first_row + i as u32 / 4 * (rows / row_groups) + row + i as u32 % 4;
        for group in 0..TN / 4 {
            let j_out = first_col + group as u32 * (cols / col_groups) + col;
            if i_out >= m || j_out >= n {
                continue;
            }
            let count = if wide { (n - j_out) as usize } else { 0 };
            let at = i_out as usize * ldc as usize + j_out as usize;
            let sum = F4([sums[i][group * 4], sums[i][group * 4 + 1], sums[i][group * 4 + 2], sums[i][group * 4 + 3]]);
            // SAFETY: row `i_out` and these columns lie in `out`, `c`, `pre` and `bias`, which the contract checked.
            unsafe {
                if count >= 4 {
                    let mut sum = sum;
                    if !bias.is_empty() {
                        sum = sum.zip(F4::load(bias, j_out as usize), |sum, bias| sum + bias);
                    }
                    if beta != 0.0 {
                        sum = sum.zip(F4::load_raw(c, at), |sum, c| beta.mul_add(c, sum));
                    }
                    if flags & KEEP != 0 {
                        sum.store(pre, at);
                    }
                    if flags & GELU != 0 {
                        sum = sum.map(math::gelu);
                    }
                    sum.store(out, at);
                } else {
                    for (step, mut sum) in sum.0.into_iter().enumerate() {
                        if j_out as usize + step < n as usize {
                            if !bias.is_empty() {
                                sum += vector::load(bias, j_out as usize + step);
                            }
                            if beta != 0.0 {
                                sum = beta.mul_add(*c.add(at + step), sum);
                            }
                            if flags & KEEP != 0 {
                                *pre.add(at + step) = sum;
                            }
                            if flags & GELU != 0 {
                                sum = math::gelu(sum);
                            }
                            *out.add(at + step) = sum;
                        }
                    }
                }
            }
        }
    }
}

/// `values[start..]`, empty for an empty slice.
#[inline(always)]
unsafe fn batch(values: &[f32], start: usize) -> &[f32] {
    if values.is_empty() {
        return values;
    }
    // SAFETY: the contract checked that every batch lies inside.
    unsafe { core::slice::from_raw_parts(values.as_ptr().add(start), values.len() - start) }
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
            // SAFETY: each batch lies inside its arguments by the contract.
            unsafe {
                let (a, b, bias) = (batch(a, z * stride_a), batch(b, z * stride_b), batch(bias, z * stride_bias));
                let (c, out, pre) = (c.add(z * stride_c), out.add(z * stride_c), pre.add(z * stride_c));
                let problem = Problem { a, b, bias, c, out, pre, m, n, k, lda, ldb, ldc, beta, flags };
                tile::<$threads_m, $threads_n, $tm, $tn, $pa, $pb>(problem);
            }
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

contract!(matmul_128x128 { block: 256, shared: shared_bytes(128, 128), align: 4 } |p| { check!(p); grid!(p, 128, 128) });
contract!(matmul_64x64 { block: 256, shared: shared_bytes(64, 64), align: 4 } |p| { check!(p); grid!(p, 64, 64) });
contract!(matmul_16x64 { block: 64, shared: shared_bytes(16, 64), align: 4 } |p| { check!(p); grid!(p, 16, 64) });
