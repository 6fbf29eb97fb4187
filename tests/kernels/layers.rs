//! The layers that are composed of ops on variables, and convolutions: values and gradients against
//! float64.

use crate::algebra::unused;
use crate::gradients::{Case, Handles, ParameterValues, Roundings, leaf_as, normal, stored_as_each};
use crate::support::{Random, on_each_device};
use crate::trial::assert_refused;
use stepscope::nn::{
    Conv1d, Conv2d, ConvTranspose2d, CrossAttention, ExpertLinear, GroupNorm, Gru, Linear, Lstm, Mixture, Sequential,
};
use stepscope::ops::{Activation, ConvolutionConfig};
use stepscope::{Arena, Capacity, Device, Result, Tape, Var};

/// A layer rounds each of many intermediate values.
const LAYER: Roundings = Roundings { forward: 12.0, backward: 16.0, kept: 16.0 };

/// Checks a layer and its gradients. Parameters are between -1/2 and 1/2.
fn check<S: Activation>(
    device: &Device,
    name: &'static str,
    shapes: &[&[usize]],
    on_tape: impl for<'t, 's> Fn(&Tape<'t, 's>, &Handles, &[Var<'s, S>]) -> Result<Var<'s, S>>,
    variables: usize,
    reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let mut random = Random::new(name.len() as u64);
    let values: Vec<ParameterValues> = shapes
        .iter()
        .map(|shape| {
            let mut operand = normal(&mut random, shape);
            operand.values.iter_mut().for_each(|value| *value *= 0.25);
            operand
        })
        .collect();
    Case::new(name, 0, 64, values).stored_as::<S>(LAYER).check(
        device,
        |_, tape, p| {
            let vars = (0..variables).map(|at| leaf_as::<S>(tape, p[at])).collect::<Result<Vec<_>>>()?;
            on_tape(tape, p, &vars)
        },
        reference,
    );
}

fn linear(p: &Handles, weight: usize, bias: Option<usize>) -> Linear {
    Linear { weight: p[weight], bias: bias.map(|bias| p[bias]), adapter: None }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns x w + b for rows of x.
fn affine(x: &[f64], w: &[f64], b: &[f64], inputs: usize) -> Vec<f64> {
    let outputs = w.len() / inputs;
    let row = |x: &[f64], column: usize| (0..inputs).map(|k| x[k] * w[k * outputs + column]).sum::<f64>();
    let bias = |column: usize| b.get(column).copied().unwrap_or(0.0);
    x.chunks(inputs).flat_map(|x| (0..outputs).map(move |column| row(x, column) + bias(column))).collect()
}

const BATCH: usize = 2;
const TOKENS: usize = 3;
const INPUTS: usize = 4;
const WIDTH: usize = 8;

/// Runs a cell over the tokens of each sample. It returns the state, which begins with the output.
fn recurrent(x: &[f64], states: usize, cell: impl Fn(&[f64], &[f64]) -> Vec<f64>) -> Vec<f64> {
    let mut all = Vec::new();
    for sample in x.chunks(TOKENS * INPUTS) {
        let mut state = vec![0.0; states * WIDTH];
        for token in sample.chunks(INPUTS) {
            state = cell(token, &state);
            all.extend(&state[..WIDTH]);
        }
    }
    all
}

/// Returns the convolution of x, `[batch, channels, h, w]`, and the extents of an image of it.
fn convolved(
    (x, [channels, h, w]): (&[f64], [usize; 3]),
    (weight, [out, kh, kw]): (&[f64], [usize; 3]),
    config: ConvolutionConfig,
) -> (Vec<f64>, [usize; 2]) {
    let ConvolutionConfig { stride, padding, dilation, groups } = config;
    let places = [[h, kh], [w, kw]]
        .into_iter()
        .zip(0..)
        .map(|([image, kernel], at): ([usize; 2], usize)| {
            (image + 2 * padding[at] - dilation[at] * (kernel - 1) - 1) / stride[at] + 1
        })
        .collect::<Vec<_>>();
    let (own, mut y) = (channels / groups, Vec::new());
    for image in x.chunks(channels * h * w) {
        for (o, row, column) in (0..out).flat_map(|o| {
            let columns = places[1];
            (0..places[0]).flat_map(move |row| (0..columns).map(move |column| (o, row, column)))
        }) {
            let mut sum = 0.0;
            for (c, (i, j)) in (0..own).flat_map(|c| (0..kh * kw).map(move |at| (c, (at / kw, at % kw)))) {
                let (row, column) = (row * stride[0] + i * dilation[0], column * stride[1] + j * dilation[1]);
                if (padding[0]..padding[0] + h).contains(&row) && (padding[1]..padding[1] + w).contains(&column) {
                    let channel = o / (out / groups) * own + c;
                    let place = (channel * h + row - padding[0]) * w + column - padding[1];
                    sum += image[place] * weight[((o * own + c) * kh + i) * kw + j];
                }
            }
            y.push(sum);
        }
    }
    (y, [places[0], places[1]])
}

/// Returns the transpose of a convolution applied to y: the gradient of the image by the sum of y
/// times the convolution, which is linear in the image.
fn transposed(
    y: &[f64],
    (weight, of_weight): (&[f64], [usize; 3]),
    (batch, image): (usize, [usize; 3]),
    config: ConvolutionConfig,
) -> Vec<f64> {
    let size: usize = image.iter().product();
    let of_sample = y.len() / batch;
    let mut x = vec![0.0; batch * size];
    for at in 0..size {
        let mut unit = vec![0.0; size];
        unit[at] = 1.0;
        let (response, _) = convolved((&unit, image), (weight, of_weight), config);
        for (sample, y) in y.chunks(of_sample).enumerate() {
            x[sample * size + at] = y.iter().zip(&response).map(|(y, by)| y * by).sum();
        }
    }
    x
}

fn configs() -> [ConvolutionConfig; 4] {
    let plain = ConvolutionConfig::default();
    [
        plain,
        ConvolutionConfig { padding: [1, 1], ..plain },
        ConvolutionConfig { stride: [2, 1], padding: [1, 0], groups: 2, ..plain },
        ConvolutionConfig { stride: [2, 3], padding: [2, 1], dilation: [2, 1], ..plain },
    ]
}

stored_as_each! {
    fn lstm<S>(device: &Device) {
        let shapes: [&[usize]; 4] =
            [&[BATCH, TOKENS, INPUTS], &[INPUTS, 4 * WIDTH], &[4 * WIDTH], &[WIDTH, 4 * WIDTH]];
        check::<S>(device, "lstm", &shapes, |tape, p, x| {
            Lstm { input: linear(p, 1, Some(2)), state: linear(p, 3, None) }.forward(tape, &x[0])
        }, 1, |p| recurrent(&p[0], 2, |x, state| {
            let (h, c) = state.split_at(WIDTH);
            let gates: Vec<f64> = affine(x, &p[1], &p[2], INPUTS).iter().zip(affine(h, &p[3], &[], WIDTH))
                .map(|(x, h)| x + h).collect();
            let gate = |number: usize, at: usize| gates[number * WIDTH + at];
            let c: Vec<f64> = (0..WIDTH)
                .map(|at| sigmoid(gate(1, at)) * c[at] + sigmoid(gate(0, at)) * gate(2, at).tanh()).collect();
            (0..WIDTH).map(|at| sigmoid(gate(3, at)) * c[at].tanh()).chain(c.iter().copied()).collect()
        }));
    }

    fn gru<S>(device: &Device) {
        let shapes: [&[usize]; 5] =
            [&[BATCH, TOKENS, INPUTS], &[INPUTS, 3 * WIDTH], &[3 * WIDTH], &[WIDTH, 3 * WIDTH], &[3 * WIDTH]];
        check::<S>(device, "gru", &shapes, |tape, p, x| {
            Gru { input: linear(p, 1, Some(2)), state: linear(p, 3, Some(4)), width: WIDTH }.forward(tape, &x[0])
        }, 1, |p| recurrent(&p[0], 1, |x, h| {
            let (x, of_h) = (affine(x, &p[1], &p[2], INPUTS), affine(h, &p[3], &p[4], WIDTH));
            (0..WIDTH).map(|at| {
                let [r, z] = [0, WIDTH].map(|gate| sigmoid(x[gate + at] + of_h[gate + at]));
                let n = (x[2 * WIDTH + at] + r * of_h[2 * WIDTH + at]).tanh();
                (1.0 - z) * n + z * h[at]
            }).collect()
        }));
    }

    fn cross_attention<S>(device: &Device) {
        const KEYS: usize = 5;
        let shapes: [&[usize]; 10] = [
            &[BATCH, TOKENS, WIDTH], &[BATCH, KEYS, INPUTS], &[TOKENS, KEYS], &[WIDTH, WIDTH], &[WIDTH],
            &[INPUTS, WIDTH], &[INPUTS, WIDTH], &[WIDTH], &[WIDTH, WIDTH], &[WIDTH],
        ];
        check::<S>(device, "cross_attention", &shapes, |tape, p, x| {
            let layer = CrossAttention {
                query: linear(p, 3, Some(4)),
                // A bias of keys adds the same to all scores of a query, which the softmax ignores.
                key: linear(p, 5, None),
                value: linear(p, 6, Some(7)),
                output: linear(p, 8, Some(9)),
                heads: 2,
            };
            layer.forward(tape, &x[0], &x[1], Some(&x[2]))
        }, 3, |p| {
            let q = affine(&p[0], &p[3], &p[4], WIDTH);
            let (k, v) = (affine(&p[1], &p[5], &[], INPUTS), affine(&p[1], &p[6], &p[7], INPUTS));
            let (head, mut mixed) = (WIDTH / 2, vec![0.0; BATCH * TOKENS * WIDTH]);
            for (sample, token, first) in (0..BATCH * TOKENS * 2)
                .map(|at| (at / (TOKENS * 2), at / 2 % TOKENS, at % 2 * head)) {
                let row = (sample * TOKENS + token) * WIDTH + first;
                let key = |key: usize| (sample * KEYS + key) * WIDTH + first;
                let weights: Vec<f64> = (0..KEYS).map(|other| {
                    let score: f64 = (0..head).map(|at| q[row + at] * k[key(other) + at]).sum();
                    (score / (head as f64).sqrt() + p[2][token * KEYS + other]).exp()
                }).collect();
                let all: f64 = weights.iter().sum();
                for at in 0..head {
                    mixed[row + at] = (0..KEYS).map(|other| weights[other] / all * v[key(other) + at]).sum();
                }
            }
            affine(&mixed, &p[8], &p[9], WIDTH)
        });
    }

    fn group_norm<S>(device: &Device) {
        let shapes: [&[usize]; 3] = [&[2, 6, 5], &[6], &[6]];
        check::<S>(device, "group_norm", &shapes, |tape, p, x| {
            GroupNorm { gain: p[1], bias: p[2], groups: 3, epsilon: 0.25 }.forward(tape, &x[0])
        }, 1, |p| {
            p[0].chunks(10).enumerate().flat_map(|(group, x)| {
                let mean = x.iter().sum::<f64>() / 10.0;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 10.0;
                x.iter().enumerate().map(move |(at, x)| {
                    let channel = group % 3 * 2 + at / 5;
                    (channel, (x - mean) / (variance + 0.25).sqrt())
                }).map(|(channel, x)| x * p[1][channel] + p[2][channel]).collect::<Vec<_>>()
            }).collect()
        });
    }

    fn mixture<S>(device: &Device) {
        let shapes: [&[usize]; 5] = [&[6, 4], &[4, 3], &[4, 3 * 8], &[8, 3 * 4], &[4, 3 * 8]];
        for (chosen, normalized, gated) in [(1, false, false), (2, true, true), (2, false, false), (3, true, true)] {
            check::<S>(device, "mixture", &shapes, |tape, p, x| {
                let [up, down, gate] = [p[2], p[3], p[4]].map(ExpertLinear::new);
                let (router, gate) = (linear(p, 1, None), gated.then_some(gate));
                let layer = Mixture { router, gate, up, down, experts: 3, chosen, normalized };
                // The sharper router keeps the choices away from a tie.
                let x = (x[0] * 8.0)?;
                let (y, loss) = layer.forward_balanced(tape, &x)?;
                let loss = tape.stored_as::<S>(&(loss * 0.25)?)?;
                // Every case has a gradient of the gates.
                let unused = leaf_as::<S>(tape, p[4])?.sum(..)?;
                y.add(loss)?.add(unused)
            }, 1, |p| {
                let x: Vec<f64> = p[0].iter().map(|x| x * 8.0).collect();
                let scores = affine(&x, &p[1], &[], 4);
                let (mut y, mut mean, mut wanted) = (vec![0.0; 24], [0.0; 3], [0; 3]);
                // Returns the matrix of an expert. Its columns follow those of the experts before.
                let of = |weights: &[f64], expert: usize, outputs: usize| -> Vec<f64> {
                    weights.chunks(3 * outputs).flat_map(|row| row[expert * outputs..][..outputs].to_vec()).collect()
                };
                for token in 0..6 {
                    let exps: Vec<f64> = scores[token * 3..][..3].iter().map(|score| score.exp()).collect();
                    let all: f64 = exps.iter().sum();
                    let mut best: Vec<usize> = (0..3).collect();
                    best.sort_by(|&a, &b| exps[b].total_cmp(&exps[a]));
                    let kept: f64 = best[..chosen].iter().map(|&expert| exps[expert]).sum();
                    (0..3).for_each(|expert| mean[expert] += exps[expert] / all / 6.0);
                    for &expert in &best[..chosen] {
                        wanted[expert] += 1;
                        let weight = exps[expert] / if normalized { kept } else { all };
                        let x = &x[token * 4..][..4];
                        let up = affine(x, &of(&p[2], expert, 8), &[], 4);
                        let gate = affine(x, &of(&p[4], expert, 8), &[], 4);
                        let hidden: Vec<f64> = up.iter().zip(gate).map(|(&up, gate)| match gated {
                            true => gate * sigmoid(gate) * up,
                            false => up * sigmoid(up),
                        }).collect();
                        let out = affine(&hidden, &of(&p[3], expert, 4), &[], 8);
                        (0..4).for_each(|at| y[token * 4 + at] += weight * out[at]);
                    }
                }
                let loss: f64 = (0..3).map(|expert| wanted[expert] as f64 / (6 * chosen) as f64 * mean[expert]).sum();
                let unused: f64 = p[4].iter().sum();
                y.iter().map(|y| y + 3.0 * loss * 0.25 + unused).collect()
            });
        }
    }

    fn convolutions<S>(device: &Device) {
        for config in configs() {
            let shapes: [&[usize]; 3] = [&[2, 4, 6, 7], &[6, 4 / config.groups, 3, 2], &[6]];
            check::<S>(device, "convolution", &shapes, |tape, p, x| {
                Conv2d { weight: p[1], bias: Some(p[2]), config }.forward(tape, &x[0])
            }, 1, |p| {
                let (y, [h, w]) = convolved((&p[0], [4, 6, 7]), (&p[1], [6, 3, 2]), config);
                y.iter().enumerate().map(|(at, y)| y + p[2][at / (h * w) % 6]).collect()
            });
        }
    }

    fn transposed_convolutions<S>(device: &Device) {
        for (number, config) in configs().into_iter().enumerate() {
            // The image of the convolution, whose last row is in no window of the third.
            let image = [4, if number == 2 { 6 } else { 5 }, 7];
            let (_, [h, w]) = convolved((&[0.0; 4 * 6 * 7][..image.iter().product::<usize>()], image), (&[0.0; 6 * 4 * 6], [6, 3, 2]), config);
            let more = [[image[1], h, 3], [image[2], w, 2]].into_iter().zip(0..).map(|([image, places, kernel], at): (_, usize)| {
                image + 2 * config.padding[at] - config.dilation[at] * (kernel - 1) - 1 - (places - 1) * config.stride[at]
            }).collect::<Vec<_>>();
            let shapes: [&[usize]; 3] = [&[2, 6, h, w], &[6, 4 / config.groups, 3, 2], &[4]];
            check::<S>(device, "transposed", &shapes, |tape, p, x| {
                let layer = ConvTranspose2d { weight: p[1], bias: Some(p[2]), config, more: [more[0], more[1]] };
                layer.forward(tape, &x[0])
            }, 1, |p| {
                let y = transposed(&p[0], (&p[1], [6, 3, 2]), (2, image), config);
                y.iter().enumerate().map(|(at, y)| y + p[2][at / (image[1] * image[2]) % 4]).collect()
            });
        }
    }

    /// A convolution of sequences, a function and pooling, one after another.
    fn sequence<S>(device: &Device) {
        let config = ConvolutionConfig { padding: [0, 1], ..ConvolutionConfig::default() };
        check::<S>(device, "sequence", &[&[2, 3, 7], &[4, 3, 1, 3], &[4]], |tape, p, x| {
            Sequential::<S>::default()
                .then(Conv1d(Conv2d { weight: p[1], bias: Some(p[2]), config }))
                .then_fn(|_, x| x.tanh()?.unsqueeze(2)?.mean_pool2d([1, 3]))
                .forward(tape, &x[0])
        }, 1, |p| {
            let (y, _) = convolved((&p[0], [3, 1, 7]), (&p[1], [4, 1, 3]), config);
            y.chunks(7).enumerate().flat_map(|(row, y)| {
                let y: Vec<f64> = y.iter().map(|y| (y + p[2][row % 4]).tanh()).collect();
                [0, 3].map(|first| y[first..first + 3].iter().sum::<f64>() / 3.0)
            }).collect()
        });
    }

    fn largest_of_rectangles<S>(device: &Device) {
        check::<S>(device, "max_pool2d", &[&[2, 3, 5, 4]], |_, _, x| x[0].max_pool2d([2, 2]), 1, |p| {
            (0..2 * 3 * 2 * 2).map(|at| {
                let (image, row, column) = (at / 4, at / 2 % 2 * 2, at % 2 * 2);
                let place = |i: usize, j: usize| p[0][image * 20 + (row + i) * 4 + column + j];
                place(0, 0).max(place(0, 1)).max(place(1, 0).max(place(1, 1)))
            }).collect()
        });
    }
}

on_each_device! {
    fn refusals_name_the_shapes(device: &Device) {
        let parameters = unused(device);
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        arena.step(|step| {
            let tape = Tape::new(step, &parameters);
            let x = tape.input(step.upload(&[0.0; 48], [1, 3, 4, 4])?);
            let weight = tape.input(step.upload(&[0.0; 54], [2, 3, 3, 3])?);
            let plain = ConvolutionConfig::default();
            assert_refused(weight.conv2d(&x, plain), &["conv2d", "[2, 3, 3, 3] and [1, 3, 4, 4]", "as large as a window"]);
            let other = x.narrow(1, 0..2)?;
            assert_refused(other.conv2d(&weight, plain), &["conv2d", "[1, 2, 4, 4]", "groups"]);
            let padded = ConvolutionConfig { padding: [3, 0], ..plain };
            assert_refused(x.conv2d(&weight, padded), &["conv2d", "padding"]);
            let still = ConvolutionConfig { stride: [0, 1], ..plain };
            assert_refused(x.conv2d(&weight, still), &["conv2d", "strides"]);
            assert_refused(x.conv_transpose2d(&weight, plain, [0, 0]), &["conv_transpose2d", "[in, out / groups, kh, kw]"]);
            assert_refused(x.max_pool2d([5, 1]), &["max_pool2d", "[1, 3, 4, 4]", "[5, 1]"]);
            Ok(())
        }).unwrap();
    }
}
