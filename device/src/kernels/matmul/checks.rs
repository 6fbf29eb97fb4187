//! The checks in the contracts of matrix multiplies. Every element that a batch reads or writes
//! lies inside its argument, and no two batches write the same element.

use super::epilogue::differentiates;
use super::{ACTIVATIONS, GELU_DERIVATIVE, SWIGLU};
use crate::matmul::ProductExtents;
use cuda_std::launch::{Pointer, Size, Violation};

/// The maximum of rows, columns and k. A kernel numbers them in 32 bits, including those of a tile
/// or a stage past the end.
const MOST: u32 = 1 << 31;

/// Returns Ok if a kernel can number `extent` rows, columns or k.
pub(crate) fn countable(argument: &'static str, extent: u32) -> Result<(), Violation> {
    Violation::unless(extent <= MOST, argument, "at most 2^31", extent)
}

/// Returns true if `c` is read. Fails if more than one activation follows the sum, if the kernel
/// lacks it, or if `c` would be both multiplied and added.
pub(crate) fn reads_c<S>(_: &Pointer<'_, S>, flags: u32, beta: f32) -> Result<bool, Violation> {
    let multiplies = flags & (SWIGLU | GELU_DERIVATIVE) != 0;
    Violation::unless((flags & ACTIVATIONS).count_ones() <= 1, "flags", "at most one activation", flags)?;
    let exists = differentiates::<S>() || flags & GELU_DERIVATIVE == 0;
    Violation::unless(exists, "flags", "a derivative only with BF16 storage", flags)?;
    Violation::unless(!multiplies || beta == 0.0, "beta", "0, because `c` multiplies the sum", beta)?;
    Ok(multiplies || beta != 0.0)
}

/// Checks `a` and `b` of a multiply.
macro_rules! check_factors {
    ($p:ident, $flags:expr) => {
        let [m, n, k, lda, ldb] = [$p.extents.m, $p.extents.n, $p.extents.k, $p.lda, $p.ldb].map(|x| x as usize);
        let (a_rows, a_cols) = if $flags & TRANSPOSE_A != 0 { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if $flags & TRANSPOSE_B != 0 { (n, k) } else { (k, n) };
        checks::holds("a", $p.a.len(), $p.extents.batches, $p.stride_a, [a_rows, a_cols], lda)?;
        checks::holds("b", $p.b.len(), $p.extents.batches, $p.stride_b, [b_rows, b_cols], ldb)?;
    };
}
pub(crate) use check_factors;

/// Returns the number of splits of k. If there are several, the epilogue must be empty.
macro_rules! check_split_k {
    ($p:ident) => {{
        let split_k = checks::splits($p.extents)?;
        let kept_or_activated = $p.epilogue.flags & ($crate::matmul::ACTIVATIONS | $crate::matmul::STORE_PREACT) != 0;
        let sum_alone = $p.bias.is_empty() && $p.epilogue.alpha == 1.0 && $p.epilogue.beta == 0.0 && !kept_or_activated;
        Violation::unless(
            split_k == 1 || sum_alone,
            "k_per_split",
            "k, because the epilogue is not empty",
            $p.extents.k_per_split,
        )?;
        split_k
    }};
}
pub(crate) use check_split_k;

/// Returns the number of partial sums of an output.
pub(crate) fn splits(extents: ProductExtents) -> Result<u32, Violation> {
    let ProductExtents { k, k_per_split, .. } = extents;
    countable("k", k)?;
    Violation::unless(k_per_split > 0, "k_per_split", "at least one", k_per_split)?;
    Ok(k.div_ceil(k_per_split).max(1))
}

/// Checks the outputs and the epilogue's inputs: `$split_k` matrices for each batch, and one bias.
macro_rules! check_outputs {
    ($p:ident, $split_k:expr) => {
        checks::countable("m", $p.extents.m)?;
        checks::countable("n", $p.extents.n)?;
        let [m, n, ldc] = [$p.extents.m, $p.extents.n, $p.epilogue.ldc].map(|x| x as usize);
        let matrices = Size::of($p.extents.batches).times($split_k);
        checks::holds("out", $p.out.len(), matrices, $p.epilogue.stride_c, [m, n], ldc)?;
        if checks::reads_c(&$p.c, $p.epilogue.flags, $p.epilogue.beta)? {
            checks::holds("c", $p.c.len(), matrices, $p.epilogue.stride_c, [m, n], ldc)?;
        }
        if $p.epilogue.flags & $crate::matmul::STORE_PREACT != 0 {
            checks::holds("pre", $p.pre.len(), matrices, $p.epilogue.stride_c, [m, n], ldc)?;
        }
        if !$p.bias.is_empty() {
            checks::holds("bias", $p.bias.len(), $p.extents.batches, $p.epilogue.stride_bias, [1, n], n)?;
        }
        checks::apart(matrices, $p.epilogue.stride_c, [m, n], ldc)?;
    };
}
pub(crate) use check_outputs;

/// Returns Ok if no two elements of `matrices` of `m` x `n` outputs, with strides `stride` and
/// `ldc`, are the same.
pub(crate) fn apart(matrices: Size, stride: usize, [m, n]: [usize; 2], ldc: usize) -> Result<(), Violation> {
    Violation::unless(ldc >= n, "out", "rows that do not overlap", format_args!("rows {ldc} apart"))?;
    let rows_apart = Size::of(m).times(ldc).at_most(stride);
    let columns_apart = stride >= n && matrices.times(stride).at_most(ldc);
    let apart = matrices.at_most(1) || rows_apart || columns_apart;
    Violation::unless(apart, "stride_c", "batches that do not write the same element", stride)
}

/// Returns Ok if `matrices` of `rows` x `cols`, with strides `stride` and `ld`, lie inside `len`
/// elements. They may overlap.
pub(crate) fn holds(
    argument: &'static str,
    len: usize,
    matrices: impl Into<Size>,
    stride: usize,
    [rows, cols]: [usize; 2],
    ld: usize,
) -> Result<(), Violation> {
    let matrices = matrices.into();
    if matrices.is(0) || rows == 0 || cols == 0 {
        return Ok(());
    }
    let last = matrices.less(1).times(stride).plus(Size::of(rows).less(1).times(ld)).plus(cols);
    if last.at_most(len) {
        return Ok(());
    }
    let expected = std::format!("{matrices} matrices of {rows} x {cols}, rows {ld} and matrices {stride} apart");
    Err(Violation::new(argument, expected, std::format!("{len} elements")))
}
