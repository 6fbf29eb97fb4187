//! One case for each kernel, and which kernels are looked at first.
//!
//! Invariant: the results depend on the case and its form alone, not on the device, the run or the other cases. A case of the
//! smallest form launches other kernels than its own only where their cases stand before it in [`in_order`]. Both, and that every
//! kernel has its case, is tested in `tests/kernels/same_bits.rs`.

#![forbid(unsafe_code)]

use super::inputs::Inputs;
use super::{attention, products};
use crate::error::Result;
use crate::ops;
use crate::tensor::{Element, Source, Stored, Target, Tensor};
use Listed::{Bf16Products, Both, FlashForward, FlashKeys, FlashQueries, One, Products, Roundings, TensorProducts};
use half::bf16;
use kernels::checksum::{CHUNK, checksum};
use kernels::flash_attention::{Shape, flash_forward, flash_keys, flash_queries};
use kernels::format::Reduced;
use kernels::guard::{PATTERN, guard_check, guard_write};
use kernels::matmul::{Tile, matmul};
use kernels::matmul_bf16::{Tile as Bf16Tile, matmul_bf16};
use kernels::matmul_tensor::{Tile as TensorTile, matmul_tensor};
use kernels::precision::round;
use kernels::{reduce, scalars};

/// Runs a kernel and keeps its results.
type Run = for<'s> fn(&Inputs<'_, 's>) -> Result<()>;

/// What runs a kernel and keeps its results.
#[derive(Clone, Copy, Debug)]
pub enum Case {
    /// A function of its own.
    Own(Run),
    /// A multiply by a tile.
    Product(Tile),
    /// A multiply by a tile, of factors rounded to a format.
    TensorProduct(Reduced, TensorTile),
    /// A multiply of BF16 tensors by a tile, into f32 or BF16.
    Bf16Product(Bf16Tile, &'static str),
    /// Rounding to a format.
    Rounding(Reduced),
    /// Attention over any number of tokens.
    FlashForward(Shape),
    /// The gradient of its queries.
    FlashQueries(Shape),
    /// The gradients of its keys and values.
    FlashKeys(Shape),
}

impl Case {
    /// Runs it.
    pub(super) fn run(self, i: &Inputs<'_, '_>) -> Result<()> {
        match self {
            Self::Own(run) => run(i),
            Self::Product(tile) => products::product(i, tile),
            Self::TensorProduct(format, tile) => products::tensor_product(i, format, tile),
            Self::Bf16Product(tile, <bf16 as Element>::NAME) => products::bf16_product::<bf16>(i, tile),
            Self::Bf16Product(tile, _) => products::bf16_product::<f32>(i, tile),
            Self::Rounding(format) => products::rounding(i, format),
            Self::FlashForward(shape) => attention::forward(i, shape),
            Self::FlashQueries(shape) => attention::queries(i, shape),
            Self::FlashKeys(shape) => attention::keys(i, shape),
        }
    }
}

/// One kernel, or a family of which every variant has the same case.
enum Listed {
    One(&'static str, Run),
    /// A kernel for each type that memory may hold: f32, then BF16.
    Both([(&'static str, Run); 2]),
    Products,
    TensorProducts,
    Bf16Products,
    Roundings,
    FlashForward,
    FlashQueries,
    FlashKeys,
}

impl Listed {
    fn cases(&self) -> Vec<(&'static str, Case)> {
        match self {
            &One(name, run) => vec![(name, Case::Own(run))],
            Both(each) => each.iter().map(|&(name, run)| (name, Case::Own(run))).collect(),
            Products => {
                let on_gpu = matmul::VARIANTS.iter().filter(|(_, tile)| !tile.is_on_cpu());
                on_gpu.map(|&(name, tile)| (name, Case::Product(tile))).collect()
            }
            TensorProducts => {
                let case = |&(name, (format, tile)): &(_, _)| (name, Case::TensorProduct(format, tile));
                matmul_tensor::VARIANTS.iter().map(case).collect()
            }
            Bf16Products => {
                let case = |&(name, tile, stored)| (name, Case::Bf16Product(tile, stored));
                matmul_bf16::<'_, f32>::VARIANTS.iter().map(case).collect()
            }
            Roundings => round::VARIANTS.iter().map(|&(name, format)| (name, Case::Rounding(format))).collect(),
            FlashForward => {
                flash_forward::VARIANTS.iter().map(|&(name, shape)| (name, Case::FlashForward(shape))).collect()
            }
            FlashQueries => {
                flash_queries::VARIANTS.iter().map(|&(name, shape)| (name, Case::FlashQueries(shape))).collect()
            }
            FlashKeys => flash_keys::VARIANTS.iter().map(|&(name, shape)| (name, Case::FlashKeys(shape))).collect(),
        }
    }
}

/// Every kernel that a GPU has, and its case, in the order of the files that the kernels are in.
pub fn cases() -> Vec<(&'static str, Case)> {
    LISTED.iter().flat_map(Listed::cases).collect()
}

/// The kernels that other cases and uploads use: what is wrong with one of them must be found by its own case.
const FIRST: [&str; 12] = [
    "guard_write",
    "guard_check",
    "checksum",
    "fill_f32",
    "copy_f32",
    "fill_bf16",
    "copy_bf16",
    "sum_all_f32",
    "sum_rows_f32",
    "squared_norm",
    "round_to_tf32",
    "round_to_bf16",
];

/// [`cases`], those of the kernels that others use first.
pub fn in_order() -> Vec<(&'static str, Case)> {
    let mut cases = cases();
    // The sort is stable: the others stay as they are.
    cases.sort_by_key(|(name, _)| FIRST.iter().position(|first| first == name).unwrap_or(FIRST.len()));
    cases
}

/// A [`Both`] of the kernels of a family, `|i| ..` being generic in what is stored.
macro_rules! both {
    ($family:literal, <$S:ident>, |$i:ident| $body:expr) => {{
        fn run<$S: Stored>($i: &Inputs<'_, '_>) -> Result<()> {
            $body
        }
        Both([(concat!($family, "_f32"), run::<f32>), (concat!($family, "_bf16"), run::<bf16>)])
    }};
}

/// What has cases, in the order of the files that the kernels are in.
const LISTED: &[Listed] = &[
    both!("tanh_forward", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::tanh(i.step, x)?))),
    both!("tanh_backward", <S>, |i| i.flat::<S>(|i, [y, dy]| i.keep(&ops::tanh_backward(i.step, y, dy)?))),
    both!("gelu_forward", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::gelu(i.step, x)?))),
    both!("gelu_backward", <S>, |i| i.flat::<S>(|i, [x, dy]| i.keep(&ops::gelu_backward(i.step, x, dy)?))),
    both!("gelu_bias_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (dy, mut db) = (i.normals(x.shape())?, i.gain(x)?);
            i.keep(&ops::gelu_bias_backward(i.step, x, &dy, &mut db, true)?)?;
            i.keep(&db)
        })
    }),
    One("adamw", |i| i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| adamw(i, length))),
    One("adamw_groups", |i| {
        i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| adamw_groups(i, length))
    }),
    One("attention_forward", |i| {
        i.heads(|i, qkv, gains, _| {
            let (made, ..) = i.short_attention(qkv, gains)?;
            let ops::AttentionKept::Short { probabilities, inverse_rms } = made.kept else {
                unreachable!("up to 16 tokens, normalised")
            };
            [made.out, probabilities, inverse_rms].iter().try_for_each(|result| i.keep(result))
        })
    }),
    One("attention_backward", |i| {
        i.heads(|i, qkv, gains, dout| {
            let mut dgains = i.normals([2, 64])?;
            let (made, norm, form) = i.short_attention(qkv, gains)?;
            let dqkv = ops::attention_backward(i.step, qkv, Some((norm, &mut dgains, true)), &form, &made, dout)?;
            i.keep(&dqkv)?;
            i.keep(&dgains)
        })
    }),
    One("cast_to_bf16", |i| i.flat(|i, [x, _]| i.keep(&ops::to_bf16(i.step, x)?))),
    One("cast_to_f32", |i| i.flat(|i, [x, _]| i.keep(&ops::to_f32(i.step, x)?))),
    One("checksum", |i| {
        let chunks = i.by_form(3, 1);
        let words =
            i.random.borrow_mut().normals(chunks * CHUNK + 5).into_iter().map(f32::to_bits).collect::<Vec<u32>>();
        let (x, mut sums) =
            (i.step.upload(&words, [words.len()])?, i.step.upload(&vec![0u32; 2 * chunks + 2], [2 * chunks + 2])?);
        i.step.launch(checksum { x: x.slice(), first: u32::MAX << 16, last: 0xffff, out: sums.out() })?;
        i.keep(&sums)
    }),
    One("clip_factor", |i| {
        // Whole, norms that are not a number too.
        if i.by_form(true, false) { i.flat(|i, [x, _]| clip_factors(i, x)) } else { i.long(|i, x| clip_factors(i, x)) }
    }),
    both!("add", <S>, |i| i.flat::<S>(|i, [a, b]| i.keep(&ops::add(i.step, a, b)?))),
    both!("add_assign", <S>, |i| {
        i.flat::<S>(|i, [a, b]| {
            let mut out = ops::copy(i.step, a)?;
            ops::add_assign(i.step, &mut out, b)?;
            i.keep(&out)
        })
    }),
    both!("scale", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::scale(i.step, x, 0.1)?))),
    both!("scale_by", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::scale_by(i.step, x, &i.normals([1])?)?))),
    both!("add_bias", <S>, |i| {
        i.rows::<S>(|i, x| {
            let bias = i.normals([x.shape().as_rows()[1]])?;
            i.keep(&ops::add_bias(i.step, x, &bias)?)
        })
    }),
    both!("fill", <S>, |i| {
        let lengths = i.by_form(&[1, 1025, 4099][..], &[1027]);
        lengths.iter().try_for_each(|&length| {
            let mut out = i.step.empty::<S>([length])?;
            ops::fill_into(i.step, &mut out, 0.1)?;
            i.keep(&out)
        })
    }),
    both!("copy", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::copy(i.step, x)?))),
    FlashForward,
    FlashQueries,
    FlashKeys,
    One("flash_delta", attention::delta),
    One("guard_write", |i| {
        let block = i.step.upload(&[bf16::ONE; 200], [200])?;
        let guard = block.memory().part(101, 98);
        i.step.launch(guard_write { guard: guard.as_out(), length: guard.len() })?;
        i.keep(&block)
    }),
    One("guard_check", |i| {
        let halves: Vec<bf16> = (0..200).map(|at| if at == 150 { bf16::ONE } else { PATTERN }).collect();
        let (block, mut found) = (i.step.upload(&halves, [200])?, i.step.upload(&[0; 3], [3])?);
        for (place, start) in [101, 151, 200].into_iter().enumerate() {
            let guard = block.memory().part(start, 200 - start);
            i.step.launch(guard_check { guard: guard.as_slice(), place, found: found.out() })?;
        }
        i.keep(&found)
    }),
    both!("layer_norm_forward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (gain, bias, residual) = (i.gain(x)?, i.gain(x)?, i.normals(x.shape())?);
            let (h, out) = ops::layer_norm_residual(i.step, x, &residual, &gain, &bias, 1e-5)?;
            [&h, &out.y].into_iter().try_for_each(|result| i.keep(result))?;
            [&out.mean, &out.inverse_std].into_iter().try_for_each(|result| i.keep(result))?;
            i.keep(&ops::layer_norm(i.step, x, &gain, &bias, 1e-5)?.y)
        })
    }),
    both!("layer_norm_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (gain, bias, mut sums) = (i.gain(x)?, i.gain(x)?, [i.gain(x)?, i.gain(x)?]);
            let (dy, so_far) = (i.normals(x.shape())?, i.normals(x.shape())?);
            let out = ops::layer_norm(i.step, x, &gain, &bias, 1e-5)?;
            let kept = [&out.mean, &out.inverse_std];
            let dx =
                ops::layer_norm_backward(i.step, x, &gain, kept, &dy, Some(so_far), sums.each_mut(), [true, false])?;
            i.keep(&dx)?;
            sums.iter().try_for_each(|sum| i.keep(sum))
        })
    }),
    both!("cross_entropy", <S>, |i| {
        i.rows::<S>(|i, logits| {
            let labels = i.labels(logits)?;
            let labels = i.step.lend(&labels, [labels.len()])?;
            let (loss, dlogits) = ops::cross_entropy(i.step, logits, &labels, 0.1)?;
            i.keep(&loss)?;
            i.keep(&dlogits)
        })
    }),
    Products,
    both!("sum_splits", <S>, |i| products::splits::<S>(i)),
    TensorProducts,
    Bf16Products,
    both!("rms_norm_forward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (y, scale) = ops::rms_norm(i.step, x, &i.gain(x)?, 1e-6)?;
            i.keep(&y)?;
            i.keep(&scale)
        })
    }),
    both!("rms_norm_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (mut gain, dy, so_far) = (i.gain(x)?, i.normals(x.shape())?, i.normals(x.shape())?);
            let (_, scale) = ops::rms_norm(i.step, x, &gain, 1e-6)?;
            let weights = ops::copy(i.step, &gain)?;
            let dx = ops::rms_norm_backward(i.step, x, &weights, &scale, &dy, Some(so_far), &mut gain, true)?;
            i.keep(&dx)?;
            i.keep(&gain)
        })
    }),
    Roundings,
    One("qk_norm_forward", attention::qk_norm),
    One("qk_norm_backward", attention::qk_norm_backward),
    both!("sum_columns", <S>, |i| {
        i.rows::<S>(|i, x| {
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
    both!("sum_rows", <S>, |i| {
        i.rows::<S>(|i, x| {
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
    both!("sum_all", <S>, |i| {
        i.long::<S>(|i, x| {
            let blocks = x.shape().elements().div_ceil(kernels::block::CHUNK);
            i.sums(
                blocks,
                || ops::sum(i.step, x),
                |scale, accumulate, out| i.step.launch(reduce::sum_all { x: x.slice(), scale, accumulate, out }),
            )
        })
    }),
    One("squared_norm", |i| i.long(|i, x| i.keep(&ops::squared_norm(i.step, x)?))),
    One("max_all", |i| i.long(|i, x| i.keep(&ops::max(i.step, x)?))),
    One("max_columns", |i| i.rows(|i, x| i.keep(&ops::max_columns(i.step, x)?))),
    One("argmax_columns", |i| i.rows(|i, x| i.keep(&ops::argmax_columns(i.step, x)?))),
    One("rotary", attention::rotary),
    One("scalars", |i| {
        (scalars::EXP..=scalars::RSQRT).try_for_each(|function| {
            // In the smallest form from 0.01 to 10, by turns of either sign.
            let (length, first, stride) =
                i.by_form(((1 << 17) + 3, 0x8000_0001, 32_749), (4099, 0x3c23_d70b, 0x8000_4fd9));
            let mut y = i.step.empty([length])?;
            i.step.launch(scalars::scalars { y: y.out(), length, function, first, stride })?;
            i.keep(&y)
        })
    }),
    One("sgd", |i| i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| sgd(i, length))),
    One("sgd_groups", |i| {
        i.by_form(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| sgd_groups(i, length))
    }),
    both!("softmax_forward", <S>, |i| i.rows::<S>(|i, x| i.keep(&ops::softmax(i.step, x)?))),
    both!("softmax_backward", <S>, |i| i.rows::<S>(|i, y| i.keep(&ops::softmax_backward(i.step, y, &i.normals(y.shape())?)?))),
    both!("mean_tokens_forward", <S>, |i| i.tokens(|i, shape| i.keep(&ops::mean_tokens(i.step, &i.normals::<S>(shape)?)?))),
    both!("mean_tokens_backward", <S>, |i| {
        i.tokens(|i, [samples, tokens, cols]| {
            i.keep(&ops::mean_tokens_backward(i.step, &i.normals::<S>([samples, cols])?, [samples, tokens, cols])?)
        })
    }),
    One("transpose", |i| {
        i.rows(|i, x| i.keep(&ops::transpose(i.step, x)?))?;
        i.tokens(|i, shape| i.keep(&ops::transpose(i.step, &i.normals(shape)?)?))
    }),
];

fn adamw(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let (mut weights, gradients, mut first) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let mut second = i.step.upload(&i.random.borrow_mut().uniforms(length, 0.0, 2.0), [length])?;
    let hyper = i.step.upload(&[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0], [8])?;
    let norm = ops::squared_norm(i.step, &gradients)?;
    let mut copy = i.step.empty([length])?;
    ops::adamw(i.step, &mut weights, Some(&mut copy), &gradients, &mut first, &mut second, &hyper, &norm)?;
    [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))?;
    i.keep(&copy)
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
    let mut copy = i.step.empty([length])?;
    ops::adamw_groups(
        i.step,
        &mut weights,
        Some(&mut copy),
        &gradients,
        &mut first,
        &mut second,
        &hyper,
        &groups,
        &norm,
    )?;
    [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))?;
    i.keep(&copy)
}

/// Both kinds of momentum, with and without clipping.
fn sgd(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    for hyper in [[1e-2, 0.9, 0.01, 1.0, 0.0], [1e-2, 0.5, 0.1, 0.0, 1.0]] {
        let (mut weights, gradients, mut velocity) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
        let (hyper, norm) = (i.step.upload(&hyper, [5])?, ops::squared_norm(i.step, &gradients)?);
        let mut copy = i.step.empty([length])?;
        ops::sgd(i.step, &mut weights, Some(&mut copy), &gradients, &mut velocity, &hyper, &norm)?;
        [&weights, &velocity].into_iter().try_for_each(|tensor| i.keep(tensor))?;
        i.keep(&copy)?;
    }
    Ok(())
}

/// Groups of both kinds of momentum.
fn sgd_groups(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let (mut weights, gradients, mut velocity) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let hyper = [[1e-2, 0.9, 0.01, 1.0, 0.0], [1e-3, 0.5, 0.0, 0.0, 1.0]];
    let (hyper, groups) = (i.step.upload(hyper.as_flattened(), [2, 5])?, i.groups(length, 2)?);
    let norm = ops::squared_norm(i.step, &gradients)?;
    let mut copy = i.step.empty([length])?;
    ops::sgd_groups(i.step, &mut weights, Some(&mut copy), &gradients, &mut velocity, &hyper, &groups, &norm)?;
    [&weights, &velocity].into_iter().try_for_each(|tensor| i.keep(tensor))?;
    i.keep(&copy)
}
