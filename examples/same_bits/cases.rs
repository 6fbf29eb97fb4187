//! One case for each kernel: seeded inputs of several shapes, special numbers among them, and the kernel's results.
//!
//! Invariant: the results depend on the case alone, not on the device, the run or the other cases. Inputs are made
//! by integers and IEEE 754 additions and multiplications alone, so they have the same bits everywhere. That every kernel has
//! its case is tested in `tests/kernels/same_bits.rs`.

use crate::support::{Random, SPECIAL, sample};
use cuda_std::launch::{PointerMut, Slice};
use kernels::checksum::{CHUNK, checksum};
use kernels::format::{Bf16, Tf32};
use kernels::guard::{guard_check, guard_write};
use kernels::matmul::{GELU, KEEP, TRANSPOSE_A, TRANSPOSE_B};
use kernels::matmul::{matmul_16x16, matmul_32x32, matmul_32x64, matmul_64x128, matmul_128x256};
use kernels::matmul_tensor::{matmul_bf16_64x64, matmul_bf16_64x128, matmul_bf16_128x128, matmul_bf16_128x256};
use kernels::matmul_tensor::{matmul_tf32_64x64, matmul_tf32_64x128, matmul_tf32_128x128, matmul_tf32_128x256};
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_bf16, round_to_tf32};
use kernels::scalars;
use std::cell::RefCell;
use stepscope::{Arena, Buffer, Capacity, Device, Eager, Element, Result, Shape, Source, Target, Tensor, ops};

/// Runs a kernel and keeps its results.
pub(crate) type Case = for<'s> fn(&Inputs<'_, 's>) -> Result<()>;

/// Launches a multiply of packed matrices and keeps what it leaves; `$factors`: how they lie.
macro_rules! launch_matmul {
    ($i:ident, $kernel:ident, $batches:expr, [$m:expr, $n:expr, $k:expr], { $($factors:tt)* }, $beta:expr, $flags:expr,
        $a:ident, $b:ident, $bias:ident, $out:ident, $pre:ident) => {{
        let (c, written) = $out.in_place();
        $i.step.launch($kernel {
            a: $a.slice(),
            b: $b.slice(),
            bias: $bias.slice(),
            c,
            out: written,
            pre: $pre.out(),
            m: $m as u32,
            n: $n as u32,
            k: $k as u32,
            ldc: $n as u32,
            chunk: $k as u32,
            batches: $batches as u32,
            $($factors)*
            stride_c: $m * $n,
            stride_bias: $n,
            beta: $beta,
            flags: $flags,
        })?;
        $i.keep(&$out)?;
        $i.keep(&$pre)?;
    }};
}

/// The case of a tile: products with and without tails, each way to store and to end them. The tiles give the same bits.
macro_rules! matmul {
    ($inputs:ident, $kernel:ident) => {{
        let i: &Inputs<'_, '_> = $inputs;
        for (batches, [m, n, k], flags, beta) in [
            (1, [1, 1, 1], 0, 0.0),
            (1, [64, 64, 64], TRANSPOSE_A, 1.0),
            (3, [129, 65, 17], TRANSPOSE_A | TRANSPOSE_B, 0.0),
            (1, [12, 256, 193], TRANSPOSE_B | GELU, 0.0),
            (1, [150, 193, 257], GELU | KEEP, 0.5),
        ] {
            let (a, b, bias) = (i.normals([batches, m, k])?, i.normals([batches, k, n])?, i.normals([batches, n])?);
            let (mut out, mut pre) = (i.normals([batches, m, n])?, i.normals([batches, m, n])?);
            let lda = if flags & TRANSPOSE_A == 0 { k } else { m } as u32;
            let ldb = if flags & TRANSPOSE_B == 0 { n } else { k } as u32;
            launch_matmul!(i, $kernel, batches, [m, n, k], { lda, ldb, stride_a: m * k, stride_b: k * n, }, beta,
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
        $inputs.rows(|i, x| {
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
/// sums, which is each GPU's own, then changes nothing.
macro_rules! matmul_tensor {
    ($inputs:ident, $kernel:ident, $round:ident, $format:ident) => {{
        let i: &Inputs<'_, '_> = $inputs;
        for (batches, [m, n, k], flags, beta) in [
            (1, [1, 8, 8], 0, 0.0),
            (1, [64, 64, 64], 0, 1.0),
            (3, [136, 72, 24], 0, 0.0),
            (1, [12, 256, 192], GELU, 0.0),
            (1, [150, 272, 264], GELU | KEEP, 0.5),
        ] {
            let (a, b) = (i.whole(batches * m * k)?, i.whole(batches * k * n)?);
            let ((a, stride_a), (b, stride_b)) = round_factors!(i, $round, $format, batches, [m, n, k], TRANSPOSE_B, a, b);
            let (bias, mut out) = (i.whole(batches * n)?, i.whole(batches * m * n)?);
            let mut pre = i.step.upload(&i.step.read(&out)?, [batches * m * n])?;
            launch_matmul!(i, $kernel, batches, [m, n, k], { stride_a, stride_b, }, beta, flags, a, b, bias, out, pre);
        }
        Ok(())
    }};
}

/// Every kernel, by its name, in the order of the files that they are in.
pub(crate) const CASES: [(&str, Case); 53] = [
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
    ("adamw", |i| [1, 1023, 70_003].into_iter().try_for_each(|length| adamw(i, length))),
    ("adamw_groups", |i| [1, 1023, 70_003].into_iter().try_for_each(|length| adamw_groups(i, length))),
    ("attention_forward", |i| {
        i.heads(|i, qkv, gains, _| {
            let ops::Attention { out, kept } = ops::attention(i.step, qkv, gains, 1e-6, 0.125)?;
            [out.save(), kept.probabilities, kept.inverse_rms].iter().try_for_each(|result| i.keep(result))
        })
    }),
    ("attention_backward", |i| {
        i.heads(|i, qkv, gains, dout| {
            let (kept, mut dgains) = (ops::attention(i.step, qkv, gains, 1e-6, 0.125)?.kept, i.normals([2, 64])?);
            let dqkv = ops::attention_backward(i.step, qkv, gains, &kept, dout, 0.125, &mut dgains, true)?;
            i.keep(&dqkv)?;
            i.keep(&dgains)
        })
    }),
    ("checksum", |i| {
        let words: Vec<u32> = i.random.borrow_mut().normals(3 * CHUNK + 5).into_iter().map(f32::to_bits).collect();
        let (x, mut sums) = (i.step.upload(&words, [words.len()])?, i.step.upload(&[0u32; 8], [8])?);
        i.step.launch(checksum { x: x.slice(), out: sums.out() })?;
        i.keep(&sums)
    }),
    ("clip_factor", |i| {
        i.flat(|i, [x, _]| {
            let norm = ops::squared_norm(i.step, x)?;
            [0.0, 0.1, 1e3].into_iter().try_for_each(|most| i.keep(&ops::clip_factor(i.step, &norm, most)?))
        })
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
    ("fill", |i| [1, 1025, 4099].into_iter().try_for_each(|length| i.keep(&ops::fill(i.step, [length], 0.1)?))),
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
    ("sum_columns", |i| i.rows(|i, x| i.keep(&ops::sum_columns(i.step, x)?))),
    ("sum_rows", |i| i.rows(|i, x| i.keep(&ops::sum_rows(i.step, x)?))),
    ("sum_all", |i| i.long(|i, x| i.keep(&ops::sum(i.step, x)?))),
    ("squared_norm", |i| i.long(|i, x| i.keep(&ops::squared_norm(i.step, x)?))),
    ("max_all", |i| i.long(|i, x| i.keep(&ops::max(i.step, x)?))),
    ("max_columns", |i| i.rows(|i, x| i.keep(&ops::max_columns(i.step, x)?))),
    ("argmax_columns", |i| i.rows(|i, x| i.keep(&ops::argmax_columns(i.step, x)?))),
    ("scalars", |i| {
        (scalars::EXP..=scalars::RSQRT).try_for_each(|function| {
            let length = (1 << 17) + 3;
            let mut y = i.step.empty([length])?;
            i.step.launch(scalars::scalars { y: y.out(), length, function, first: 0x8000_0001, stride: 32_749 })?;
            i.keep(&y)
        })
    }),
    ("sgd", |i| [1, 1023, 70_003].into_iter().try_for_each(|length| sgd(i, length))),
    ("sgd_groups", |i| [1, 1023, 70_003].into_iter().try_for_each(|length| sgd_groups(i, length))),
    ("softmax_forward", |i| i.rows(|i, x| i.keep(&ops::softmax(i.step, x)?))),
    ("softmax_backward", |i| i.rows(|i, y| i.keep(&ops::softmax_backward(i.step, y, &i.normals(y.shape())?)?))),
    ("mean_tokens_forward", |i| i.tokens(|i, shape| i.keep(&ops::mean_tokens(i.step, &i.normals(shape)?)?))),
    ("mean_tokens_backward", |i| {
        i.tokens(|i, [samples, tokens, cols]| {
            i.keep(&ops::mean_tokens_backward(i.step, &i.normals([samples, cols])?, [samples, tokens, cols])?)
        })
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

/// Seeded inputs of one case, and what its kernel gave.
pub(crate) struct Inputs<'i, 's> {
    step: &'i Eager<'s>,
    random: RefCell<Random>,
    results: RefCell<Vec<Vec<u32>>>,
}

impl<'s> Inputs<'_, 's> {
    fn normals(&self, shape: impl Into<Shape>) -> Result<Tensor<'s>> {
        let shape = shape.into();
        self.step.upload(&self.random.borrow_mut().normals(shape.elements()), shape)
    }

    /// Whole numbers from -8 to 8.
    fn whole(&self, length: usize) -> Result<Tensor<'s>> {
        let below = self.random.borrow_mut().belows(length, 17);
        self.step.upload(&below.into_iter().map(|below| below as f32 - 8.0).collect::<Vec<_>>(), [length])
    }

    /// A group below `count` for each run of a flat region.
    fn groups(&self, length: usize, count: u32) -> Result<Tensor<'s, u32>> {
        let runs = length.div_ceil(kernels::update::RUN);
        self.step.upload(&self.random.borrow_mut().belows(runs, count), [runs])
    }

    /// A gain for the norm of `x`.
    fn gain(&self, x: &Tensor<'s>) -> Result<Tensor<'s>> {
        self.normals([x.shape().as_rows()[1]])
    }

    /// A class for each row of `logits`, one beyond the last among them: a row that makes the loss NaN. Of a buffer's content the op
    /// knows nothing; uploaded, such a label is an error.
    fn labels(&self, logits: &Tensor<'s>) -> Result<Buffer<u32>> {
        let [rows, classes] = logits.shape().as_rows();
        Buffer::from_slice(self.step.device(), &self.random.borrow_mut().belows(rows, classes as u32 + 1))
    }

    /// The op on two arrays: of all magnitudes and what is not a number, then of several lengths.
    fn flat(&self, op: impl Fn(&Self, &[Tensor<'s>; 2]) -> Result<()>) -> Result<()> {
        let dense = |seed| {
            let values = sample(seed, -12.5, 10.0);
            self.step.upload(&values, [values.len()])
        };
        op(self, &[dense(1)?, dense(2)?])?;
        for length in [1, 5, 1023, 4097] {
            op(self, &[self.normals([length])?, self.normals([length])?])?;
        }
        Ok(())
    }

    /// The op on arrays shorter than, as long as and longer than what a block reduces.
    fn long(&self, op: impl Fn(&Self, &Tensor<'s>) -> Result<()>) -> Result<()> {
        [1, 5, 4096, 4096 * 70 + 3].into_iter().try_for_each(|length| op(self, &self.normals([length])?))
    }

    /// The op on rows of several lengths, then on rows of which most hold one special number each.
    fn rows(&self, op: impl Fn(&Self, &Tensor<'s>) -> Result<()>) -> Result<()> {
        for shape in [[300, 3], [65, 64], [12, 193], [129, 256], [4100, 5], [2, 20_001]] {
            op(self, &self.normals(shape)?)?;
        }
        let [rows, cols] = [SPECIAL.len() + 3, 193];
        let mut values = self.random.borrow_mut().normals(rows * cols);
        for (row, special) in SPECIAL.into_iter().enumerate() {
            values[row * cols + row] = special;
        }
        op(self, &self.step.upload(&values, [rows, cols])?)
    }

    /// Attention on q, k and v, gains, and a gradient of the output.
    fn heads(&self, op: impl Fn(&Self, &Tensor<'s>, &Tensor<'s>, &Tensor<'s>) -> Result<()>) -> Result<()> {
        for [samples, tokens, width] in [[4, 12, 256], [3, 16, 128], [2, 1, 64]] {
            let qkv = self.normals([3, samples, tokens, width])?;
            op(self, &qkv, &self.normals([2, 64])?, &self.normals([samples, tokens, width])?)?;
        }
        Ok(())
    }

    /// The op on shapes of `[samples, tokens, cols]`.
    fn tokens(&self, op: impl Fn(&Self, [usize; 3]) -> Result<()>) -> Result<()> {
        [[33, 12, 67], [256, 12, 256], [1, 1, 1]].into_iter().try_for_each(|shape| op(self, shape))
    }

    /// A result: its bits count, but a NaN's.
    fn keep<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<()> {
        let values = self.step.read(tensor)?;
        let mut words = bytemuck::cast_slice::<T, u32>(&values).to_vec();
        if T::NAME == f32::NAME {
            for word in words.iter_mut().filter(|word| f32::from_bits(**word).is_nan()) {
                *word = f32::NAN.to_bits();
            }
        }
        self.results.borrow_mut().push(words);
        Ok(())
    }
}

/// Runs a case in an arena of its own; the words of each result.
pub(crate) fn run(device: &Device, case: Case) -> Result<Vec<Vec<u32>>> {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build()?;
    arena.step(|step| {
        let inputs = Inputs { step, random: Random::new(17).into(), results: RefCell::default() };
        case(&inputs)?;
        Ok(inputs.results.into_inner())
    })
}
