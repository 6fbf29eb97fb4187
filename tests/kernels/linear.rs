//! Linear layers on a tape: their gradients. The bits of the products are those of `matmul.rs`.

use crate::elementwise::add_in_float64;
use crate::gradients::{Case, ParameterValues, SEEDS, extents, leaf, longest, normal, stack};
use crate::reference::{gelu, silu};
use crate::support::{Random, on_each_device};

/// Rows, inner and outer extents of a linear layer: more than a tile of rows, or a long sum.
fn shape(random: &mut Random, seed: u64) -> [usize; 3] {
    extents(random, seed, if seed % 2 == 1 { [131, 19, 9] } else { [9, 307, 7] })
}

/// `[rows, k]`, `[k, n]` and `[n]`, the products of variance 1.
pub(crate) fn operands(random: &mut Random, [rows, k, n]: [usize; 3]) -> Vec<ParameterValues> {
    let mut w = normal(random, &[k, n]);
    w.values.iter_mut().for_each(|w| *w /= (k as f32).sqrt());
    vec![normal(random, &[rows, k]), w, normal(random, &[n])]
}

/// `x w + b` in float64; `x`: `[rows, k]`, `w`: `[k, n]`, `b`: `[n]` or nothing.
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

    /// The gate is a product of the same x, as in a layer: so x gets a gradient from both.
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
                tape.linear_per_token(&x, &p.stacks[0], &p.stacks[1])
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
