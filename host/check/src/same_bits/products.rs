//! The cases of matmuls, which all variants of a family share.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.

#![forbid(unsafe_code)]

use super::CaseSize;
use super::inputs::Inputs;
use cuda_std::launch::{PointerMut, Slice, TensorMap};
use half::bf16;
use kernels::matmul::{EpilogueForm, ProductExtents};
use kernels::matmul::{
    GELU, GELU_DERIVATIVE, SILU, STORE_PREACT, SWIGLU, TRANSPOSE_A, TRANSPOSE_B, Tile, matmul, sum_splits,
};
use kernels::matmul_bf16::{self as of_bf16, ADD_TO_SUMS, BIAS_GRAD, OperandLayout, matmul_bf16};
use kernels::matmul_mma::{Tile as MmaTile, matmul_mma};
use kernels::matmul_wgmma::{self as of_wgmma, matmul_wgmma};
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_tf32};
use kernels::wgmma::box_rows;
use stepscope_core::{Element, Result, Source, Stored, Target, Tensor, ops};

/// A matmul: batches, `[m, n, k]`, the size of a split, flags, alpha and beta.
pub(super) type Product = (usize, [usize; 3], usize, u32, [f32; 2]);

/// A split that covers all of k.
pub(super) const ALL: usize = usize::MAX;

/// Products with and without tails, with each way to store and each epilogue.
const PRODUCTS: [Product; 7] = [
    (1, [1, 1, 1], ALL, 0, [1.0, 0.0]),
    (1, [64, 64, 64], ALL, TRANSPOSE_A, [1.0, 1.0]),
    (3, [129, 65, 17], ALL, TRANSPOSE_A | TRANSPOSE_B, [1.0, 0.0]),
    (1, [12, 256, 193], ALL, TRANSPOSE_B | GELU, [1.0, 0.0]),
    (1, [150, 193, 257], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [70, 131, 9], ALL, SILU | STORE_PREACT, [0.3, 0.5]),
    (2, [70, 132, 9], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
];

/// Four blocks of the largest tile, and enough uses of GELU, because fusing changes one result in
/// some hundreds. Copies by vectors and by elements along both axes, complete and partial stages,
/// and splits of which the first has two chains.
const SMALLEST_PRODUCTS: [Product; 7] = [
    (1, [129, 257, 5], ALL, GELU, [1.0, 0.0]),
    (2, [8, 12, 68], ALL, TRANSPOSE_A, [1.0, 1.0]),
    (1, [12, 20, 70], ALL, TRANSPOSE_B | GELU, [1.0, 0.0]),
    (1, [5, 9, 67], ALL, TRANSPOSE_A | GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [9, 35, 5], ALL, SILU, [0.3, 0.5]),
    (1, [9, 36, 5], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (1, [2, 3, 1100], 1088, 0, [1.0, 0.0]),
];

/// Products for tensor cores, which have no transposes.
const MMA_PRODUCTS: [Product; 7] = [
    (1, [1, 8, 8], ALL, 0, [1.0, 0.0]),
    (1, [64, 64, 64], ALL, 0, [1.0, 1.0]),
    (3, [136, 72, 24], ALL, 0, [1.0, 0.0]),
    (1, [12, 256, 192], ALL, GELU, [1.0, 0.0]),
    (1, [150, 272, 264], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [70, 131, 8], ALL, SILU | STORE_PREACT, [0.3, 0.5]),
    (2, [70, 132, 8], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
];

/// Four blocks of the largest tile, enough uses of GELU, vectors and elements, stages that wrap
/// around the ring, and splits.
const SMALLEST_MMA_PRODUCTS: [Product; 6] = [
    (1, [129, 257, 24], ALL, GELU, [1.0, 0.0]),
    (2, [12, 24, 168], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [3, 7, 8], ALL, GELU, [1.0, 0.0]),
    (1, [9, 35, 8], ALL, SILU, [0.3, 0.5]),
    (1, [9, 36, 8], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
];

/// Runs the case of a tile. All tiles give the same bits.
pub(super) fn product(i: &Inputs<'_, '_>, tile: Tile) -> Result<()> {
    for &(batches, [m, n, k], k_per_split, flags, [alpha, beta]) in i.by_size(&PRODUCTS[..], &SMALLEST_PRODUCTS) {
        let (a, b, bias) = (i.normals([batches, m, k])?, i.normals([batches, k, n])?, i.normals([batches, n])?);
        let shape = [batches * k.div_ceil(k_per_split), m, n];
        let mut out = i.output(reads_c(flags, beta), shape, || i.normals(shape))?;
        let mut pre = i.output(false, shape, || i.normals(shape))?;
        let (c, written) = out.in_place();
        i.step.launch(matmul {
            tile,
            a: a.slice(),
            b: b.slice(),
            bias: unless_split(k_per_split < k, &bias),
            c,
            out: written,
            pre: pre.out(),
            extents: extents(batches, [m, n, k], k_per_split),
            lda: if flags & TRANSPOSE_A == 0 { k } else { m } as u32,
            ldb: if flags & TRANSPOSE_B == 0 { n } else { k } as u32,
            stride_a: m * k,
            stride_b: k * n,
            epilogue: epilogue([m, n], [alpha, beta], flags),
        })?;
        keep_outputs(i, flags, &out, &pre)?;
    }
    Ok(())
}

/// Returns the extents of a launch. A split has at most all of k.
pub(super) fn extents(batches: usize, [m, n, k]: [usize; 3], k_per_split: usize) -> ProductExtents {
    let [m, n, k, k_per_split, batches] = [m, n, k, k_per_split.min(k.max(1)), batches].map(|extent| extent as u32);
    ProductExtents { m, n, k, k_per_split, batches }
}

/// Returns the epilogue of outputs `[batches, m, n]` with a bias for each.
pub(super) fn epilogue([m, n]: [usize; 2], [alpha, beta]: [f32; 2], flags: u32) -> EpilogueForm {
    EpilogueForm { stride_c: m * n, stride_bias: n, ldc: n as u32, alpha, beta, flags }
}

/// Returns true if a matmul reads `c`, to add it or as its gate.
pub(super) fn reads_c(flags: u32, beta: f32) -> bool {
    beta != 0.0 || flags & SWIGLU != 0
}

/// Returns the bias, or none if the product is split, because no epilogue may follow a split's sum.
pub(super) fn unless_split<'t>(is_split: bool, bias: &'t Tensor<'_>) -> Slice<'t, f32> {
    if is_split { Slice::empty() } else { bias.slice() }
}

/// Keeps the outputs of a matmul.
pub(super) fn keep_outputs<'s, S: Stored>(
    i: &Inputs<'_, 's>,
    flags: u32,
    out: &Tensor<'s, S>,
    pre: &Tensor<'s, S>,
) -> Result<()> {
    i.keep(out)?;
    if flags & STORE_PREACT != 0 || i.size == CaseSize::Whole { i.keep(pre) } else { Ok(()) }
}

/// Runs the case of a tensor-core tile: [`product`] on [`factors`](Inputs::factors). The smallest
/// size has a fractional bias, so that GELU does not see only whole numbers.
pub(super) fn mma_product(i: &Inputs<'_, '_>, tile: MmaTile) -> Result<()> {
    for &(batches, [m, n, k], k_per_split, flags, [alpha, beta]) in i.by_size(&MMA_PRODUCTS[..], &SMALLEST_MMA_PRODUCTS)
    {
        let (a, b) = (i.factors(batches * m * k)?, i.factors(batches * k * n)?);
        let [(a, stride_a), (b, stride_b)] = round_factors(i, batches, [m, n, k], TRANSPOSE_B, [&a, &b])?;
        let bias = if i.size == CaseSize::Whole { i.whole(batches * n)? } else { i.normals([batches * n])? };
        let length = batches * k.div_ceil(k_per_split) * m * n;
        let mut out = i.output(reads_c(flags, beta), [length], || i.whole(length))?;
        let mut pre = i.output(false, [length], || i.step.upload(&i.step.read(&out)?, [length]))?;
        let (c, written) = out.in_place();
        i.step.launch(matmul_mma {
            tile,
            a: a.slice(),
            b: b.slice(),
            bias: unless_split(k_per_split < k, &bias),
            c,
            out: written,
            pre: pre.out(),
            extents: extents(batches, [m, n, k], k_per_split),
            stride_a,
            stride_b,
            epilogue: epilogue([m, n], [alpha, beta], flags),
        })?;
        keep_outputs(i, flags, &out, &pre)?;
    }
    Ok(())
}

/// Products of BF16 tensors with and without tails, with each way to store and each epilogue. Some
/// rows are not a multiple of 16 bytes.
const BF16_PRODUCTS: [Product; 11] = [
    (1, [1, 8, 8], ALL, 0, [1.0, 0.0]),
    (1, [64, 64, 64], ALL, TRANSPOSE_A, [1.0, 1.0]),
    (3, [136, 72, 24], ALL, TRANSPOSE_A | TRANSPOSE_B, [1.0, 0.0]),
    (1, [12, 256, 192], ALL, TRANSPOSE_B | GELU, [1.0, 0.0]),
    (1, [150, 275, 261], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [70, 131, 9], ALL, SILU | STORE_PREACT, [0.3, 0.5]),
    (2, [70, 132, 9], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (2, [70, 131, 9], ALL, TRANSPOSE_B | GELU_DERIVATIVE | STORE_PREACT, [0.3, 0.0]),
    (1, [150, 276, 41], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [70, 132, 9], ALL, TRANSPOSE_A | SILU | STORE_PREACT, [0.3, 0.5]),
    (2, [70, 132, 9], ALL, TRANSPOSE_B | GELU_DERIVATIVE | STORE_PREACT, [0.3, 0.0]),
];

/// Products with four blocks of the largest tile, with GELU of many values, and with complete and
/// partial stages of both kinds of rows. Some have stages that wrap around the ring, and some are
/// split-K.
const SMALLEST_BF16_PRODUCTS: [Product; 9] = [
    (1, [129, 260, 24], ALL, GELU, [1.0, 0.0]),
    (1, [256, 256, 168], ALL, TRANSPOSE_A, [1.0, 0.0]),
    (2, [12, 24, 168], ALL, TRANSPOSE_B | GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [3, 7, 9], ALL, TRANSPOSE_A | TRANSPOSE_B | GELU, [1.0, 0.0]),
    (1, [9, 35, 8], ALL, SILU, [0.3, 0.5]),
    (1, [9, 36, 8], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
    (1, [72, 132, 8], ALL, TRANSPOSE_B | GELU_DERIVATIVE, [1.0, 0.0]),
    (1, [9, 35, 8], ALL, GELU_DERIVATIVE | STORE_PREACT, [0.3, 0.0]),
];

/// Products for wgmma, each in all layouts: ragged and whole tiles, several stages, a batch, k in
/// splits, and each epilogue.
const WGMMA_PRODUCTS: [Product; 9] = [
    (1, [1, 8, 0], ALL, 0, [1.0, 1.0]),
    (1, [129, 264, 72], ALL, GELU, [1.0, 0.0]),
    (2, [128, 256, 200], ALL, 0, [0.5, 0.5]),
    (1, [20, 256, 9], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (1, [130, 257, 40], ALL, SILU | STORE_PREACT, [0.3, 0.5]),
    (2, [20, 256, 9], ALL, GELU_DERIVATIVE | STORE_PREACT, [0.3, 0.0]),
    (1, [150, 275, 261], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [5, 9, 8], ALL, GELU_DERIVATIVE, [1.0, 0.0]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
];

/// A part of these for the self-test.
const SMALLEST_WGMMA_PRODUCTS: [Product; 4] = [
    (1, [129, 264, 72], ALL, GELU | STORE_PREACT, [1.0, 0.0]),
    (1, [128, 256, 392], ALL, 0, [0.5, 0.5]),
    (1, [9, 36, 8], ALL, SWIGLU, [0.3, 0.0]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
];

/// A kernel for BF16 tensors.
#[derive(Clone, Copy)]
pub(super) enum Bf16Kernel {
    Mma((OperandLayout, of_bf16::Tile)),
    Wgmma(([OperandLayout; 2], of_wgmma::Tile)),
}

impl Bf16Kernel {
    /// The products of the kernel's case. It multiplies those of its layouts.
    fn products(self, i: &Inputs<'_, '_>) -> &'static [Product] {
        match self {
            Self::Mma(_) => i.by_size(&BF16_PRODUCTS[..], &SMALLEST_BF16_PRODUCTS),
            Self::Wgmma(_) => i.by_size(&WGMMA_PRODUCTS[..], &SMALLEST_WGMMA_PRODUCTS),
        }
    }

    /// Returns the flags of the operands' layouts for a product, if the kernel has its layout.
    fn layout(self, flags: u32) -> Option<u32> {
        let flag = |layout: OperandLayout, flag: u32| if layout == OperandLayout::Transposed { flag } else { 0 };
        match self {
            Self::Mma((of_a, _)) => {
                (flags & TRANSPOSE_A == flag(of_a, TRANSPOSE_A)).then_some(flags & (TRANSPOSE_A | TRANSPOSE_B))
            }
            Self::Wgmma(([of_a, of_b], _)) => Some(flag(of_a, TRANSPOSE_A) | flag(of_b, TRANSPOSE_B)),
        }
    }

    /// The elements from a row of `length` to the next.
    fn row(self, length: usize) -> usize {
        match self {
            Self::Mma(_) => length,
            Self::Wgmma(_) => length.next_multiple_of(8),
        }
    }
}

/// An operand as it is stored: its memory, the extents of a matrix, and the elements from a row to
/// the next.
type Factor<'t> = (Slice<'t, bf16>, [usize; 2], usize);

/// Returns the tensor map of an operand of several batches.
fn map((memory, [rows, cols], ld): Factor<'_>, batches: usize) -> TensorMap<'_, bf16> {
    TensorMap {
        memory,
        extents: [cols, rows, batches].map(|extent| extent as u32),
        strides: [ld, rows * ld],
        box_rows: box_rows::<bf16>(true),
    }
}

/// Launches a kernel for BF16 tensors with operands `[a, b]`. wgmma gets fewer blocks than tiles.
macro_rules! launch_bf16 {
    ($i:ident, $kernel:expr, $factors:expr, $batches:expr, { $($argument:ident $(: $value:expr)?,)* }) => {{
        let ([a, b], batches): ([Factor<'_>; 2], usize) = ($factors, $batches);
        match $kernel {
            Bf16Kernel::Mma(variant) => $i.step.launch(matmul_bf16 {
                variant,
                a: a.0,
                b: b.0,
                lda: a.2 as u32,
                ldb: b.2 as u32,
                stride_a: a.1[0] * a.2,
                stride_b: b.1[0] * b.2,
                $($argument $(: $value)?,)*
            }),
            Bf16Kernel::Wgmma(variant) => $i.step.launch(matmul_wgmma {
                variant,
                a: map(a, batches),
                b: map(b, batches),
                steps_a: 1,
                steps_b: 1,
                blocks: 2,
                $($argument $(: $value)?,)*
            }),
        }
    }};
}

/// Runs the case of a kernel for BF16 tensors: [`product`]s of its layout, as for [`mma_product`].
pub(super) fn bf16_product<S: Stored>(i: &Inputs<'_, '_>, kernel: Bf16Kernel) -> Result<()> {
    for &(batches, [m, n, k], k_per_split, flags, [alpha, beta]) in kernel.products(i) {
        let Some(layout) = kernel.layout(flags).filter(|_| exists::<S>(flags)) else { continue };
        let flags = flags & !(TRANSPOSE_A | TRANSPOSE_B) | layout;
        let stored = |is_transposed: bool, [rows, cols]: [usize; 2]| {
            let [rows, cols] = if is_transposed { [cols, rows] } else { [rows, cols] };
            ([rows, cols], kernel.row(cols))
        };
        let ((of_a, lda), (of_b, ldb)) =
            (stored(flags & TRANSPOSE_A != 0, [m, k]), stored(flags & TRANSPOSE_B != 0, [k, n]));
        let (a, b) = (i.factors::<bf16>(batches * of_a[0] * lda)?, i.factors::<bf16>(batches * of_b[0] * ldb)?);
        let bias = if i.size == CaseSize::Whole { i.whole(batches * n)? } else { i.normals([batches * n])? };
        let length = batches * k.div_ceil(k_per_split).max(1) * m * n;
        let mut out = i.normals::<S>([length])?;
        let mut pre = i.normals::<S>([length])?;
        let (c, written) = out.in_place();
        launch_bf16!(i, kernel, [(a.slice(), of_a, lda), (b.slice(), of_b, ldb)], batches, {
            bias: unless_split(k_per_split < k, &bias),
            c,
            out: written,
            pre: pre.out(),
            sums: PointerMut::empty(),
            extents: extents(batches, [m, n, k], k_per_split),
            epilogue: epilogue([m, n], [alpha, beta], flags),
        })?;
        keep_outputs(i, flags, &out, &pre)?;
    }
    let sums_b = match kernel {
        Bf16Kernel::Mma((of_a, _)) => of_a == OperandLayout::Transposed,
        Bf16Kernel::Wgmma((layouts, _)) => layouts == [OperandLayout::Transposed, OperandLayout::Plain],
    };
    if size_of::<S>() == size_of::<f32>() && sums_b { column_sums(i, kernel) } else { Ok(()) }
}

/// Runs the sums of B's columns. It covers a tile's second row of blocks, which computes none,
/// operands that do and do not fill stages, batches and splits. The products have inexact sums,
/// which each GPU adds in its own order, so they are not kept.
fn column_sums(i: &Inputs<'_, '_>, kernel: Bf16Kernel) -> Result<()> {
    const WHOLE: [Product; 4] = [
        (1, [129, 300, 101], ALL, BIAS_GRAD, [1.0, 0.0]),
        (2, [8, 264, 168], ALL, BIAS_GRAD | ADD_TO_SUMS, [1.0, 0.0]),
        (1, [256, 512, 328], ALL, BIAS_GRAD, [1.0, 0.0]),
        (1, [128, 256, 680], 256, BIAS_GRAD, [1.0, 0.0]),
    ];
    const SMALLEST: [Product; 3] = [
        (2, [9, 20, 41], ALL, BIAS_GRAD | ADD_TO_SUMS, [1.0, 0.0]),
        (1, [256, 256, 168], ALL, BIAS_GRAD, [1.0, 0.0]),
        (1, [4, 8, 80], 32, BIAS_GRAD, [1.0, 0.0]),
    ];
    for &(batches, [m, n, k], k_per_split, flags, [alpha, beta]) in i.by_size(&WHOLE[..], &SMALLEST) {
        let (lda, ldb) = (kernel.row(m), kernel.row(n));
        let (a, b) = (i.normals::<bf16>([batches, k, lda])?, i.normals::<bf16>([batches, k, ldb])?);
        let split_k = batches * k.div_ceil(k_per_split);
        let (mut out, mut sums) = (i.step.empty::<f32>([split_k, m, n])?, i.normals::<f32>([split_k, n])?);
        let (c, out) = out.in_place();
        launch_bf16!(i, kernel, [(a.slice(), [k, m], lda), (b.slice(), [k, n], ldb)], batches, {
            bias: Slice::empty(),
            c,
            out,
            pre: PointerMut::empty(),
            sums: sums.out(),
            extents: extents(batches, [m, n, k], k_per_split),
            epilogue: EpilogueForm { stride_c: m * n, stride_bias: 0, ldc: n as u32, alpha, beta, flags },
        })?;
        i.keep(&sums)?;
    }
    Ok(())
}

/// Runs the case of a kernel that rounds: operands in normal and transposed layout, with and
/// without tails, with special numbers among them.
pub(super) fn rounding(i: &Inputs<'_, '_>) -> Result<()> {
    i.squares(|i, x| {
        let [m, k] = x.shape().as_rows();
        for flags in [0, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A | TRANSPOSE_B] {
            let [(a, _), (b, _)] = round_factors(i, 1, [m, m, k], flags, [x, x])?;
            i.keep(&a)?;
            i.keep(&b)?;
        }
        Ok(())
    })
}

/// Rounds both operands of a matmul, A `[m, k]` and B `[n, k]` or each transposed, to fragments,
/// and returns these with their strides.
fn round_factors<'s>(
    i: &Inputs<'_, 's>,
    batches: usize,
    [m, n, k]: [usize; 3],
    flags: u32,
    [a, b]: [&Tensor<'s>; 2],
) -> Result<[(Tensor<'s, u32>, usize); 2]> {
    let [stride_a, stride_b] = [[m, k], [n, k]].map(fragments);
    let (mut a_out, mut b_out) = (i.step.empty([batches, stride_a])?, i.step.empty([batches, stride_b])?);
    i.step.launch(round_to_tf32::of([
        factors(a.slice(), Side::Left, a_out.out(), batches, [m, k], flags & TRANSPOSE_A != 0),
        factors(b.slice(), Side::Right, b_out.out(), batches, [n, k], flags & TRANSPOSE_B == 0),
        Rounding::default(),
    ]))?;
    Ok([(a_out, stride_a), (b_out, stride_b)])
}

/// Describes the operands to be rounded, `batches` of `[rows, k]` or transposed.
fn factors<'a>(
    values: Slice<'a, f32>,
    side: Side,
    out: PointerMut<'a, u32>,
    batches: usize,
    [rows, k]: [usize; 2],
    transposed: bool,
) -> Rounding<'a> {
    let wanted = Some((side, out));
    let packed = Rounding { values: Some(values), batches, stride: rows * k, ..Rounding::default() };
    if transposed {
        Rounding { rows: k, cols: rows, ld: rows, across: wanted, ..packed }
    } else {
        Rounding { rows, cols: k, ld: k, along: wanted, ..packed }
    }
}

/// Returns true if kernels that store S have this epilogue.
fn exists<S: Stored>(flags: u32) -> bool {
    flags & GELU_DERIVATIVE == 0 || <S as Element>::NAME == <bf16 as Element>::NAME
}

/// Runs the case of [`sum_splits`]: split-K matmuls, or in the smallest size only the kernel
/// itself.
pub(super) fn splits<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    if i.size == CaseSize::Smallest || <S as Element>::NAME != <f32 as Element>::NAME {
        return [
            ([3, 260], 9, GELU | STORE_PREACT, [1.0, 0.5]),
            ([2, 5], 2, SWIGLU | STORE_PREACT, [0.3, 0.0]),
            ([3, 261], 2, GELU_DERIVATIVE | STORE_PREACT, [0.3, 0.0]),
        ]
        .into_iter()
        .filter(|(_, _, flags, _)| exists::<S>(*flags))
        .try_for_each(|(extents, split_k, flags, scales)| splits_alone::<S>(i, extents, split_k, flags, scales));
    }
    for ([m, n, k], beta) in [([12, 256, 1024], 0.0), ([35, 33, 700], 0.5), ([1, 2, 65_601], 1.0)] {
        let (a, b, bias, mut out) =
            (i.normals::<f32>([m, k])?, i.normals([k, n])?, i.normals([n])?, i.normals::<f32>([m, n])?);
        let gemm = ops::Gemm { beta, ..ops::Gemm::new(m, n, k) };
        ops::gemm_into(i.step, &gemm, &a, &b, Some(&bias), &mut out)?;
        i.keep(&out)?;
    }
    Ok(())
}

/// Runs [`sum_splits`] on partials that no kernel has made.
fn splits_alone<S: Stored>(
    i: &Inputs<'_, '_>,
    [m, n]: [usize; 2],
    split_k: usize,
    flags: u32,
    [alpha, beta]: [f32; 2],
) -> Result<()> {
    let (partials, bias) = (i.normals([split_k, m, n])?, i.normals([n])?);
    let (mut out, mut pre) = (i.normals::<S>([m, n])?, i.normals::<S>([m, n])?);
    let (c, written) = out.in_place();
    i.step.launch(sum_splits {
        partials: partials.slice(),
        bias: bias.slice(),
        c,
        out: written,
        pre: pre.out(),
        extents: extents(1, [m, n, split_k], 1),
        epilogue: epilogue([m, n], [alpha, beta], flags),
    })?;
    i.keep(&out)?;
    i.keep(&pre)
}
