//! Each fused op computes what its composition of primitives computes, and so do its gradients.
//!
//! A fusion is tested on random operands, which are parameters, so that every gradient can be read.
//! Its result is weighted by random coefficients and summed. In f32 both ways are within the
//! tolerance of a sum of that length. In BF16 each intermediate result of the composition is
//! rounded.

use crate::gradients::{Handles, ParameterValues, ROUNDING, leaf_as, normal, parameters_of, stack, stored_as_each};
use crate::hostile::attack;
use crate::support::{Random, on_each_device, relative_l2, tolerance};
use stepscope::ops::{Activation, AttentionConfig, ConvolutionConfig, LmHeadConfig, Rotary};
use stepscope::parameters::StackedParameters;
use stepscope::tensor::{Element, Indices, Shape};
use stepscope::{Arena, Capacity, Device, EagerStep, Gradients, Parameter, Result, Tape, Var, bf16};

/// A sum of this many terms is the longest of a fusion.
const LONGEST: usize = 64;
/// The results of a composition in BF16 that are rounded one after the other, at most.
const ROUNDINGS: f64 = 12.0;
const EPSILON: f32 = 1e-5;
/// The labels of rows, and the ids of tokens.
const IDS: [u32; 6] = [3, 0, 7, 7, 2, 5];

/// The tape of one way to compute a fusion, with the operands.
struct Way<'w, 't, 's> {
    step: &'w EagerStep<'s>,
    tape: &'w Tape<'t, 's>,
    handles: &'w Handles,
}

impl<'s> Way<'_, '_, 's> {
    /// Returns an operand as a variable.
    fn var<S: Activation>(&self, number: usize) -> Result<Var<'s, S>> {
        leaf_as(self.tape, self.handles[number])
    }

    fn parameter(&self, number: usize) -> Parameter {
        self.handles[number]
    }

    fn stack(&self, number: usize) -> &StackedParameters {
        &self.handles.stacks[number]
    }

    fn ids(&self, shape: impl Into<Shape>) -> Result<Indices<'s>> {
        self.step.upload_indices(&IDS, shape)
    }
}

/// The result of one way to compute a fusion, and the gradients of the operands.
type Computed = Vec<Vec<f32>>;

/// Compares a fused op with its composition, for normal operands.
fn compare<S: Activation, T: Activation>(
    device: &Device,
    name: &str,
    shapes: &[&[usize]],
    fused: impl for<'w, 't, 's> Fn(Way<'w, 't, 's>) -> Result<Var<'s, T>>,
    composed: impl for<'w, 't, 's> Fn(Way<'w, 't, 's>) -> Result<Var<'s, T>>,
) {
    let mut random = Random::new(name.len() as u64);
    let operands: Vec<_> = shapes.iter().map(|shape| normal(&mut random, shape)).collect();
    compare_on::<S, T>(device, name, &operands, &fused, &composed);
}

/// Compares a fused op with its composition, for operands that are stored as `S`.
fn compare_on<S: Activation, T: Activation>(
    device: &Device,
    name: &str,
    operands: &[ParameterValues],
    fused: &dyn for<'w, 't, 's> Fn(Way<'w, 't, 's>) -> Result<Var<'s, T>>,
    composed: &dyn for<'w, 't, 's> Fn(Way<'w, 't, 's>) -> Result<Var<'s, T>>,
) {
    let is_bf16 = <S as Element>::NAME == <bf16 as Element>::NAME;
    let (mut parameters, handles) = parameters_of(device, operands);
    if is_bf16 {
        parameters = parameters.with_bf16_copy().unwrap();
    }
    let mut arena = Arena::builder(device).capacity(Capacity::mib(384)).build().unwrap();
    let mut compute = |way: &dyn for<'w, 't, 's> Fn(Way<'w, 't, 's>) -> Result<Var<'s, T>>| -> Computed {
        let mut gradients = Gradients::zeros(&parameters).unwrap();
        let result = arena.step(|step| {
            let tape = Tape::new(step, &parameters);
            let y = tape.to_f32(&way(Way { step, tape: &tape, handles: &handles })?)?;
            let coefficients = Random::new(9).normals(y.shape().elements());
            let loss = (y * tape.input(step.upload(&coefficients, y.shape())?))?.sum(..)?;
            tape.backward(&loss, &mut gradients)?;
            step.read(y.value())
        });
        let of = |stack: &StackedParameters| {
            stack.members().iter().flat_map(|member| gradients.read(*member).unwrap()).collect()
        };
        [result.unwrap()].into_iter().chain(handles.stacks.iter().map(of)).collect()
    };
    let roundings = if is_bf16 { ROUNDINGS } else { 0.0 };
    let limit = 2.0 * tolerance(LONGEST) + roundings * ROUNDING;
    for (number, (got, want)) in compute(fused).iter().zip(compute(composed)).enumerate() {
        let want: Vec<f64> = want.iter().map(|&value| f64::from(value)).collect();
        let error = relative_l2(got, &want);
        println!("{name}, {number}: {error:.2e} of {limit:.2e}");
        assert!(error <= limit, "{name}, result or gradient {number}: {error:.2e} > {limit:.2e}");
        assert!(want.iter().any(|&value| value != 0.0), "{name}, result or gradient {number} is zero");
    }
}

fn product<'s, S: Activation>(way: &Way<'_, '_, 's>, [x, w, b]: [usize; 3]) -> Result<Var<'s, S>> {
    way.var::<S>(x)?.matmul(&way.var(w)?)? + way.var(b)?
}

fn gelu<'s, S: Activation>(x: &Var<'s, S>) -> Result<Var<'s, S>> {
    let inner = ((x + (x.square()? * (x * 0.044_715)?)?)? * (2.0 / std::f32::consts::PI).sqrt())?;
    (x * 0.5)? * (inner.tanh()? + 1.0)?
}

fn silu<'s, S: Activation>(x: &Var<'s, S>) -> Result<Var<'s, S>> {
    x / ((-x)?.exp()? + 1.0)?
}

fn lstm<'s, S: Activation>(
    gates: &Var<'s, S>,
    weights: &Var<'s, S>,
    mut state: Option<[Var<'s, S>; 2]>,
) -> Result<[Var<'s, S>; 3]> {
    let mut all = Vec::new();
    for gates in gates.unbind(1)? {
        let sums = state.map_or(Ok(gates), |[h, _]| gates.add(h.matmul(weights)?))?;
        let [i, f, g, o] = sums.chunks::<4>(-1)?;
        let new = (i.sigmoid()? * g.tanh()?)?;
        let c = state.map_or(Ok(new), |[_, c]| new.add((f.sigmoid()? * c)?))?;
        let h = (o.sigmoid()? * c.tanh()?)?;
        all.push(h);
        state = Some([h, c]);
    }
    let [h, c] = state.expect("there is a token");
    Ok([Var::stack(&all, 1)?, h, c])
}

fn layer_norm<'s, S: Activation>(x: &Var<'s, S>, gain: &Var<'s, S>, bias: &Var<'s, S>) -> Result<Var<'s, S>> {
    let centered = (x - x.mean_keep(-1)?)?;
    let scale = (centered.square()?.mean_keep(-1)? + EPSILON)?.rsqrt()?;
    ((centered * scale)? * gain)? + bias
}

fn rms_norm<'s, S: Activation>(x: &Var<'s, S>, gain: &Var<'s, S>) -> Result<Var<'s, S>> {
    (x * (x.square()?.mean_keep(-1)? + EPSILON)?.rsqrt()?)? * gain
}

/// Computes the mean over rows of the cross-entropy with [`IDS`].
fn cross_entropy<'s>(way: &Way<'_, '_, 's>, logits: &Var<'s>) -> Result<Var<'s>> {
    let chosen = logits.gather(-1, &way.ids([6, 1])?)?.squeeze(-1)?;
    (logits.logsumexp(-1)? - chosen)?.mean(..)
}

/// Computes attention from `[samples, tokens, (heads + 2 kv_heads) width]`, with a bias of 0 or
/// minus infinity for the causal mask.
fn attention<'s, S: Activation>(
    way: &Way<'_, '_, 's>,
    qkv: &Var<'s, S>,
    [heads, kv_heads, width]: [usize; 3],
) -> Result<Var<'s, S>> {
    let [samples, tokens, _] = *qkv.shape().extents() else { unreachable!("three extents") };
    // [samples, kv_heads, heads of each, tokens, width]
    let of = |first: usize, heads: usize| {
        let part = qkv.narrow(-1, first * width..(first + heads) * width)?;
        part.reshape([samples, tokens, kv_heads, heads / kv_heads, width])?.permute([0, 2, 3, 1, 4])
    };
    let (q, k, v) = (of(0, heads)?, of(heads, kv_heads)?, of(heads + kv_heads, kv_heads)?);
    let later = |at: usize| if at % tokens > at / tokens { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..tokens * tokens).map(later).collect();
    let mask = way.tape.stored_as::<S>(&way.tape.input(way.step.upload(&mask, [tokens, tokens])?))?;
    let scores = ((q.matmul(&k.transpose(-1, -2)?)? * (1.0 / (width as f32).sqrt()))? + mask)?;
    let weights = scores.softmax()?;
    weights.matmul(&v)?.permute([0, 3, 1, 2, 4])?.reshape([samples, tokens, heads * width])
}

/// Rotates the pairs `(i, i + width / 2)` of each head.
fn rotary<'s, S: Activation>(way: &Way<'_, '_, 's>, x: &Var<'s, S>, width: usize) -> Result<Var<'s, S>> {
    let [samples, tokens, columns] = *x.shape().extents() else { unreachable!("three extents") };
    let half = width / 2;
    let angles: Vec<f32> = (0..tokens * half)
        .map(|at| (at / half) as f32 * 10_000f32.powf(-2.0 * (at % half) as f32 / width as f32))
        .collect();
    let angles = way.tape.input(way.step.upload(&angles, [tokens, 1, half])?);
    let (cos, sin) = (way.tape.stored_as::<S>(&angles.cos()?)?, way.tape.stored_as::<S>(&angles.sin()?)?);
    let [a, b] = x.reshape([samples, tokens, columns / width, width])?.chunks::<2>(-1)?;
    let rotated = [((a * cos)? - (b * sin)?)?, ((a * sin)? + (b * cos)?)?];
    Var::cat(&rotated, -1)?.reshape(x.shape())
}

/// Returns a config of four heads, of which two share a key head.
fn config<'s>() -> AttentionConfig<'s> {
    AttentionConfig::new(4).kv_heads(2).causal()
}

stored_as_each! {
    fn products<S>(device: &Device) {
        let (shapes, all): ([&[usize]; 4], _) = ([&[2, 3, 16], &[16, 8], &[8], &[2, 3, 8]], [0, 1, 2]);
        let [x, w, b] = all;
        compare::<S, S>(device, "linear", &shapes[..3],
            |way| way.tape.linear(&way.var(x)?, way.parameter(w), Some(way.parameter(b))),
            |way| product(&way, all));
        compare::<S, S>(device, "linear_residual", &shapes,
            |way| way.tape.linear_residual(&way.var(x)?, way.parameter(w), Some(way.parameter(b)), &way.var(3)?),
            |way| product(&way, all)? + way.var(3)?);
        compare::<S, S>(device, "linear_gelu", &shapes[..3],
            |way| way.tape.linear_gelu(&way.var(x)?, way.parameter(w), Some(way.parameter(b))),
            |way| gelu(&product::<S>(&way, all)?));
        compare::<S, S>(device, "linear_silu", &shapes[..3],
            |way| way.tape.linear_silu(&way.var(x)?, way.parameter(w), Some(way.parameter(b))),
            |way| silu(&product::<S>(&way, all)?));
        compare::<S, S>(device, "linear_swiglu", &shapes,
            |way| way.tape.linear_swiglu(&way.var(x)?, way.parameter(w), Some(way.parameter(b)), &way.var(3)?),
            |way| silu(&way.var::<S>(3)?)? * product(&way, all)?);
        compare::<S, S>(device, "mlp_gelu", &[shapes[0], shapes[1], shapes[2], &[8, 16], &[16]],
            |way| {
                let [up, down] = [[1, 2], [3, 4]].map(|[w, b]| (way.parameter(w), Some(way.parameter(b))));
                way.tape.mlp_gelu(&way.var(x)?, up, down, Some(&way.var(x)?))
            },
            |way| {
                let hidden = gelu(&product::<S>(&way, all)?)?;
                (hidden.matmul(&way.var(3)?)? + way.var(4)?)? + way.var(x)?
            });
    }

    fn functions<S>(device: &Device) {
        type Unary<S> = for<'s> fn(&Var<'s, S>) -> Result<Var<'s, S>>;
        let all: [(&str, Unary<S>, Unary<S>); 9] = [
            ("gelu", |x| x.gelu(), gelu),
            ("gelu_exact", |x| x.gelu_exact(), |x| (x * 0.5)? * ((x * std::f32::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?),
            ("silu", |x| x.silu(), silu),
            ("sigmoid", |x| x.sigmoid(), |x| ((-x)?.exp()? + 1.0)?.pow(-1.0)),
            ("softplus", |x| x.softplus(), |x| x.exp()?.log1p()),
            ("relu", |x| x.relu(), |x| x.maximum(0.0)),
            ("relu_squared", |x| x.relu_squared(), |x| x.maximum(0.0)?.square()),
            ("softmax", |x| x.softmax(), |x| x.exp()? / x.exp()?.sum_keep(-1)?),
            ("log_softmax", |x| x.log_softmax(), |x| x - x.logsumexp(-1)?.unsqueeze(-1)?),
        ];
        for (name, fused, composed) in all {
            compare::<S, S>(device, name, &[&[5, 8]], |way| fused(&way.var(0)?), |way| composed(&way.var(0)?));
        }
        compare::<S, S>(device, "swiglu", &[&[5, 8], &[5, 8]],
            |way| way.tape.swiglu(&way.var(0)?, &way.var(1)?),
            |way| silu(&way.var::<S>(0)?)? * way.var(1)?);
        compare::<S, S>(device, "swiglu_packed", &[&[5, 16]],
            |way| way.tape.swiglu_packed(&way.var(0)?),
            |way| {
                let [gate, up] = way.var::<S>(0)?.chunks::<2>(-1)?;
                silu(&gate)? * up
            });
        compare::<S, S>(device, "mean_tokens", &[&[2, 5, 8]],
            |way| way.tape.mean_tokens(&way.var(0)?), |way| way.var::<S>(0)?.mean(1));
    }

    fn lstms<S>(device: &Device) {
        // 3 samples of 5 columns are no whole vectors.
        for (width, tokens) in [(8, 4), (5, 2), (5, 1)] {
            let shapes: [&[usize]; 4] = [&[3, tokens, 4 * width], &[width, 4 * width], &[3, width], &[3, width]];
            compare::<S, S>(device, "lstm", &shapes,
                |way| {
                    let [y, h, c] = way.tape.lstm(&way.var(0)?, way.parameter(1), Some([&way.var(2)?, &way.var(3)?]))?;
                    y.add((h * c)?.unsqueeze(1)?)
                },
                |way| {
                    let [y, h, c] = lstm::<S>(&way.var(0)?, &way.var(1)?, Some([way.var(2)?, way.var(3)?]))?;
                    y.add((h * c)?.unsqueeze(1)?)
                });
            if tokens > 1 {
                compare::<S, S>(device, "lstm from zeros", &shapes[..2],
                    |way| Ok(way.tape.lstm(&way.var::<S>(0)?, way.parameter(1), None)?[0]),
                    |way| Ok(lstm::<S>(&way.var(0)?, &way.var(1)?, None)?[0]));
            }
        }
    }

    fn norms<S>(device: &Device) {
        let shapes: [&[usize]; 4] = [&[5, 16], &[16], &[16], &[5, 16]];
        compare::<S, S>(device, "layer_norm", &shapes[..3],
            |way| way.tape.layer_norm(&way.var(0)?, way.parameter(1), way.parameter(2), EPSILON),
            |way| layer_norm::<S>(&way.var(0)?, &way.var(1)?, &way.var(2)?));
        compare::<S, S>(device, "rms_norm", &shapes[..2],
            |way| way.tape.rms_norm(&way.var(0)?, way.parameter(1), EPSILON),
            |way| rms_norm::<S>(&way.var(0)?, &way.var(1)?));
        compare::<S, S>(device, "layer_norm_residual", &shapes,
            |way| {
                let [h, y] = way.tape.layer_norm_residual(&way.var(0)?, &way.var(3)?, way.parameter(1), way.parameter(2), EPSILON)?;
                h.add(y)
            },
            |way| {
                let h = (way.var::<S>(0)? + way.var(3)?)?;
                layer_norm(&h, &way.var(1)?, &way.var(2)?)? + h
            });
        compare::<S, S>(device, "rms_norm_residual", &[shapes[0], shapes[1], shapes[3]],
            |way| {
                let [h, y] = way.tape.rms_norm_residual(&way.var(0)?, &way.var(2)?, way.parameter(1), EPSILON)?;
                h.add(y)
            },
            |way| {
                let h = (way.var::<S>(0)? + way.var(2)?)?;
                rms_norm(&h, &way.var(1)?)? + h
            });
    }

    fn tokens<S>(device: &Device) {
        compare::<S, S>(device, "embedding", &[&[8, 16]],
            |way| way.tape.embedding(way.parameter(0), way.ids([2, 3])?),
            |way| way.var::<S>(0)?.gather(0, &way.ids([6])?)?.reshape([2, 3, 16]));
        compare::<S, S>(device, "add_positions", &[&[2, 3, 16], &[5, 16]],
            |way| way.tape.add_positions(&way.var(0)?, way.parameter(1)),
            |way| way.var::<S>(0)? + way.var::<S>(1)?.narrow(0, 0..3)?);
        compare::<S, S>(device, "rotary", &[&[2, 5, 64]],
            |way| way.tape.rotary(&way.var(0)?, Rotary::default(), &config()),
            |way| {
                let qkv = way.var::<S>(0)?;
                Var::cat(&[rotary(&way, &qkv.narrow(-1, 0..48)?, 8)?, qkv.narrow(-1, 48..64)?], -1)
            });
    }

    fn attentions<S>(device: &Device) {
        compare::<S, S>(device, "attend", &[&[2, 3, 5, 8], &[2, 3, 7, 8], &[2, 3, 7, 6]],
            |way| way.var::<S>(0)?.attend(&way.var(1)?, &way.var(2)?),
            |way| way.var::<S>(0)?.matmul_with(&way.var(1)?, [false, true])?.softmax()?.matmul(&way.var(2)?));
        compare::<S, S>(device, "attention", &[&[2, 6, 128]],
            |way| way.tape.attention(&way.var(0)?, None, &config()),
            |way| attention::<S>(&way, &way.var(0)?, [4, 2, 16]));
        let mut random = Random::new(11);
        let operands = [normal(&mut random, &[2, 6, 128]), stack(&mut random, 2, &[16])];
        compare_on::<S, S>(device, "qk_norm", &operands,
            &|way| way.tape.qk_norm(&way.var(0)?, way.stack(1), EPSILON, &config()),
            &|way| {
                let qkv = way.var::<S>(0)?;
                let of = |columns, member: usize| {
                    let gain = way.tape.stored_as::<S>(&way.tape.parameter(way.stack(1).members()[member])?)?;
                    let part = qkv.narrow(-1, columns)?;
                    rms_norm(&part.reshape([2, 6, part.shape().extents()[2] / 16, 16])?, &gain)?.reshape(part.shape())
                };
                Var::cat(&[of(0..64, 0)?, of(64..96, 1)?, qkv.narrow(-1, 96..128)?], -1)
            });
    }

    fn losses<S>(device: &Device) {
        compare::<S, f32>(device, "cross_entropy", &[&[6, 8]],
            |way| way.tape.cross_entropy(&way.var::<S>(0)?, way.ids([6])?),
            |way| cross_entropy(&way, &way.tape.to_f32(&way.var::<S>(0)?)?));
        compare::<S, f32>(device, "linear_cross_entropy", &[&[6, 16], &[16, 8]],
            |way| {
                let labels = way.ids([6])?;
                way.tape.linear_cross_entropy(&way.var::<S>(0)?, way.parameter(1), labels, LmHeadConfig::default())
            },
            |way| {
                let logits = way.var::<S>(0)?.matmul(&way.var(1)?)?;
                cross_entropy(&way, &way.tape.to_f32(&logits)?)
            });
    }
}

on_each_device! {
    /// Two images, two matrices and a product whose scratch is that of two pieces.
    fn batches_in_pieces(device: &Device) {
        compare::<f32, f32>(device, "attend", &[&[2, 2048, 1], &[2, 2104, 1], &[2, 2104, 1]],
            |way| way.var::<f32>(0)?.attend(&way.var(1)?, &way.var(2)?),
            |way| way.var::<f32>(0)?.matmul_with(&way.var(1)?, [false, true])?.softmax()?.matmul(&way.var(2)?));
        let config = ConvolutionConfig { padding: [0, 1], ..ConvolutionConfig::default() };
        compare::<f32, f32>(device, "conv2d", &[&[2, 1, 607, 512], &[1, 1, 32, 3]],
            |way| way.var::<f32>(0)?.conv2d(&way.var(1)?, config),
            |way| {
                let (x, weight) = (way.var::<f32>(0)?, way.var(1)?);
                let image = |at| x.narrow(0, at..at + 1)?.conv2d(&weight, config);
                Var::cat(&[image(0)?, image(1)?], 0)
            });
        compare::<f32, f32>(device, "mul", &[&[2049, 4100], &[2049, 1]],
            |way| way.var::<f32>(0)? * way.var(1)?,
            |way| {
                let x = way.var::<f32>(0)?;
                x * way.var(1)?.broadcast_to(x.shape())?
            });
    }
}

attack! {
    lstm::lstm_forward <S> { gates: stored 72, c: stored 18, width: number 6, c_out: out_stored 18, h: out_stored 18 }
    lstm::lstm_backward <S> {
        gates: stored 72, c: stored 18, c_out: stored 18, dh: stored 18, dc_out: stored 18, width: number 6,
        dgates: out_stored 72, dc: out_stored 18,
    }
}
