//! The gradients of linear layers on a tape. `matmul.rs` tests the bits of the products.

use crate::crossasset::linear_per_token;
use crate::elementwise::add_in_float64;
use crate::gradients::{
    Case, Handles, ParameterValues, SEEDS, extents, leaf, leaf_as, longest, normal, parameters_of, stack,
};
use crate::reference::{gelu, silu};
use crate::support::{Random, on_each_device, relative_l2};
use crate::trial::assert_same;
use kernels::stored::Stored as _;
use stepscope::ops::{self, Activation, Gemm};
use stepscope::tensor::{Saved, Source};
use stepscope::{Arena, Capacity, Device, Gradients, Parameters, Tape, bf16};

/// Returns rows, inner and outer extents of a linear layer: more than a tile of rows, or a long
/// sum.
fn shape(random: &mut Random, seed: u64) -> [usize; 3] {
    extents(random, seed, if seed % 2 == 1 { [131, 19, 9] } else { [9, 307, 7] })
}

/// Returns `[rows, k]`, `[k, n]` and `[n]`, with products of variance 1.
pub(crate) fn operands(random: &mut Random, [rows, k, n]: [usize; 3]) -> Vec<ParameterValues> {
    let mut w = normal(random, &[k, n]);
    w.values.iter_mut().for_each(|w| *w /= (k as f32).sqrt());
    vec![normal(random, &[rows, k]), w, normal(random, &[n])]
}

/// Computes `x w + b` in float64; `x`: `[rows, k]`, `w`: `[k, n]`, `b`: `[n]` or nothing.
pub(crate) fn in_float64(x: &[f64], w: &[f64], b: &[f64], k: usize, n: usize) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len() / k * n);
    for row in x.chunks_exact(k) {
        let mut sums = if b.is_empty() { vec![0.0; n] } else { b.to_vec() };
        for (x, w) in row.iter().zip(w.chunks_exact(n)) {
            sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
        }
        y.extend(sums);
    }
    y
}

fn with_gelu(x: Vec<f64>) -> Vec<f64> {
    x.into_iter().map(gelu).collect()
}

/// Returns the gradients of x, W1, b1, W2 and b2 on a tape, in an MLP of S with or without a
/// residual x. The output has the gradient `dy`.
fn gradients_of_mlp<S: Activation>(
    device: &Device,
    parameters: &Parameters,
    p: &Handles,
    dy: &[f32],
    with_residual: bool,
) -> Vec<Vec<f32>> {
    let mut gradients = Gradients::zeros(parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    arena
        .step(|step| {
            let tape = Tape::new(step, parameters);
            let x = leaf_as::<S>(&tape, p[0])?;
            let y = tape.mlp_gelu(&x, (p[1], Some(p[2])), (p[3], Some(p[4])), with_residual.then_some(&x))?;
            let dy = step.upload(&dy.iter().map(|&dy| S::narrow(dy)).collect::<Vec<_>>(), y.shape())?.save();
            let loss = tape
                .op("weighed", [&y])?
                .record(ops::fill(step, [1], 0.0)?.save(), move |back, _| back.add(&y, ops::copy(back.step(), &dy)?));
            tape.backward(&loss, &mut gradients)
        })
        .unwrap();
    (0..5).map(|number| gradients.read(p[number]).unwrap()).collect()
}

/// Computes dx, dW1 and dW2 of that MLP in BF16 by single ops, and the terms of the gradients of b1
/// and b2.
fn by_hand(
    device: &Device,
    parameters: &Parameters,
    p: &Handles,
    dy: &[f32],
    with_residual: bool,
) -> ([Vec<f32>; 3], [Vec<f32>; 2]) {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let result = arena.step(|step| {
        let (w1, w2) = (parameters.lend_as::<bf16>(step, p[1])?, parameters.lend_as::<bf16>(step, p[3])?);
        let (x, b1) = (parameters.lend_as::<bf16>(step, p[0])?, parameters.lend(step, p[2])?);
        let ([rows, k], hidden) = (x.shape().as_rows(), b1.shape().elements());
        let dy = step.upload(&dy.iter().map(|&dy| bf16::narrow(dy)).collect::<Vec<_>>(), [rows, k])?;
        let (h, pre) = ops::linear_gelu(step, &x, &w1, Some(&b1))?;
        let dpre = ops::launch::gelu_linear_backward(step, &pre, &w2, &dy)?;
        let mut dw = [step.empty::<f32>([k, hidden])?, step.empty([hidden, k])?];
        let (none, mut dx) = (None::<&Saved<'_>>, ops::copy(step, &dy)?);
        ops::gemm_into(step, &Gemm::new(k, hidden, rows).transpose_a(), &x, &dpre, none, &mut dw[0])?;
        ops::gemm_into(step, &Gemm::new(hidden, k, rows).transpose_a(), &h, &dy, none, &mut dw[1])?;
        let form = Gemm { beta: f32::from(u8::from(with_residual)), ..Gemm::new(rows, k, hidden).transpose_b() };
        ops::gemm_into(step, &form, &dpre, &w1, none, &mut dx)?;
        let wide = |x: Vec<bf16>| x.into_iter().map(f32::from).collect::<Vec<_>>();
        let [dx, dpre, dy] = [step.read(&dx)?, step.read(&dpre)?, step.read(&dy)?].map(wide);
        Ok(([dx, step.read(&dw[0])?, step.read(&dw[1])?], [dpre, dy]))
    });
    result.unwrap()
}

on_each_device! {
    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = shape(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let values = operands(&mut random, [rows, k, n]);
            Case::new("linear", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear(&leaf(tape, p[0])?, p[1], Some(p[2]))
            }, |p| in_float64(&p[0], &p[1], &p[2], k, n));
            Case::new("linear without bias", seed, length, values[..2].to_vec()).check(device, |_, tape, p| {
                tape.linear(&leaf(tape, p[0])?, p[1], None)
            }, |p| in_float64(&p[0], &p[1], &[], k, n));
        }
    }

    fn gradient_of_linear_gelu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = shape(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let values = operands(&mut random, [rows, k, n]);
            Case::new("linear_gelu", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear_gelu(&leaf(tape, p[0])?, p[1], Some(p[2]))
            }, |p| with_gelu(in_float64(&p[0], &p[1], &p[2], k, n)));
            Case::new("linear_gelu without bias", seed, length, values[..2].to_vec()).check(device, |_, tape, p| {
                tape.linear_gelu(&leaf(tape, p[0])?, p[1], None)
            }, |p| with_gelu(in_float64(&p[0], &p[1], &[], k, n)));
        }
    }

    /// Tests the op with and without biases, added to nothing, to another variable, or to x itself.
    fn gradient_of_mlp_gelu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, hidden] = extents(&mut random, seed, if seed % 2 == 1 { [35, 5, 9] } else { [7, 9, 33] });
            let length = longest(&[rows, k, hidden]);
            let mut values = operands(&mut random, [rows, k, hidden]);
            values.extend(operands(&mut random, [rows, hidden, k]).into_iter().skip(1));
            values.push(normal(&mut random, &[rows, k]));
            let mlp = |p: &[Vec<f64>], b1: &[f64], b2: &[f64]| {
                in_float64(&with_gelu(in_float64(&p[0], &p[1], b1, k, hidden)), &p[3], b2, hidden, k)
            };
            Case::new("mlp_gelu", seed, length, values[..5].to_vec()).check(device, |_, tape, p| {
                tape.mlp_gelu(&leaf(tape, p[0])?, (p[1], Some(p[2])), (p[3], Some(p[4])), None)
            }, |p| mlp(p, &p[2], &p[4]));
            Case::new("mlp_gelu, residual", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.mlp_gelu(&leaf(tape, p[0])?, (p[1], Some(p[2])), (p[3], Some(p[4])), Some(&leaf(tape, p[5])?))
            }, |p| add_in_float64(&p[5], &mlp(p, &p[2], &p[4])));
            Case::new("mlp_gelu without biases, twice", seed, length, values).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let y = tape.mlp_gelu(&x, (p[1], None), (p[3], None), Some(&x))?;
                // The others are used, so that they have the gradients of the reference.
                y.add(leaf(tape, p[5])?)
            }, |p| add_in_float64(&p[5], &add_in_float64(&p[0], &mlp(p, &[], &[]))));
        }
    }

    /// The gradients of a BF16 MLP match those of its single ops bit for bit. Only the biases
    /// differ: their gradients are sums of stored values. All gradients are those of f32 up to BF16
    /// roundings, each off by less than 2^-9 of the norm of many. The rounded values are `pre`
    /// (which changes gelu and gelu' by at most 1.13 times its error), gelu, the gradient of `pre`,
    /// and that of x.
    fn an_mlp_of_bf16(device: &Device) {
        let ([rows, k, hidden], mut random) = ([131, 24, 40], Random::new(3));
        let mut values = operands(&mut random, [rows, k, hidden]);
        values.extend(operands(&mut random, [rows, hidden, k]).into_iter().skip(1));
        let round = |values: &mut Vec<f32>| values.iter_mut().for_each(|x| *x = bf16::narrow(*x).widen());
        values.iter_mut().for_each(|operand| round(&mut operand.values));
        let mut dy = random.normals(rows * k);
        round(&mut dy);
        let (parameters, p) = parameters_of(device, &values);
        let parameters = parameters.with_bf16_copy().unwrap();
        for with_residual in [false, true] {
            let halves = gradients_of_mlp::<bf16>(device, &parameters, &p, &dy, with_residual);
            let floats = gradients_of_mlp::<f32>(device, &parameters, &p, &dy, with_residual);
            for (number, (got, want)) in halves.iter().zip(&floats).enumerate() {
                let exact: Vec<f64> = want.iter().map(|&x| x.into()).collect();
                let (error, limit) = (relative_l2(got, &exact), 4.13 * 2f64.powi(-9));
                println!("parameter {number}: {error:.2e} of {limit:.2e}");
                assert!(error <= limit, "parameter {number}: {error:.2e} > {limit:.2e}");
            }
            let (by_hand, biases) = by_hand(device, &parameters, &p, &dy, with_residual);
            for ([number, name], want) in [[0, 0], [1, 1], [3, 2]].into_iter().zip(&by_hand) {
                assert_same(["dx", "dw1", "dw2"][name], &halves[number], want);
            }
            for (number, terms) in [2, 4].into_iter().zip(&biases) {
                for (column, &got) in halves[number].iter().enumerate() {
                    let terms = terms.iter().skip(column).step_by(halves[number].len());
                    let [sum, size] = terms.fold([0.0; 2], |[sum, size], &x| [sum + f64::from(x), size + f64::from(x).abs()]);
                    let bound = rows as f64 * 2f64.powi(-24) * size;
                    assert!((f64::from(got) - sum).abs() <= bound, "parameter {number}, {column}: {got} for {sum}");
                }
            }
        }
    }

    fn gradient_of_linear_silu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = shape(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let values = operands(&mut random, [rows, k, n]);
            let with_silu = |x: Vec<f64>| x.into_iter().map(silu).collect::<Vec<f64>>();
            Case::new("linear_silu", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear_silu(&leaf(tape, p[0])?, p[1], Some(p[2]))
            }, |p| with_silu(in_float64(&p[0], &p[1], &p[2], k, n)));
            Case::new("linear_silu without bias", seed, length, values[..2].to_vec()).check(device, |_, tape, p| {
                tape.linear_silu(&leaf(tape, p[0])?, p[1], None)
            }, |p| with_silu(in_float64(&p[0], &p[1], &[], k, n)));
        }
    }

    /// The gate is a product of the same x, as in a layer, so x gets a gradient from both.
    fn gradient_of_linear_swiglu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = shape(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let mut values = operands(&mut random, [rows, k, n]);
            values.push(operands(&mut random, [rows, k, n]).remove(1));
            let gated = |gate: &[f64], up: &[f64]| gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect::<Vec<f64>>();
            Case::new("linear_swiglu", seed, length, values.clone()).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let gate = tape.linear(&x, p[3], None)?;
                tape.linear_swiglu(&x, p[1], Some(p[2]), &gate)
            }, |p| gated(&in_float64(&p[0], &p[3], &[], k, n), &in_float64(&p[0], &p[1], &p[2], k, n)));
        }
    }

    fn gradient_of_linear_residual(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = shape(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let mut values = operands(&mut random, [rows, k, n]);
            values.insert(2, normal(&mut random, &[rows, n]));
            Case::new("linear_residual", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear_residual(&leaf(tape, p[0])?, p[1], Some(p[3]), &leaf(tape, p[2])?)
            }, |p| add_in_float64(&p[2], &in_float64(&p[0], &p[1], &p[3], k, n)));
            Case::new("linear_residual without bias", seed, length, values[..3].to_vec()).check(device, |_, tape, p| {
                tape.linear_residual(&leaf(tape, p[0])?, p[1], None, &leaf(tape, p[2])?)
            }, |p| add_in_float64(&p[2], &in_float64(&p[0], &p[1], &[], k, n)));
        }
    }

    fn gradient_of_linear_per_token(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, k] = extents(&mut random, seed, if seed % 2 == 1 { [67, 3, 5] } else { [3, 4, 71] });
            // More than one token needs a multiple of 64 outputs.
            let n = if tokens == 1 { 7 } else { 64 };
            let x = random.normals(batch * tokens * k);
            let operands = vec![stack(&mut random, tokens, &[k, n]), stack(&mut random, tokens, &[n])];
            let case = Case::new("linear_per_token", seed, longest(&[batch, k]), operands);
            Case { sample: 300, ..case }.check(device, |step, tape, p| {
                let x = tape.input(step.upload(&x, [batch, tokens, k])?);
                linear_per_token(tape, &x, &p.stacks[0], &p.stacks[1])
            }, |p| {
                let mut y = Vec::new();
                for (row, x) in x.chunks_exact(k).enumerate() {
                    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                    let token = row % tokens;
                    let (w, b) = (&p[0][token * k * n..][..k * n], &p[1][token * n..][..n]);
                    y.extend(in_float64(&x, w, b, k, n));
                }
                y
            });
        }
    }
}
