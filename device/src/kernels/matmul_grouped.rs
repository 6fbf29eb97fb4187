//! Products grouped by expert: each group of rows has a matrix of its own.
//!
//! The rows of all groups stand one group after another. `offsets` has the first row of each group,
//! and the end of the last. It is on the device, so a grid covers the most tiles that there can be:
//!
//! ```text
//! by rows: out[r] = A[r] op(B of r's group)       by k: out of a group = (A of the group)^T (B of it)
//!
//!    rows 300, tile 128, offsets 0 130 130 300      blocks z = 0: k = rows   0 .. 129
//!    blocks of a column:  group 0: 0..127 128..129         z = 1: none, so zeros
//!                         group 1: (none)                  z = 2: k = rows 130 .. 299
//!                         group 2: 130..257 258..299
//!    slots: 300 / 128 + 3, rounded up. Group g begins at slot offsets[g] / 128 + g.
//! ```
//! The tile's code is that of [`matmul`](super::matmul) and of [`matmul_bf16`](super::matmul_bf16).
//! k is never split, so an output has the bits of the same product of one group, if that is not
//! split.
//!
//! The parameters are as in `matmul`, with these differences:
//! - `extents`: `batches` is the number of groups. The rows of all groups are `m` in a product by
//!   rows, and `k` in one by k. `k_per_split` is k.
//! - `offsets`: `[batches + 1]`, ascending. Offsets past the last row count as the end.
//! - A product by rows has one `a` and one `out`, and a `b` for each group. A product by k, which
//!   [`TRANSPOSE_A`] selects, has one `a` and one `b`, and an `out` for each group.
//! - `c` is `out`. There is no bias and no other flag than those of the operands' layouts.
//!
//! Invariant: no offset causes an access outside an argument.

#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::ON_CPU;
use super::matmul::block::{GROUP, Problem};
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks;
use super::matmul::epilogue::Epilogue;
use super::matmul::operand::Operand;
use super::matmul::split::SplitRange;
use super::matmul::tile::place_of;
use super::matmul::{EpilogueForm, ProductExtents, TRANSPOSE_A, TRANSPOSE_B, Tile, multiply};
use super::matmul::{T32X64, T64X128};
use super::matmul_bf16::block as of_bf16;
use super::matmul_bf16::operand::Operand as HalfOperand;
use super::matmul_bf16::{self as half_tiles, OperandLayout};
use crate::family;
use crate::vector::load;
use cuda_std::prelude::*;
use half::bf16;

/// The group of a block, its rows, and the block's tile among those of its output.
struct Part {
    group: usize,
    first: u32,
    end: u32,
    place: [u32; 2],
}

impl Part {
    /// Returns the part of this block, whose tile is `rows` x `cols`. There is none if the grid has
    /// more blocks than the groups have tiles.
    ///
    /// # Safety
    /// `offsets` has `batches + 1` elements.
    #[inline(always)]
    unsafe fn of_block(
        offsets: &[u32],
        extents: ProductExtents,
        by_rows: bool,
        [rows, cols]: [u32; 2],
        group: u32,
    ) -> Option<Self> {
        let ProductExtents { m, n, k, batches, .. } = extents;
        let columns = n.div_ceil(cols);
        let all = if by_rows { m } else { k };
        // SAFETY: the index is at most `batches`.
        let offset = |at: u32| unsafe { load(offsets, at as usize) }.min(all);
        if !by_rows {
            let number = thread::block_idx_z();
            if number >= batches {
                return None;
            }
            let (first, end) = (offset(number), offset(number + 1));
            let place = place_of(thread::block_idx_x(), [m.div_ceil(rows), columns], group);
            return Some(Self { group: number as usize, first, end: if end < first { first } else { end }, place });
        }
        let [slot, column] = place_of(thread::block_idx_x(), [m.div_ceil(rows) + batches, columns], group);
        // Finds the last group that begins at the slot or before.
        let (mut low, mut high) = (0, batches);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if offset(middle) / rows + middle <= slot {
                low = middle;
            } else {
                high = middle;
            }
        }
        let (first, end) = (offset(low), offset(low + 1));
        let begin = first / rows + low;
        if low >= high || slot < begin || end <= first || slot - begin >= (end - first).div_ceil(rows) {
            return None;
        }
        Some(Self { group: low as usize, first, end, place: [slot - begin, column] })
    }
}

/// The location of a part in the matrices: the first elements of A, B and the output, the rows of
/// the output, and the range of k.
struct Located {
    a: usize,
    b: usize,
    out: usize,
    m: u32,
    k: [u32; 2],
}

impl Located {
    #[inline(always)]
    fn new(part: &Part, extents: ProductExtents, by_rows: bool, lda: u32, stride_b: usize, form: EpilogueForm) -> Self {
        let Part { group, first, end, .. } = *part;
        if by_rows {
            let [a, out] = [lda, form.ldc].map(|stride| first as usize * stride as usize);
            return Self { a, b: group * stride_b, out, m: end - first, k: [0, extents.k] };
        }
        Self { a: 0, b: 0, out: group * form.stride_c, m: extents.m, k: [first, end] }
    }
}

/// Checks the arguments, and returns the grid.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $by_rows:expr, $tile:expr) => {{
        let (extents, form) = ($p.extents, $p.epilogue);
        for (name, extent) in [("m", extents.m), ("n", extents.n)] {
            checks::countable(name, extent)?;
        }
        let splits = checks::splits(extents)?;
        Violation::unless(splits == 1, "k_per_split", "all of k, which is not split", extents.k_per_split)?;
        let layouts = if $by_rows { TRANSPOSE_B } else { TRANSPOSE_A };
        Violation::unless(form.flags & !layouts == 0, "flags", "only the operands' layouts", form.flags)?;
        Violation::unless_length("offsets", Size::of(extents.batches).plus(1_usize), $p.offsets.len())?;
        let [m, n, k, lda, ldb, ldc] =
            [extents.m, extents.n, extents.k, $p.lda, $p.ldb, form.ldc].map(|extent| extent as usize);
        let (groups, one) = (Size::of(extents.batches), Size::of(1_usize));
        let [of_b, of_out, a] = if $by_rows { [groups, one, one] } else { [one, groups, one] };
        checks::holds("a", $p.a.len(), a, 0, if $by_rows { [m, k] } else { [k, m] }, lda)?;
        let b = if form.flags & TRANSPOSE_B != 0 { [n, k] } else { [k, n] };
        checks::holds("b", $p.b.len(), of_b, $p.stride_b, b, ldb)?;
        checks::holds("out", $p.out.len(), of_out, form.stride_c, [m, n], ldc)?;
        checks::apart(of_out, form.stride_c, [m, n], ldc)?;
        let (rows, columns) = (Size::of(m).div_ceil($tile.rows()), Size::of(n).div_ceil($tile.cols()));
        if $by_rows {
            Grid::new(rows.plus(groups).times(columns), 1_u32, 1_u32)
        } else {
            Grid::new(rows.times(columns), 1_u32, extents.batches)
        }
    }};
}

family! {
    /// Multiplies groups of f32 rows. The module's documentation describes the parameters.
    matmul_grouped(tile: Tile as TILE) {
        /// 32 x 64, 128 threads.
        matmul_grouped_32x64 = T32X64;
        /// 64 x 128, 128 threads.
        matmul_grouped_64x128 = T64X128;
        /// 128 x 256, 32 threads, for the emulator only.
        #[cfg(not(target_arch = "nvptx64"))]
        matmul_grouped_on_cpu = ON_CPU;
    }
    unsafe fn(
        a: &[f32],
        b: &[f32],
        offsets: &[u32],
        out: *mut f32,
        extents: ProductExtents,
        lda: u32,
        ldb: u32,
        stride_b: usize,
        epilogue: EpilogueForm,
    ) {
        let EpilogueForm { ldc, alpha, beta, flags, .. } = epilogue;
        let by_rows = flags & TRANSPOSE_A == 0;
        // SAFETY: the contract has checked that `offsets` has an element for each group, and one.
        let part = unsafe { Part::of_block(offsets, extents, by_rows, [TILE.rows(), TILE.cols()], GROUP) };
        let Some(part) = part else { return };
        let Located { a: at_a, b: at_b, out: start, m, k: [first, end] } =
            Located::new(&part, extents, by_rows, lda, stride_b, epilogue);
        let n = extents.n;
        let a = Operand { values: a, start: at_a, rows: m, stride: lda, along_k: by_rows };
        let b = Operand { values: b, start: at_b, rows: n, stride: ldb, along_k: flags & TRANSPOSE_B != 0 };
        let (c, pre) = (out.cast_const(), core::ptr::null_mut());
        let flags = flags & !(TRANSPOSE_A | TRANSPOSE_B);
        let epilogue = Epilogue { bias: &[], bias_start: 0, c, out, pre, start, m, n, ldc, alpha, beta, flags };
        let problem = Problem { a, b, epilogue, k: SplitRange { first, end, chain: end - first } };
        // SAFETY: the contract has checked that the matrices lie inside their arguments, and a
        // group's rows lie inside them.
        unsafe { multiply!(problem, TILE, part.place) }
    }
    // SAFETY: the matrices of `a`, `b` and `out` lie inside their arguments, and those of `out` do
    // not overlap. A group's rows are among those of the matrices, because larger offsets count as
    // the end. A block computes a tile that begins inside its group.
    contract unsafe { block: TILE.threads(), shared: TILE.shared_bytes() } |p| {
        grid!(p, p.epilogue.flags & TRANSPOSE_A == 0, TILE)
    }
}

family! {
    /// Multiplies groups of BF16 rows: by rows with [`OperandLayout::Plain`], and by k with
    /// [`OperandLayout::Transposed`]. The module's documentation describes the parameters.
    matmul_grouped_of_bf16<S: Stored>(variant: (OperandLayout, half_tiles::Tile) as VARIANT) {
        (OperandLayout::Plain, half_tiles::T64X64) => { matmul_grouped_of_bf16_64x64_bf16: bf16; }
        (OperandLayout::Plain, half_tiles::T128X128) => { matmul_grouped_of_bf16_128x128_bf16: bf16; }
        (OperandLayout::Transposed, half_tiles::T64X64) => { matmul_grouped_of_bf16_transposed_64x64_f32: f32; }
        (OperandLayout::Transposed, half_tiles::T128X128) => { matmul_grouped_of_bf16_transposed_128x128_f32: f32; }
    }
    unsafe fn(
        a: &[bf16],
        b: &[bf16],
        offsets: &[u32],
        out: *mut S,
        extents: ProductExtents,
        lda: u32,
        ldb: u32,
        stride_b: usize,
        epilogue: EpilogueForm,
    ) {
        const BY_ROWS: bool = matches!(VARIANT.0, OperandLayout::Plain);
        const TILE: half_tiles::Tile = VARIANT.1;
        let EpilogueForm { ldc, alpha, beta, flags, .. } = epilogue;
        // SAFETY: the contract has checked that `offsets` has an element for each group, and one.
        let part = unsafe { Part::of_block(offsets, extents, BY_ROWS, [TILE.rows(), TILE.cols()], of_bf16::GROUP) };
        let Some(part) = part else { return };
        let Located { a: at_a, b: at_b, out: start, m, k } =
            Located::new(&part, extents, BY_ROWS, lda, stride_b, epilogue);
        let n = extents.n;
        let a = HalfOperand { values: a, start: at_a, rows: m, stride: lda, along_k: BY_ROWS };
        let b = HalfOperand { values: b, start: at_b, rows: n, stride: ldb, along_k: flags & TRANSPOSE_B != 0 };
        let (c, pre) = (out.cast_const(), core::ptr::null_mut());
        let flags = flags & !(TRANSPOSE_A | TRANSPOSE_B);
        let epilogue = Epilogue { bias: &[], bias_start: 0, c, out, pre, start, m, n, ldc, alpha, beta, flags };
        let columns = of_bf16::ColumnSums { wanted: false, accumulate: 0, sums: core::ptr::null_mut(), start: 0 };
        let problem = of_bf16::Problem { a, b, epilogue, columns, k };
        // SAFETY: the contract has checked that the matrices lie inside their arguments, and a
        // group's rows lie inside them.
        unsafe {
            const ROWS: usize = TILE.each[0];
            const COLS: usize = TILE.each[1];
            of_bf16::compute::<BY_ROWS, ROWS, COLS, { 2 * COLS }, { TILE.passes()[0] }, { TILE.passes()[1] }, S>(
                problem, TILE, part.place,
            );
        }
    }
    // SAFETY: as for `matmul_grouped`.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        grid!(p, VARIANT.0 == OperandLayout::Plain, VARIANT.1)
    }
}

/// The tiles for f32 that run on a GPU, and those for BF16.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: ([Tile; 2], [half_tiles::Tile; 2]) = ([T32X64, T64X128], [half_tiles::T64X64, half_tiles::T128X128]);
