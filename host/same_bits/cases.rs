//! One case for each kernel, and which kernels are looked at first.
//!
//! Invariant: the results depend on the case and its form alone, not on the device, the run or the other cases. A case of the
//! smallest form launches other kernels than its own only where their cases stand before it in [`in_order`]. Both, and that every
//! kernel has its case, is tested in `tests/kernels/same_bits.rs`.

#![forbid(unsafe_code)]

use super::Form;
use super::inputs::Inputs;
use crate::error::Result;
use crate::ops;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::checksum::{CHUNK, checksum};
use kernels::format::{Bf16, Tf32};
use kernels::guard::{guard_check, guard_write};
use kernels::matmul::{GELU, KEEP, TRANSPOSE_A, TRANSPOSE_B, sum_splits};
use kernels::matmul::{matmul_16x16, matmul_32x32, matmul_32x64, matmul_64x128, matmul_128x256};
use kernels::matmul_tensor::{matmul_bf16_64x64, matmul_bf16_64x128, matmul_bf16_128x128, matmul_bf16_128x256};
use kernels::matmul_tensor::{matmul_tf32_64x64, matmul_tf32_64x128, matmul_tf32_128x128, matmul_tf32_128x256};
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_bf16, round_to_tf32};
use kernels::{reduce, scalars};

/// Runs a kernel and keeps its results.
pub type Case = for<'s> fn(&Inputs<'_, 's>) -> Result<()>;

/// The kernels that other cases and uploads use: what is wrong with one of them must be found by its own case.
const FIRST: [&str; 10] = [
    "guard_write",
    "guard_check",
    "checksum",
    "fill",
    "copy",
    "sum_all",
    "sum_rows",
    "squared_norm",
    "round_to_tf32",
    "round_to_bf16",
];

/// [`CASES`], those of the kernels that others use first.
pub fn in_order() -> impl Iterator<Item = (&'static str, Case)> {
    let is_first = |name: &&str| FIRST.contains(name);
    let first = FIRST.iter().filter_map(|name| CASES.into_iter().find(|case| case.0 == *name));
    first.chain(CASES.into_iter().filter(move |(name, _)| !is_first(name)))
}

/// A multiply: batches, `[m, n, k]`, how much of k is a chunk, flags and beta.
type Product = (usize, [usize; 3], usize, u32, f32);

/// A chunk that is all of k.
const ALL: usize = usize::MAX;

/// Products with and without tails, each way to store and to end them.
const PRODUCTS: [Product; 5] = [
    (1, [1, 1, 1], ALL, 0, 0.0),
    (1, [64, 64, 64], ALL, TRANSPOSE_A, 1.0),
    (3, [129, 65, 17], ALL, TRANSPOSE_A | TRANSPOSE_B, 0.0),
    (1, [12, 256, 193], ALL, TRANSPOSE_B | GELU, 0.0),
    (1, [150, 193, 257], ALL, GELU | KEEP, 0.5),
];

/// Four blocks of the largest tile, and enough of GELU: fusing changes one result in some hundreds; copies by vectors and by elements
/// along both axes, whole stages and cut ones; chunks of which the first has two chains.
const SMALLEST_PRODUCTS: [Product; 5] = [
    (1, [129, 257, 5], ALL, GELU, 0.0),
    (2, [8, 12, 68], ALL, TRANSPOSE_A, 1.0),
    (1, [12, 20, 70], ALL, TRANSPOSE_B | GELU, 0.0),
    (1, [5, 9, 67], ALL, TRANSPOSE_A | GELU | KEEP, 0.5),
    (1, [2, 3, 1100], 1088, 0, 0.0),
];

/// The same for matrix instructions, which have no transposes.
const TENSOR_PRODUCTS: [Product; 5] = [
    (1, [1, 8, 8], ALL, 0, 0.0),
    (1, [64, 64, 64], ALL, 0, 1.0),
    (3, [136, 72, 24], ALL, 0, 0.0),
    (1, [12, 256, 192], ALL, GELU, 0.0),
    (1, [150, 272, 264], ALL, GELU | KEEP, 0.5),
];

/// Four blocks of the largest tile, and enough of GELU; vectors and elements, stages of the ring more than once, and chunks.
const SMALLEST_TENSOR_PRODUCTS: [Product; 4] = [
    (1, [129, 257, 24], ALL, GELU, 0.0),
    (2, [12, 24, 168], ALL, GELU | KEEP, 0.5),
    (1, [3, 7, 8], ALL, GELU, 0.0),
    (1, [4, 8, 80], 32, 0, 0.0),
];

/// Launches a multiply of packed matrices and keeps what it leaves; `$factors`: how they lie.
macro_rules! launch_matmul {
    ($i:ident, $kernel:ident, $batches:expr, [$m:expr, $n:expr, $k:expr], { $($factors:tt)* }, $chunk:expr, $beta:expr,
        $flags:expr, $a:ident, $b:ident, $bias:ident, $out:ident, $pre:ident) => {{
        // Nothing may follow the sum of a chunk.
        let bias = if $chunk < $k { Slice::empty() } else { $bias.slice() };
        let (c, written) = $out.in_place();
        $i.step.launch($kernel {
            a: $a.slice(),
            b: $b.slice(),
            bias,
            c,
            out: written,
            pre: $pre.out(),
            m: $m as u32,
            n: $n as u32,
            k: $k as u32,
            ldc: $n as u32,
            chunk: $chunk.min($k) as u32,
            batches: $batches as u32,
            $($factors)*
            stride_c: $m * $n,
            stride_bias: $n,
            beta: $beta,
            flags: $flags,
        })?;
        $i.keep(&$out)?;
        if $flags & KEEP != 0 || $i.form == Form::Whole {
            $i.keep(&$pre)?;
        }
    }};
}

/// The case of a tile. The tiles give the same bits.
macro_rules! matmul {
    ($inputs:ident, $kernel:ident) => {{
        let i: &Inputs<'_, '_> = $inputs;
        for &(batches, [m, n, k], chunk, flags, beta) in i.by_form(&PRODUCTS[..], &SMALLEST_PRODUCTS) {
            let (a, b, bias) = (i.normals([batches, m, k])?, i.normals([batches, k, n])?, i.normals([batches, n])?);
            let shape = [batches * k.div_ceil(chunk), m, n];
            let mut out = i.output(beta, shape, || i.normals(shape))?;
            let mut pre = i.output(0.0, shape, || i.normals(shape))?;
            let lda = if flags & TRANSPOSE_A == 0 { k } else { m } as u32;
            let ldb = if flags & TRANSPOSE_B == 0 { n } else { k } as u32;
            launch_matmul!(i, $kernel, batches, [m, n, k], { lda, ldb, stride_a: m * k, stride_b: k * n, }, chunk, beta,
                flags, a, b, bias, out, pre);
        }
        Ok(())
    }};
}

/// Both factors of a multiply, A `[m, k]` and B `[n, k]` or each transposed, as fragments; and their strides.
macro_rules! round_factors {
    ($i:ident, $kernel:ident, $format:ident, $batches:expr, [$m:expr, $n:expr, $k:expr], $flags:expr, $a:ident, $b:ident) => {{
        let [stride_a, stride_b] = [[$m, $k], [$n, $k]].map(fragments::<$format>);
        let (mut a_out, mut b_out) = ($i.step.empty([$batches, stride_a])?, $i.step.empty([$batches, stride_b])?);
        $i.step.launch($kernel::of([
            factors($a.slice(), Side::Left, a_out.out(), $batches, [$m, $k], $flags & TRANSPOSE_A != 0),
            factors($b.slice(), Side::Right, b_out.out(), $batches, [$n, $k], $flags & TRANSPOSE_B == 0),
            Rounding::default(),
        ]))?;
        ((a_out, stride_a), (b_out, stride_b))
    }};
}

/// The case of a kernel that rounds: factors as they lie and transposed, with and without tails, special numbers among them.
macro_rules! rounded {
    ($inputs:ident, $kernel:ident, $format:ident) => {
        $inputs.squares(|i, x| {
            let [m, k] = x.shape().as_rows();
            for flags in [0, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A | TRANSPOSE_B] {
                let ((a, _), (b, _)) = round_factors!(i, $kernel, $format, 1, [m, m, k], flags, x, x);
                i.keep(&a)?;
                i.keep(&b)?;
            }
            Ok(())
        })
    };
}

/// The case of a tile of matrix instructions: [`matmul`], on whole numbers so small that every sum is exact. The order of
/// sums, which is each GPU's own, then changes nothing. The smallest form has a bias between whole numbers, so that GELU does not see
/// them alone.
macro_rules! matmul_tensor {
    ($inputs:ident, $kernel:ident, $round:ident, $format:ident) => {{
        let i: &Inputs<'_, '_> = $inputs;
        for &(batches, [m, n, k], chunk, flags, beta) in i.by_form(&TENSOR_PRODUCTS[..], &SMALLEST_TENSOR_PRODUCTS) {
            let (a, b) = (i.whole(batches * m * k)?, i.whole(batches * k * n)?);
            let ((a, stride_a), (b, stride_b)) = round_factors!(i, $round, $format, batches, [m, n, k], TRANSPOSE_B, a, b);
            let bias = if i.form == Form::Whole { i.whole(batches * n)? } else { i.normals([batches * n])? };
            let length = batches * k.div_ceil(chunk) * m * n;
            let mut out = i.output(beta, [length], || i.whole(length))?;
            let mut pre = i.output(0.0, [length], || i.step.upload(&i.step.read(&out)?, [length]))?;
            launch_matmul!(i, $kernel, batches, [m, n, k], { stride_a, stride_b, }, chunk, beta, flags, a, b, bias, out, pre);
        }
        Ok(())
    }};
}

/// Every kernel, by its name, in the order of the files that they are in.
pub const CASES: [(&str, Case); 54] = [
    ("tanh_forward", |i| i.flat(|i, [x, _]| i.keep(&ops::tanh(i.step, x)?))),
    ("tanh_backward", |i| i.flat(|i, [y, dy]| i.keep(&ops::tanh_backward(i.step, y, dy)?))),
    ("gelu_forward", |i| i.flat(|i, [x, _]| i.keep(&ops::gelu(i.step, x)?))),
    ("gelu_backward", |i| i.flat(|i, [x, dy]| i.keep(&ops::gelu_backward(i.step, x, dy)?))),
    ("gelu_bias_backward", |i| {
        i.rows(|i, x| {
            let (dy, mut db) = (i.normals(x.shape())?, i.gain(x)?);
            i.keep(&ops::gelu_bias_backward(i.step, x, &dy, &mut db, true)?)?;
            i.keep(&db)
        })
    }),
    ("adamw", |i| i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| adamw(i, length))),
    ("adamw_groups", |i| {
        i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| adamw_groups(i, length))
    }),
    ("attention_forward", |i| {
        i.heads(|i, qkv, gains, _| {
            let ops::Attention { out, kept } = ops::attention(i.step, qkv, gains, 1e-6, i.attention_scale())?;
            [out.save(), kept.probabilities, kept.inverse_rms].iter().try_for_each(|result| i.keep(result))
        })
    }),
    ("attention_backward", |i| {
        i.heads(|i, qkv, gains, dout| {
            let (scale, mut dgains) = (i.attention_scale(), i.normals([2, 64])?);
            let kept = ops::attention(i.step, qkv, gains, 1e-6, scale)?.kept;
            let dqkv = ops::attention_backward(i.step, qkv, gains, &kept, dout, scale, &mut dgains, true)?;
            i.keep(&dqkv)?;
            i.keep(&dgains)
        })
    }),
    ("checksum", |i| {
        let chunks = i.by_form(3, 1);
        let words =
            i.random.borrow_mut().normals(chunks * CHUNK + 5).into_iter().map(f32::to_bits).collect::<Vec<u32>>();
        let (x, mut sums) =
            (i.step.upload(&words, [words.len()])?, i.step.upload(&vec![0u32; 2 * chunks + 2], [2 * chunks + 2])?);
        i.step.launch(checksum { x: x.slice(), out: sums.out() })?;
        i.keep(&sums)
    }),
    ("clip_factor", |i| {
        // Whole, norms that are not a number too.
        if i.by_form(true, false) { i.flat(|i, [x, _]| clip_factors(i, x)) } else { i.long(|i, x| clip_factors(i, x)) }
    }),
    ("add", |i| i.flat(|i, [a, b]| i.keep(&ops::add(i.step, a, b)?))),
    ("add_assign", |i| {
        i.flat(|i, [a, b]| {
            let mut out = ops::copy(i.step, a)?;
            ops::add_assign(i.step, &mut out, b)?;
            i.keep(&out)
        })
    }),
    ("scale", |i| i.flat(|i, [x, _]| i.keep(&ops::scale(i.step, x, 0.1)?))),
    ("scale_by", |i| i.flat(|i, [x, _]| i.keep(&ops::scale_by(i.step, x, &i.normals([1])?)?))),
    ("add_bias", |i| {
        i.rows(|i, x| {
            let bias = i.normals([x.shape().as_rows()[1]])?;
            i.keep(&ops::add_bias(i.step, x, &bias)?)
        })
    }),
    ("fill", |i| {
        let lengths = i.by_form(&[1, 1025, 4099][..], &[1027]);
        lengths.iter().try_for_each(|&length| i.keep(&ops::fill(i.step, [length], 0.1)?))
    }),
    ("copy", |i| i.flat(|i, [x, _]| i.keep(&ops::copy(i.step, x)?))),
    ("guard_write", |i| {
        let mut block = i.step.upload(&[7; 200], [200])?;
        i.step.launch(guard_write { block: block.out(), length: 200, start: 101 })?;
        i.keep(&block)
    }),
    ("guard_check", |i| {
        let words: Vec<u32> = (0..200).map(|at| if at == 150 { 7 } else { kernels::guard::PATTERN }).collect();
        let (block, mut found) = (i.step.upload(&words, [200])?, i.step.upload(&[0; 3], [3])?);
        for (place, start) in [100, 151, 200].into_iter().enumerate() {
            i.step.launch(guard_check { block: block.slice(), start, place, found: found.out() })?;
        }
        i.keep(&found)
    }),
    ("cross_entropy", |i| {
        i.rows(|i, logits| {
            let labels = i.labels(logits)?;
            let labels = i.step.lend(&labels, [labels.len()])?;
            let (loss, dlogits) = ops::cross_entropy(i.step, logits, &labels, 0.1)?;
            i.keep(&loss)?;
            i.keep(&dlogits)
        })
    }),
    ("matmul_16x16", |i| matmul!(i, matmul_16x16)),
    ("matmul_32x32", |i| matmul!(i, matmul_32x32)),
    ("matmul_32x64", |i| matmul!(i, matmul_32x64)),
    ("matmul_64x128", |i| matmul!(i, matmul_64x128)),
    ("matmul_128x256", |i| matmul!(i, matmul_128x256)),
    ("sum_splits", |i| {
        if i.form == Form::Smallest {
            return [([3, 260], 9, GELU | KEEP, 0.5), ([2, 5], 2, 0, 0.0)]
                .into_iter()
                .try_for_each(|(extents, splits, flags, beta)| splits_alone(i, extents, splits, flags, beta));
        }
        for ([m, n, k], beta) in [([12, 256, 1024], 0.0), ([35, 33, 700], 0.5), ([1, 2, 65_601], 1.0)] {
            let (a, b, bias, mut out) = (i.normals([m, k])?, i.normals([k, n])?, i.normals([n])?, i.normals([m, n])?);
            let form = ops::Gemm { beta, ..ops::Gemm::new(m, n, k) };
            ops::gemm_into(i.step, &form, &a, &b, Some(&bias), &mut out)?;
            i.keep(&out)?;
        }
        Ok(())
    }),
    ("matmul_tf32_64x64", |i| matmul_tensor!(i, matmul_tf32_64x64, round_to_tf32, Tf32)),
    ("matmul_tf32_64x128", |i| matmul_tensor!(i, matmul_tf32_64x128, round_to_tf32, Tf32)),
    ("matmul_tf32_128x128", |i| matmul_tensor!(i, matmul_tf32_128x128, round_to_tf32, Tf32)),
    ("matmul_tf32_128x256", |i| matmul_tensor!(i, matmul_tf32_128x256, round_to_tf32, Tf32)),
    ("matmul_bf16_64x64", |i| matmul_tensor!(i, matmul_bf16_64x64, round_to_bf16, Bf16)),
    ("matmul_bf16_64x128", |i| matmul_tensor!(i, matmul_bf16_64x128, round_to_bf16, Bf16)),
    ("matmul_bf16_128x128", |i| matmul_tensor!(i, matmul_bf16_128x128, round_to_bf16, Bf16)),
    ("matmul_bf16_128x256", |i| matmul_tensor!(i, matmul_bf16_128x256, round_to_bf16, Bf16)),
    ("rms_norm_forward", |i| {
        i.rows(|i, x| {
            let (y, scale) = ops::rms_norm(i.step, x, &i.gain(x)?, 1e-6)?;
            i.keep(&y)?;
            i.keep(&scale)
        })
    }),
    ("rms_norm_backward", |i| {
        i.rows(|i, x| {
            let (mut gain, dy, so_far) = (i.gain(x)?, i.normals(x.shape())?, i.normals(x.shape())?);
            let (_, scale) = ops::rms_norm(i.step, x, &gain, 1e-6)?;
            let weights = ops::copy(i.step, &gain)?;
            let dx = ops::rms_norm_backward(i.step, x, &weights, &scale, &dy, Some(so_far), &mut gain, true)?;
            i.keep(&dx)?;
            i.keep(&gain)
        })
    }),
    ("round_to_tf32", |i| rounded!(i, round_to_tf32, Tf32)),
    ("round_to_bf16", |i| rounded!(i, round_to_bf16, Bf16)),
    ("sum_columns", |i| {
        i.rows(|i, x| {
            let [rows, cols] = x.shape().as_rows();
            i.sums(
                rows,
                || ops::sum_columns(i.step, x),
                |scale, accumulate, out| {
                    i.step.launch(reduce::sum_columns { x: x.slice(), cols, scale, accumulate, out })
                },
            )
        })
    }),
    ("sum_rows", |i| {
        i.rows(|i, x| {
            let ([rows, cols], chunk) = (x.shape().as_rows(), 128);
            i.sums(
                rows.div_ceil(chunk) * cols,
                || ops::sum_rows(i.step, x),
                |scale, accumulate, out| {
                    i.step.launch(reduce::sum_rows { x: x.slice(), cols, chunk, scale, accumulate, out })
                },
            )
        })
    }),
    ("sum_all", |i| {
        i.long(|i, x| {
            let blocks = x.shape().elements().div_ceil(kernels::block::CHUNK);
            i.sums(
                blocks,
                || ops::sum(i.step, x),
                |scale, accumulate, out| i.step.launch(reduce::sum_all { x: x.slice(), scale, accumulate, out }),
            )
        })
    }),
    ("squared_norm", |i| i.long(|i, x| i.keep(&ops::squared_norm(i.step, x)?))),
    ("max_all", |i| i.long(|i, x| i.keep(&ops::max(i.step, x)?))),
    ("max_columns", |i| i.rows(|i, x| i.keep(&ops::max_columns(i.step, x)?))),
    ("argmax_columns", |i| i.rows(|i, x| i.keep(&ops::argmax_columns(i.step, x)?))),
    ("scalars", |i| {
        (scalars::EXP..=scalars::RSQRT).try_for_each(|function| {
            // In the smallest form from 0.01 to 10, by turns of either sign.
            let (length, first, stride) =
                i.by_form(((1 << 17) + 3, 0x8000_0001, 32_749), (4099, 0x3c23_d70b, 0x8000_4fd9));
            let mut y = i.step.empty([length])?;
            i.step.launch(scalars::scalars { y: y.out(), length, function, first, stride })?;
            i.keep(&y)
        })
    }),
    ("sgd", |i| i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| sgd(i, length))),
    ("sgd_groups", |i| {
        i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| sgd_groups(i, length))
    }),
    ("softmax_forward", |i| i.rows(|i, x| i.keep(&ops::softmax(i.step, x)?))),
    ("softmax_backward", |i| i.rows(|i, y| i.keep(&ops::softmax_backward(i.step, y, &i.normals(y.shape())?)?))),
    ("mean_tokens_forward", |i| i.tokens(|i, shape| i.keep(&ops::mean_tokens(i.step, &i.normals(shape)?)?))),
    ("mean_tokens_backward", |i| {
        i.tokens(|i, [samples, tokens, cols]| {
            i.keep(&ops::mean_tokens_backward(i.step, &i.normals([samples, cols])?, [samples, tokens, cols])?)
        })
    }),
    ("transpose", |i| {
        i.rows(|i, x| i.keep(&ops::transpose(i.step, x)?))?;
        i.tokens(|i, shape| i.keep(&ops::transpose(i.step, &i.normals(shape)?)?))
    }),
];

/// Factors to be rounded, `batches` of `[rows, k]` or transposed.
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

fn adamw(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let (mut weights, gradients, mut first) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let mut second = i.step.upload(&i.random.borrow_mut().uniforms(length, 0.0, 2.0), [length])?;
    let hyper = i.step.upload(&[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0], [8])?;
    let norm = ops::squared_norm(i.step, &gradients)?;
    ops::adamw(i.step, &mut weights, &gradients, &mut first, &mut second, &hyper, &norm)?;
    [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))
}

/// [`sum_splits`] of partials that no kernel has made.
fn splits_alone(i: &Inputs<'_, '_>, [m, n]: [usize; 2], splits: usize, flags: u32, beta: f32) -> Result<()> {
    let (partials, bias) = (i.normals([splits, m, n])?, i.normals([n])?);
    let (mut out, mut pre) = (i.normals([m, n])?, i.normals([m, n])?);
    let (c, written) = out.in_place();
    i.step.launch(sum_splits {
        partials: partials.slice(),
        splits: splits as u32,
        bias: bias.slice(),
        c,
        out: written,
        pre: pre.out(),
        m: m as u32,
        n: n as u32,
        ldc: n as u32,
        batches: 1,
        stride_c: m * n,
        stride_bias: n,
        beta,
        flags,
    })?;
    i.keep(&out)?;
    i.keep(&pre)
}

fn clip_factors<'s>(i: &Inputs<'_, 's>, x: &Tensor<'s>) -> Result<()> {
    let norm = ops::squared_norm(i.step, x)?;
    [0.0, 0.1, 1e3].into_iter().try_for_each(|most| i.keep(&ops::clip_factor(i.step, &norm, most)?))
}

/// As [`adamw`], by three groups, one of them not clipped.
fn adamw_groups(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let (mut weights, gradients, mut first) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let mut second = i.step.upload(&i.random.borrow_mut().uniforms(length, 0.0, 2.0), [length])?;
    let hyper = [
        [1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0],
        [1e-3, 0.8, 0.99, 1e-6, 0.0, 0.36, 0.02, 0.0],
        [5e-2, 0.9, 0.999, 1e-8, 0.1, 0.19, 0.002, 2.0],
    ];
    let (hyper, groups) = (i.step.upload(hyper.as_flattened(), [3, 8])?, i.groups(length, 3)?);
    let norm = ops::squared_norm(i.step, &gradients)?;
    ops::adamw_groups(i.step, &mut weights, &gradients, &mut first, &mut second, &hyper, &groups, &norm)?;
    [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))
}

/// Both kinds of momentum, with and without clipping.
fn sgd(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    for hyper in [[1e-2, 0.9, 0.01, 1.0, 0.0], [1e-2, 0.5, 0.1, 0.0, 1.0]] {
        let (mut weights, gradients, mut velocity) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
        let (hyper, norm) = (i.step.upload(&hyper, [5])?, ops::squared_norm(i.step, &gradients)?);
        ops::sgd(i.step, &mut weights, &gradients, &mut velocity, &hyper, &norm)?;
        [&weights, &velocity].into_iter().try_for_each(|tensor| i.keep(tensor))?;
    }
    Ok(())
}

/// Groups of both kinds of momentum.
fn sgd_groups(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let (mut weights, gradients, mut velocity) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let hyper = [[1e-2, 0.9, 0.01, 1.0, 0.0], [1e-3, 0.5, 0.0, 0.0, 1.0]];
    let (hyper, groups) = (i.step.upload(hyper.as_flattened(), [2, 5])?, i.groups(length, 2)?);
    let norm = ops::squared_norm(i.step, &gradients)?;
    ops::sgd_groups(i.step, &mut weights, &gradients, &mut velocity, &hyper, &groups, &norm)?;
    [&weights, &velocity].into_iter().try_for_each(|tensor| i.keep(tensor))
}
