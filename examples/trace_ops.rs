//! Writes what every op computes on random shapes, forward and backward, for an independent computation to check.
//!
//! ```text
//! cargo run --release --example trace_ops -- ops.safetensors
//! cargo run --release --features cuda --example trace_ops -- --device cuda ops.safetensors
//! ```
//! `ci/oracle` runs it and checks the file with JAX. A case is an op and a seed: its operands are `OP.SEED.in.NAME`; `in.dy` is
//! the gradient of its result, `OP.SEED.out.y`, and `out.dNAME` what backward makes of it for an operand. The note `OP.SEED` is
//! the largest relative L2 error that is allowed.
//! Exit code 0: the file is written. 1: it is not, or the device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "crossasset/tensor_file.rs"]
mod tensor_file;

use clap::Parser;
use kernels::attention::HEAD;
use kernels::update::RUN;
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use stepscope::{Arena, Capacity, Device, DeviceKind, Eager, Element, Result, Shape, Source, Tensor, bf16, ops};
use support::{Random, tolerance};
use tensor_file::TensorFile;

/// Writes operands and results of every op.
#[derive(Parser)]
#[command(name = "trace_ops")]
struct Args {
    /// Where the ops run
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// The safetensors file to write
    file: PathBuf,
}

/// Seeds of each case's shapes and values.
const SEEDS: std::ops::Range<u64> = 0..4;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let device = Device::open(args.device)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build()?;
    let mut file = TensorFile::default();
    for (op, run) in CASES {
        for seed in SEEDS {
            arena.step(|step| {
                let (name, random) = (format!("{op}.{seed}"), Random::new(seed).into());
                run(&Case { step, name, seed, random, file: RefCell::new(&mut file) })
            })?;
        }
    }
    file.write(&args.file)?;
    println!("{} ops, {} shapes each, on the {}", CASES.len(), SEEDS.end, device.description().name);
    Ok(())
}

/// An op at work on shapes and values that a seed names.
struct Case<'c, 's> {
    step: &'c Eager<'s>,
    name: String,
    seed: u64,
    random: RefCell<Random>,
    file: RefCell<&'c mut TensorFile>,
}

type Run = for<'s> fn(&Case<'_, 's>) -> Result<()>;

/// Every op, with the length of the longest sum in it or its backward: 1 for single roundings, 0 for none at all.
const CASES: &[(&str, Run)] = &[
    ("tanh", |c| {
        c.pointwise(|c, x, dy| Ok((ops::tanh(c.step, x)?, ops::tanh_backward(c.step, &ops::tanh(c.step, x)?, dy)?)))
    }),
    ("gelu", |c| c.pointwise(|c, x, dy| Ok((ops::gelu(c.step, x)?, ops::gelu_backward(c.step, x, dy)?)))),
    ("relu", |c| {
        c.pointwise(|c, x, dy| Ok((ops::relu(c.step, x)?, ops::relu_backward(c.step, &ops::relu(c.step, x)?, dy)?)))
    }),
    ("sigmoid", |c| {
        c.pointwise(|c, x, dy| {
            Ok((ops::sigmoid(c.step, x)?, ops::sigmoid_backward(c.step, &ops::sigmoid(c.step, x)?, dy)?))
        })
    }),
    ("silu", |c| c.pointwise(|c, x, dy| Ok((ops::silu(c.step, x)?, ops::silu_backward(c.step, x, dy)?)))),
    ("gelu_exact", |c| {
        c.pointwise(|c, x, dy| Ok((ops::gelu_exact(c.step, x)?, ops::gelu_exact_backward(c.step, x, dy)?)))
    }),
    ("swiglu", |c| {
        let shape = c.extents([70, 300]);
        c.longest(1);
        let (gate, up, dy) = (c.operand("gate", shape)?, c.operand("up", shape)?, c.operand("dy", shape)?);
        c.result("y", &ops::swiglu(c.step, &gate, &up)?)?;
        let [dgate, dup] = ops::swiglu_backward(c.step, &gate, &up, &dy)?;
        c.result("dgate", &dgate)?;
        c.result("dup", &dup)
    }),
    ("swiglu_packed", |c| {
        let [rows, cols] = c.extents([70, 150]);
        c.longest(1);
        let (x, dy) = (c.operand("x", [rows, 2 * cols])?, c.operand("dy", [rows, cols])?);
        c.result("y", &ops::swiglu_packed(c.step, &x)?)?;
        c.result("dx", &ops::swiglu_packed_backward(c.step, &x, &dy)?)
    }),
    ("dropout", |c| {
        let shape = c.extents([70, 300]);
        c.longest(1);
        let (seed, number) = (0x9e37_79b9_7f4a_7c15, (1 << 32) + c.seed);
        let words = [seed, number].map(|word: u64| [word as u32, (word >> 32) as u32]);
        c.given("generator", [4], words.as_flattened())?;
        let (x, dy, p) = (c.operand("x", shape)?, c.operand("dy", shape)?, c.share("p"));
        let draws = ops::Generator::at(c.step.device(), seed, number)?.draws(c.step)?;
        let (_, second) = (draws.next(), draws.next());
        c.result("y", &ops::dropout(c.step, &x, p, &second)?)?;
        c.result("dx", &ops::dropout(c.step, &dy, p, &second)?)
    }),
    ("embedding", |c| {
        let [count, rows, cols] = c.extents([700, 40, 70]);
        c.longest(count);
        let (table, ids) = (c.operand("table", [rows, cols])?, c.random.borrow_mut().belows(count, rows as u32));
        let (ids, dy) = (c.given("ids", [count], &ids)?, c.operand("dy", [count, cols])?);
        let y: Tensor<'_> = ops::embedding(c.step, &table, &ids)?;
        c.result("y", &y)?;
        let mut dtable = c.step.empty([rows, cols])?;
        ops::embedding_backward(c.step, &dy, &ids, &mut dtable, false)?;
        c.result("dtable", &dtable)
    }),
    ("gather", |c| {
        let [count, rows, cols] = c.extents([700, 40, 70]);
        c.longest(count);
        let (x, ids) = (c.operand("x", [rows, cols])?, c.random.borrow_mut().belows(count, rows as u32));
        let (ids, dy) = (c.given("ids", [count], &ids)?, c.operand("dy", [count, cols])?);
        c.result("y", &ops::gather(c.step, &x, &ids)?)?;
        c.result("dx", &ops::gather_backward(c.step, &dy, &ids, rows)?)
    }),
    ("add_positions", |c| {
        let [batch, tokens, cols] = c.extents([40, 12, 70]);
        c.longest(batch);
        let (x, table) = (c.operand("x", [batch, tokens, cols])?, c.operand("table", [tokens + 3, cols])?);
        let dy = c.operand("dy", [batch, tokens, cols])?;
        c.result("y", &ops::add_positions(c.step, &x, &table)?)?;
        let mut dtable = c.step.empty([tokens + 3, cols])?;
        ops::add_positions_backward(c.step, &dy, &mut dtable, false)?;
        c.result("dtable", &dtable)
    }),
    ("slice", |c| {
        let [a, b, cols] = c.extents([9, 40, 70]);
        c.longest(0);
        let (start, end) = (b / 3, b / 3 + b.div_ceil(2));
        c.given("range", [2], &[start as u32, end as u32])?;
        let (x, dy) = (c.operand("x", [a, b, cols])?, c.operand("dy", [a, end - start, cols])?);
        c.result("y", &ops::slice(c.step, &x, 1, start..end)?)?;
        c.result("dx", &ops::slice_backward(c.step, &dy, [a, b, cols], 1, start..end)?)
    }),
    ("concat", |c| {
        let [rows, a, b] = c.extents([70, 130, 60]);
        c.longest(0);
        let (left, right, dy) =
            (c.operand("a", [rows, a])?, c.operand("b", [rows, b])?, c.operand("dy", [rows, a + b])?);
        c.result("y", &ops::concat(c.step, &[&left, &right], 1)?)?;
        c.result("da", &ops::slice(c.step, &dy, 1, 0..a)?)?;
        c.result("db", &ops::slice(c.step, &dy, 1, a..a + b)?)
    }),
    ("gelu_bias", |c| {
        let [rows, cols] = c.extents([270, 300]);
        c.longest(rows);
        let (x, dy) = (c.operand("x", [rows, cols])?, c.operand("dy", [rows, cols])?);
        let bias = c.given("bias", [cols], &vec![0.0; cols])?;
        let before = ops::add_bias(c.step, &x, &bias)?;
        c.result("y", &ops::gelu(c.step, &before)?)?;
        let mut dbias = c.step.empty([cols])?;
        c.result("dx", &ops::gelu_bias_backward(c.step, &before, &dy, &mut dbias, false)?)?;
        c.result("dbias", &dbias)
    }),
    ("add", |c| c.pair(|c, a, b| ops::add(c.step, a, b))),
    ("sub", |c| c.pair(|c, a, b| ops::sub(c.step, a, b))),
    ("mul", |c| c.pair(|c, a, b| ops::mul(c.step, a, b))),
    ("add_assign", |c| {
        c.pair(|c, a, b| {
            let mut out = ops::copy(c.step, a)?;
            ops::add_assign(c.step, &mut out, b)?;
            Ok(out)
        })
    }),
    ("scale", |c| c.reduced(|_| 1, |c, x| ops::scale(c.step, x, c.scalar("factor")))),
    ("scale_by", |c| {
        c.reduced(
            |_| 1,
            |c, x| {
                let factor = c.operand("factor", [1])?;
                ops::scale_by(c.step, x, &factor)
            },
        )
    }),
    ("add_bias", |c| c.reduced(|_| 1, |c, x| ops::add_bias(c.step, x, &c.operand("bias", [x.shape().as_rows()[1]])?))),
    ("fill", |c| {
        c.reduced(
            |_| 0,
            |c, x| {
                let mut out = c.step.empty::<f32>(x.shape())?;
                ops::fill_into(c.step, &mut out, c.scalar("value"))?;
                Ok(out)
            },
        )
    }),
    ("to_bf16", |c| c.reduced(|_| 0, |c, x| ops::to_f32(c.step, &ops::to_bf16(c.step, x)?))),
    ("to_f32", |c| c.reduced(|_| 0, |c, x| ops::to_f32(c.step, &ops::to_bf16(c.step, x)?))),
    ("copy", |c| {
        c.reduced(
            |_| 0,
            |c, x| {
                let mut out = c.step.empty(x.shape())?;
                ops::copy_into(c.step, x, &mut out)?;
                Ok(out)
            },
        )
    }),
    ("sum", |c| c.reduced(Shape::elements, |c, x| ops::sum(c.step, x))),
    ("scaled_sum", |c| c.reduced(Shape::elements, |c, x| ops::scaled_sum(c.step, x, c.scalar("factor")))),
    ("mean", |c| c.reduced(Shape::elements, |c, x| ops::mean(c.step, x))),
    ("squared_norm", |c| c.reduced(Shape::elements, |c, x| ops::squared_norm(c.step, x))),
    ("max", |c| c.reduced(|_| 0, |c, x| ops::max(c.step, x))),
    ("sum_columns", |c| c.reduced(|x| x.as_rows()[1], |c, x| ops::sum_columns(c.step, x))),
    ("sum_rows", |c| c.reduced(|x| x.as_rows()[0], |c, x| ops::sum_rows(c.step, x))),
    ("max_columns", |c| c.reduced(|_| 0, |c, x| ops::max_columns(c.step, x))),
    ("argmax_columns", |c| c.reduced(|_| 0, |c, x| ops::argmax_columns(c.step, x))),
    ("softmax", |c| {
        let shape = c.extents([70, 300]);
        c.longest(shape[1]);
        let (x, dy) = (c.operand("x", shape)?, c.operand("dy", shape)?);
        let y = ops::softmax(c.step, &x)?;
        c.result("y", &y)?;
        c.result("dx", &ops::softmax_backward(c.step, &y, &dy)?)
    }),
    ("log_softmax", |c| {
        let shape = c.extents([70, 300]);
        c.longest(shape[1]);
        let (x, dy) = (c.operand("x", shape)?, c.operand("dy", shape)?);
        let y = ops::log_softmax(c.step, &x)?;
        c.result("y", &y)?;
        c.result("dx", &ops::log_softmax_backward(c.step, &y, &dy)?)
    }),
    ("squared_error", |c| {
        let shape @ [rows, cols] = c.extents([70, 300]);
        c.longest(rows * cols);
        let (x, target, weight) = (c.operand("x", shape)?, c.operand("target", shape)?, c.scalar("weight"));
        let (dy, (loss, dx)) = (c.operand("dy", [1])?, ops::squared_error(c.step, &x, &target, weight)?);
        c.result("y", &loss)?;
        c.result("dx", &ops::scale_by(c.step, &dx, &dy)?)
    }),
    ("binary_cross_entropy", |c| {
        let shape @ [rows, cols] = c.extents([70, 300]);
        c.longest(rows * cols);
        let (x, target) = (c.operand("x", shape)?, c.random.borrow_mut().uniforms(rows * cols, 0.0, 1.0));
        let (target, weight, dy) = (c.given("target", shape, &target)?, c.scalar("weight"), c.operand("dy", [1])?);
        let (loss, dx) = ops::binary_cross_entropy(c.step, &x, &target, weight)?;
        c.result("y", &loss)?;
        c.result("dx", &ops::scale_by(c.step, &dx, &dy)?)
    }),
    ("cross_entropy_by", |c| {
        let [rows, classes] = c.extents([300, 12]);
        c.longest(rows.max(classes));
        let logits = c.operand("logits", [rows, classes + 1])?;
        let mut labels = c.random.borrow_mut().belows(rows, classes as u32 + 1);
        labels.iter_mut().skip(3).step_by(5).for_each(|label| *label = ops::IGNORED);
        let labels = c.given("labels", [rows], &labels)?;
        let (weight, smoothing, dy) = (c.scalar("weight"), c.share("smoothing"), c.operand("dy", [1])?);
        let rules = ops::LabelRules { smoothing, ignore: true };
        let (loss, dlogits) = ops::cross_entropy_by(c.step, &logits, &labels, weight, rules)?;
        c.result("y", &loss)?;
        c.result("dlogits", &ops::scale_by(c.step, &dlogits, &dy)?)
    }),
    ("cross_entropy", |c| {
        let [rows, classes] = c.extents([300, 12]);
        c.longest(rows.max(classes));
        let logits = c.operand("logits", [rows, classes + 1])?;
        let labels = c.random.borrow_mut().belows(rows, classes as u32 + 1);
        let labels = c.given("labels", [rows], &labels)?;
        let (weight, dy) = (c.scalar("weight"), c.operand("dy", [1])?);
        let (loss, dlogits) = ops::cross_entropy(c.step, &logits, &labels, weight)?;
        c.result("y", &loss)?;
        c.result("dlogits", &ops::scale_by(c.step, &dlogits, &dy)?)
    }),
    ("rms_norm", |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let (x, gain, dy) = (c.operand("x", [rows, cols])?, c.operand("gain", [cols])?, c.operand("dy", [rows, cols])?);
        let (y, inverse_rms) = ops::rms_norm(c.step, &x, &gain, c.scalar("epsilon"))?;
        c.result("y", &y)?;
        let mut dgain = c.step.empty([cols])?;
        c.result("dx", &ops::rms_norm_backward(c.step, &x, &gain, &inverse_rms, &dy, None, &mut dgain, false)?)?;
        c.result("dgain", &dgain)
    }),
    ("rms_norm_residual", |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let [x, residual, dy] = ["x", "residual", "dy"].map(|name| c.operand(name, [rows, cols]));
        let (x, residual, dy, gain) = (x?, residual?, dy?, c.operand("gain", [cols])?);
        let (h, y, inverse_rms) = ops::rms_norm_residual(c.step, &x, &residual, &gain, c.scalar("epsilon"))?;
        c.result("y", &y)?;
        let mut dgain = c.step.empty([cols])?;
        c.result("dx", &ops::rms_norm_backward(c.step, &h, &gain, &inverse_rms, &dy, None, &mut dgain, false)?)?;
        c.result("dgain", &dgain)
    }),
    ("layer_norm", |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let [x, residual, dy] = ["x", "residual", "dy"].map(|name| c.operand(name, [rows, cols]));
        let (x, residual, dy) = (x?, residual?, dy?);
        let (gain, bias) = (c.operand("gain", [cols])?, c.operand("bias", [cols])?);
        let epsilon = c.scalar("epsilon");
        let (h, out) = ops::layer_norm_residual(c.step, &x, &residual, &gain, &bias, epsilon)?;
        let alone = ops::layer_norm(c.step, &h, &gain, &bias, epsilon)?;
        c.result("y", if c.seed % 2 == 0 { &out.y } else { &alone.y })?;
        let kept = [&out.mean, &out.inverse_std];
        let mut sums = [c.step.empty([cols])?, c.step.empty([cols])?];
        let dx = ops::layer_norm_backward(c.step, &h, &gain, kept, &dy, None, sums.each_mut(), [false; 2])?;
        c.result("dx", &dx)?;
        c.result("dgain", &sums[0])?;
        c.result("dbias", &sums[1])
    }),
    ("attention", |c| {
        let [batch, tokens, heads] = c.extents([9, 16, 4]);
        c.longest((batch * tokens * heads).max(HEAD));
        let qkv = c.operand("qkv", [3, batch, tokens, heads * HEAD])?;
        let (gains, dy) = (c.operand("gains", [2, HEAD])?, c.operand("dy", [batch, tokens, heads * HEAD])?);
        let (epsilon, scale) = (c.scalar("epsilon"), c.scalar("scale"));
        let (norm, form) = (ops::QkNorm::new(&gains, epsilon), ops::AttentionForm::new(heads).scale(scale));
        let made = ops::attention(c.step, &qkv, Some(norm), &form)?;
        c.result("y", &made.out)?;
        let mut dgains = c.step.empty([2, HEAD])?;
        let backward = Some((norm, &mut dgains, false));
        c.result("dqkv", &ops::attention_backward(c.step, &qkv, backward, &form, &made, &dy)?)?;
        c.result("dgains", &dgains)
    }),
    ("flash_attention", |c| {
        let heads = c.heads([3, 130, 3, 2, 12]);
        c.longest((heads.tokens * heads.form.heads).max(heads.width));
        let tokens = heads.batch * heads.tokens;
        let documents = c.random.borrow_mut().belows(tokens, 2);
        let lengths = c.random.borrow_mut().belows(heads.batch, 200);
        let documents = c.given("documents", [heads.batch, heads.tokens], &documents)?;
        let lengths = c.given("lengths", [heads.batch], &lengths)?;
        let form = heads.form.documents(documents).lengths(lengths);
        // All tokens, those before, or some of those before.
        let (sees, window) = match c.seed {
            0 => (ops::Sees::Past, u32::MAX),
            2 => (ops::Sees::Window(NonZeroU32::MIN.saturating_add(19)), 20),
            _ => (ops::Sees::All, 0),
        };
        c.given("window", [1], &[window])?;
        let (qkv, dy) = (c.operand("qkv", heads.shape)?, c.operand("dy", heads.output())?);
        let made = ops::attention(c.step, &qkv, None, &form.sees(sees))?;
        c.result("y", &made.out)?;
        let none = None::<(ops::QkNorm<'_, '_>, &mut Tensor<'_>, bool)>;
        c.result("dqkv", &ops::attention_backward(c.step, &qkv, none, &form.sees(sees), &made, &dy)?)
    }),
    ("qk_norm", |c| {
        let heads = c.heads([3, 60, 3, 2, 32]);
        let rows = heads.batch * heads.tokens * heads.form.heads;
        c.longest(rows.max(heads.width));
        let (qkv, dy) = (c.operand("qkv", heads.shape)?, c.operand("dy", heads.shape)?);
        let (gains, epsilon) = (c.operand("gains", [2, heads.width])?, c.scalar("epsilon"));
        let norm = ops::QkNorm::new(&gains, epsilon);
        let (y, inverse_rms) = ops::qk_norm(c.step, &qkv, norm, &heads.form)?;
        c.result("y", &y)?;
        let mut dgains = c.step.empty([2, heads.width])?;
        let dqkv = ops::qk_norm_backward(c.step, &qkv, norm, &heads.form, &inverse_rms, dy, &mut dgains, false)?;
        c.result("dqkv", &dqkv)?;
        c.result("dgains", &dgains)
    }),
    ("rotary", |c| {
        let heads = c.heads([3, 60, 3, 2, 32]);
        c.longest(1);
        let (qkv, dy) = (c.operand("qkv", heads.shape)?, c.operand("dy", heads.shape)?);
        let rotary = ops::Rotary { base: 1000.0, offset: 100 * c.seed as u32 };
        c.given("rotary", [2], &[1000, rotary.offset])?;
        c.result("y", &ops::rotary(c.step, &qkv, rotary, &heads.form)?)?;
        c.result("dqkv", &ops::rotary_backward(c.step, dy, rotary, &heads.form)?)
    }),
    ("mean_tokens", |c| {
        let [batch, tokens, cols] = c.extents([40, 12, 70]);
        c.longest(tokens);
        let (x, dy) = (c.operand("x", [batch, tokens, cols])?, c.operand("dy", [batch, cols])?);
        c.result("y", &ops::mean_tokens(c.step, &x)?)?;
        c.result("dx", &ops::mean_tokens_backward(c.step, &dy, [batch, tokens, cols])?)
    }),
    ("transpose", |c| {
        let [matrices, rows, cols] = c.extents([3, 70, 130]);
        c.longest(0);
        let (x, dy) = (c.operand("x", [matrices, rows, cols])?, c.operand("dy", [matrices, cols, rows])?);
        c.result("y", &ops::transpose(c.step, &x)?)?;
        c.result("dx", &ops::transpose(c.step, &dy)?)
    }),
    ("swap_extents", |c| {
        let [batch, tokens, heads, cols] = c.extents([5, 30, 6, 20]);
        c.longest(0);
        let x = c.operand("x", [batch, tokens, heads, cols])?;
        let dy = c.operand("dy", [batch, heads, tokens, cols])?;
        c.result("y", &ops::swap_extents(c.step, &x, 1, 2)?)?;
        c.result("dx", &ops::swap_extents(c.step, &dy, 1, 2)?)
    }),
    ("linear", |c| {
        let [m, n, k] = c.extents([150, 140, 300]);
        // The residual and the bias are terms too.
        c.longest(m.max(n).max(k + 2));
        let (x, w, bias) = (c.operand("x", [m, k])?, c.operand("w", [k, n])?, c.operand("bias", [n])?);
        let (residual, dy) = (c.operand("residual", [m, n])?, c.operand("dy", [m, n])?);
        c.result("product", &ops::matmul(c.step, &x, &w)?)?;
        c.result("affine", &ops::linear(c.step, &x, &w, Some(&bias))?)?;
        c.result("y", &ops::linear_residual(c.step, &x, &w, Some(&bias), &residual)?)?;
        c.result("activated", &ops::linear_gelu(c.step, &x, &w, Some(&bias))?.0)?;
        // As the tape does: dw += x^T dy, dx = dy w^T, and the bias's gradient adds up rows.
        let (mut dx, mut dw, mut dbias) =
            (c.step.empty([m, k])?, ops::fill(c.step, [k, n], 0.0)?, ops::fill(c.step, [n], 0.0)?);
        let for_dw = ops::Gemm::new(k, n, m).transpose_a().accumulate();
        let for_dw = ops::Gradient { form: for_dw, of: &x, into: &mut dw };
        let for_dx = ops::Gradient { form: ops::Gemm::new(m, k, n).transpose_b(), of: &w, into: &mut dx };
        ops::gradients_into(c.step, &dy, for_dw, Some(for_dx))?;
        ops::sum_rows_into(c.step, &dy, &mut dbias, true)?;
        [("dx", &dx), ("dw", &dw), ("dbias", &dbias)].into_iter().try_for_each(|(name, tensor)| c.result(name, tensor))
    }),
    ("gemm", |c| {
        let [batches, m, n, k] = c.extents([3, 80, 70, 200]);
        c.longest(k + 2);
        let (a, b) = (c.operand("a", [batches, m, k])?, c.operand("b", [batches, n, k])?);
        let (bias, mut out) = (c.operand("bias", [batches, n])?, c.operand("c", [batches, m, n])?);
        let [stride_a, stride_b, stride_c, stride_bias] = [m * k, n * k, m * n, n];
        let form = ops::Gemm { batches, stride_a, stride_b, stride_c, stride_bias, ..ops::Gemm::new(m, n, k) };
        ops::gemm_into(c.step, &form.transpose_b().accumulate(), &a, &b, Some(&bias), &mut out)?;
        c.result("y", &out)
    }),
    ("adamw", |c| {
        let shape = c.extents([2000]);
        c.longest(1);
        let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
        let mut first = c.operand("first", shape)?;
        let second = c.random.borrow_mut().uniforms(shape[0], 0.1, 2.0);
        let mut second = c.given("second", shape, &second)?;
        // Learning rate, beta1, beta2, epsilon, decay, the corrections of update 2, the largest norm.
        let hyper = c.given("hyper", [8], &[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.001_999, 1.0])?;
        let squared_norm = ops::squared_norm(c.step, &gradients)?;
        ops::adamw(
            c.step,
            &mut weights,
            None::<&mut Tensor<'_, bf16>>,
            &gradients,
            &mut first,
            &mut second,
            &hyper,
            &squared_norm,
        )?;
        let updated = [("weights", &weights), ("first", &first), ("second", &second)];
        updated.into_iter().try_for_each(|(name, tensor)| c.result(name, tensor))
    }),
    ("adamw_groups", |c| {
        let shape = c.extents([2000]);
        c.longest(1);
        let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
        let mut first = c.operand("first", shape)?;
        let second = c.random.borrow_mut().uniforms(shape[0], 0.1, 2.0);
        let mut second = c.given("second", shape, &second)?;
        let hyper =
            [[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.001_999, 1.0], [5e-2, 0.8, 0.99, 1e-6, 0.0, 0.36, 0.0199, 2.0]];
        let (hyper, groups) = (c.given("hyper", [2, 8], hyper.as_flattened())?, c.groups(shape[0], 2)?);
        let norm = ops::squared_norm(c.step, &gradients)?;
        ops::adamw_groups(
            c.step,
            &mut weights,
            None::<&mut Tensor<'_, bf16>>,
            &gradients,
            &mut first,
            &mut second,
            &hyper,
            &groups,
            &norm,
        )?;
        let updated = [("weights", &weights), ("first", &first), ("second", &second)];
        updated.into_iter().try_for_each(|(name, tensor)| c.result(name, tensor))
    }),
    ("sgd", |c| {
        let shape = c.extents([2000]);
        c.longest(1);
        let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
        let mut velocity = c.operand("velocity", shape)?;
        // Learning rate, momentum, decay, the largest norm, and whether it is Nesterov's.
        let hyper = c.given("hyper", [5], &[0.3, 0.9, 0.1, 1.0, (c.seed % 2) as f32])?;
        let squared_norm = ops::squared_norm(c.step, &gradients)?;
        ops::sgd(
            c.step,
            &mut weights,
            None::<&mut Tensor<'_, bf16>>,
            &gradients,
            &mut velocity,
            &hyper,
            &squared_norm,
        )?;
        c.result("weights", &weights)?;
        c.result("velocity", &velocity)
    }),
    ("sgd_groups", |c| {
        let shape = c.extents([2000]);
        c.longest(1);
        let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
        let mut velocity = c.operand("velocity", shape)?;
        let hyper = [[0.3, 0.9, 0.1, 1.0, 0.0], [0.1, 0.5, 0.0, 2.0, 1.0]];
        let (hyper, groups) = (c.given("hyper", [2, 5], hyper.as_flattened())?, c.groups(shape[0], 2)?);
        let norm = ops::squared_norm(c.step, &gradients)?;
        ops::sgd_groups(
            c.step,
            &mut weights,
            None::<&mut Tensor<'_, bf16>>,
            &gradients,
            &mut velocity,
            &hyper,
            &groups,
            &norm,
        )?;
        c.result("weights", &weights)?;
        c.result("velocity", &velocity)
    }),
    ("clip_factor", |c| {
        c.longest(1);
        let squared_norm = c.given("squared_norm", [1], &[4.0f32.powi(c.seed as i32 - 2)])?;
        c.result("y", &ops::clip_factor(c.step, &squared_norm, c.scalar("largest"))?)
    }),
];

/// q, k and v, packed.
struct Heads<'s> {
    batch: usize,
    tokens: usize,
    width: usize,
    shape: Shape,
    form: ops::AttentionForm<'s>,
}

impl Heads<'_> {
    /// The shape of what attention makes of them.
    fn output(&self) -> Shape {
        [self.batch, self.tokens, self.form.heads * self.width].into()
    }
}

impl<'s> Case<'_, 's> {
    /// Heads of up to so many samples, tokens, key heads, query heads of each, and eights of columns.
    fn heads(&self, most: [usize; 5]) -> Heads<'s> {
        let [batch, tokens, kv_heads, group, eighths] = self.extents(most);
        let (heads, width) = (kv_heads * group, 8 * eighths);
        let sizes = [heads, kv_heads].map(|size| size as u32);
        self.file.borrow_mut().add(format!("{}.in.heads", self.name), [2], &sizes);
        let form = ops::AttentionForm::new(heads).kv_heads(kv_heads);
        Heads { batch, tokens, width, shape: [batch, tokens, (heads + 2 * kv_heads) * width].into(), form }
    }

    /// The largest shape for seed 0, all ones for seed 1, else anything between.
    fn extents<const N: usize>(&self, most: [usize; N]) -> [usize; N] {
        most.map(|most| match self.seed {
            0 => most,
            1 => 1,
            _ => self.random.borrow_mut().extent(1, most),
        })
    }

    /// Notes what is allowed for a longest sum of so many terms.
    fn longest(&self, length: usize) {
        self.file.borrow_mut().note(&*self.name, tolerance(length));
    }

    /// An operand with these elements.
    fn given<T: Element>(&self, name: &str, shape: impl Into<Shape>, values: &[T]) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        self.file.borrow_mut().add(format!("{}.in.{name}", self.name), shape, values);
        self.step.upload(values, shape)
    }

    /// An operand of normal numbers.
    fn operand(&self, name: &str, shape: impl Into<Shape>) -> Result<Tensor<'s>> {
        let shape = shape.into();
        let values = self.random.borrow_mut().normals(shape.elements());
        self.given(name, shape, &values)
    }

    /// An operand on the host, between 1/8 and 1.
    fn scalar(&self, name: &str) -> f32 {
        let value = self.random.borrow_mut().uniform(0.125, 1.0);
        self.file.borrow_mut().add(format!("{}.in.{name}", self.name), [1], &[value]);
        value
    }

    /// An operand on the host, between 1/8 and 1/2.
    fn share(&self, name: &str) -> f32 {
        let value = self.random.borrow_mut().uniform(0.125, 0.5);
        self.file.borrow_mut().add(format!("{}.in.{name}", self.name), [1], &[value]);
        value
    }

    /// A group below `count` for each run of a flat region.
    fn groups(&self, length: usize, count: u32) -> Result<Tensor<'s, u32>> {
        let runs = length.div_ceil(RUN);
        let groups = self.random.borrow_mut().belows(runs, count);
        self.given("groups", [runs], &groups)
    }

    fn result<T: Element>(&self, name: &str, tensor: &impl Source<'s, T>) -> Result<()> {
        let values = self.step.read(tensor)?;
        self.file.borrow_mut().add(format!("{}.out.{name}", self.name), tensor.shape(), &values);
        Ok(())
    }

    /// A function of single elements, and its derivative.
    fn pointwise(
        &self,
        op: impl Fn(&Self, &Tensor<'s>, &Tensor<'s>) -> Result<(Tensor<'s>, Tensor<'s>)>,
    ) -> Result<()> {
        let shape = self.extents([70, 300]);
        self.longest(1);
        let (y, dx) = op(self, &self.operand("x", shape)?, &self.operand("dy", shape)?)?;
        self.result("y", &y)?;
        self.result("dx", &dx)
    }

    /// A function of two tensors of one shape.
    fn pair(&self, op: impl Fn(&Self, &Tensor<'s>, &Tensor<'s>) -> Result<Tensor<'s>>) -> Result<()> {
        let shape = self.extents([70, 300]);
        self.longest(1);
        self.result("y", &op(self, &self.operand("a", shape)?, &self.operand("b", shape)?)?)
    }

    /// A function of rows, with the length of its longest sum.
    fn reduced<T: Element>(
        &self,
        length: impl Fn(&Shape) -> usize,
        op: impl Fn(&Self, &Tensor<'s>) -> Result<Tensor<'s, T>>,
    ) -> Result<()> {
        let x = self.operand("x", self.extents([270, 300]))?;
        self.longest(length(&x.shape()));
        self.result("y", &op(self, &x)?)
    }
}
