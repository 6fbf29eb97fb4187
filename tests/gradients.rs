//! Gradients of every differentiable op against central finite differences of a float64 forward pass.
//!
//! The reference is plain Rust in float64 and knows nothing of the library. An op's inputs are parameters too (by
//! [`leaf`]), so that every gradient can be read; its output is weighted by random coefficients and summed, so that
//! every element of it has another gradient.

#![forbid(unsafe_code)]

#[path = "gradients/case.rs"]
mod case;
#[path = "gradients/own.rs"]
mod own;
#[path = "gradients/reference.rs"]
mod reference;
mod support;
#[path = "gradients/tied.rs"]
mod tied;

use case::{Case, Operand, leaf, normal, parameters_of, stack};
use stepscope::{Arena, Capacity, Error, Gradients, Tape, ops};
use support::{Random, on_each_device};

/// Seeds of each test's shapes and values.
const SEEDS: std::ops::Range<u64> = 0..6;

/// Shapes: all ones for seed 0, the largest for seed 1, else anything between.
fn extents<const N: usize>(random: &mut Random, seed: u64, most: [usize; N]) -> [usize; N] {
    most.map(|most| match seed {
        0 => 1,
        1 => most,
        _ => random.extent(1, most),
    })
}

/// Rows, inner and outer extents of a linear layer: more than a tile of rows, or a long sum.
fn linear_extents(random: &mut Random, seed: u64) -> [usize; 3] {
    extents(random, seed, if seed % 2 == 1 { [131, 19, 9] } else { [9, 307, 7] })
}

/// The longest sum in a linear layer and its gradients.
fn longest(extents: &[usize]) -> usize {
    extents.iter().copied().max().unwrap_or(1)
}

/// `[rows, k]`, `[k, n]` and `[n]`, the products of variance 1.
fn linear_values(random: &mut Random, [rows, k, n]: [usize; 3]) -> Vec<Operand> {
    let mut w = normal(random, &[k, n]);
    w.values.iter_mut().for_each(|w| *w /= (k as f32).sqrt());
    vec![normal(random, &[rows, k]), w, normal(random, &[n])]
}

on_each_device! {
    fn tanh(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            Case::new("tanh", seed, 1, values).check(device, |_, tape, p| tape.tanh(&leaf(tape, p[0])?), |p| {
                p[0].iter().map(|x| x.tanh()).collect()
            });
        }
    }

    fn gelu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            Case::new("gelu", seed, 1, values).check(device, |_, tape, p| tape.gelu(&leaf(tape, p[0])?), |p| {
                reference::gelu(&p[0])
            });
        }
    }

    fn reshape(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, b, c] = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &[a, b, c])];
            Case::new("reshape", seed, 1, values).check(device, |_, tape, p| {
                let x = tape.reshape(&leaf(tape, p[0])?, [a * b, c])?;
                tape.tanh(&tape.reshape(&x, [c, b * a])?)
            }, |p| p[0].iter().map(|x| x.tanh()).collect());
        }
    }

    fn add(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
            Case::new("add", seed, 1, values.clone()).check(device, |_, tape, p| {
                tape.add(&leaf(tape, p[0])?, &leaf(tape, p[1])?)
            }, |p| reference::add(&p[0], &p[1]));
            // A variable and itself, one that has a gradient already, and inputs, which want none.
            Case::new("add twice", seed, 2, values).check(device, |step, tape, p| {
                let (a, b) = (leaf(tape, p[0])?, leaf(tape, p[1])?);
                let zero = tape.input(ops::fill(step, shape, 0.0)?);
                let twice = tape.add(&tape.add(&zero, &a)?, &tape.add(&a, &zero)?)?;
                let y = tape.add(&tape.add(&a, &tape.tanh(&b)?)?, &tape.add(&twice, &twice)?)?;
                tape.add(&y, &tape.add(&zero, &zero)?)
            }, |p| p[0].iter().zip(&p[1]).map(|(a, b)| 5.0 * a + b.tanh()).collect());
        }
    }

    fn scale(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (shape, factor) = (extents(&mut random, seed, [7, 5, 13]), random.uniform(-2.0, 2.0));
            let values = vec![normal(&mut random, &shape)];
            Case::new("scale", seed, 1, values).check(device, |_, tape, p| tape.scale(&leaf(tape, p[0])?, factor), |p| {
                p[0].iter().map(|x| f64::from(factor) * x).collect()
            });
        }
    }

    fn softmax(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, b, cols] = extents(&mut random, seed, [3, 5, 301]);
            // The softmax of one number has no gradient at all.
            let cols = cols + 1;
            let values = vec![normal(&mut random, &[a, b, cols])];
            Case::new("softmax", seed, cols, values).check(device, |_, tape, p| tape.softmax(&leaf(tape, p[0])?), |p| {
                p[0].chunks_exact(cols).flat_map(reference::softmax).collect()
            });
        }
    }

    /// As the loss itself, and as a part of one.
    fn sum_and_mean(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let elements: usize = shape.iter().product();
            let mut x = normal(&mut random, &shape);
            // Of one sign, lest nothing be left of them.
            x.values.iter_mut().for_each(|x| *x = x.abs() + 0.5);
            let sum = |x: &[f64]| x.iter().map(|x| x.tanh()).sum::<f64>();
            Case::new("sum", seed, elements, vec![x.clone()]).check(device, |_, tape, p| {
                tape.sum(&tape.tanh(&leaf(tape, p[0])?)?)
            }, |p| vec![sum(&p[0])]);
            Case::new("mean", seed, elements, vec![x.clone()]).check(device, |_, tape, p| {
                tape.mean(&tape.tanh(&leaf(tape, p[0])?)?)
            }, |p| vec![sum(&p[0]) / elements as f64]);

            let (parameters, p) = parameters_of(device, &[x]);
            let mut gradients = Gradients::zeros(&parameters).unwrap();
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
            for (expected, of_mean) in [(1.0, false), (1.0 / elements as f32, true)] {
                arena.step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let x = leaf(&tape, p[0])?;
                    let loss = if of_mean { tape.mean(&x)? } else { tape.sum(&x)? };
                    assert_eq!(loss.shape().extents(), [1]);
                    tape.backward_afresh(&loss, &mut gradients)
                }).unwrap();
                assert_eq!(gradients.read(p[0]).unwrap(), vec![expected; elements]);
            }
        }
    }

    fn transpose(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, rows, cols] = extents(&mut random, seed, [3, 35, 67]);
            let values = vec![normal(&mut random, &[a, rows, cols])];
            Case::new("transpose", seed, 1, values.clone()).check(device, |_, tape, p| {
                tape.tanh(&tape.transpose(&leaf(tape, p[0])?)?)
            }, |p| reference::transpose(&p[0], rows, cols).iter().map(|x| x.tanh()).collect());
            Case::new("transpose of a matrix", seed, 1, values).check(device, |_, tape, p| {
                tape.transpose(&tape.reshape(&leaf(tape, p[0])?, [a * rows, cols])?)
            }, |p| reference::transpose(&p[0], a * rows, cols));
        }
    }

    fn linear(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = linear_extents(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let values = linear_values(&mut random, [rows, k, n]);
            Case::new("linear", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear(&leaf(tape, p[0])?, p[1], Some(p[2]))
            }, |p| reference::linear(&p[0], &p[1], &p[2], k, n));
            Case::new("linear without bias", seed, length, values[..2].to_vec()).check(device, |_, tape, p| {
                tape.linear(&leaf(tape, p[0])?, p[1], None)
            }, |p| reference::linear(&p[0], &p[1], &[], k, n));
        }
    }

    fn linear_gelu(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = linear_extents(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let values = linear_values(&mut random, [rows, k, n]);
            Case::new("linear_gelu", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear_gelu(&leaf(tape, p[0])?, p[1], Some(p[2]))
            }, |p| reference::gelu(&reference::linear(&p[0], &p[1], &p[2], k, n)));
            Case::new("linear_gelu without bias", seed, length, values[..2].to_vec()).check(device, |_, tape, p| {
                tape.linear_gelu(&leaf(tape, p[0])?, p[1], None)
            }, |p| reference::gelu(&reference::linear(&p[0], &p[1], &[], k, n)));
        }
    }

    fn linear_residual(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k, n] = linear_extents(&mut random, seed);
            let length = longest(&[rows, k, n]);
            let mut values = linear_values(&mut random, [rows, k, n]);
            values.insert(2, normal(&mut random, &[rows, n]));
            Case::new("linear_residual", seed, length, values.clone()).check(device, |_, tape, p| {
                tape.linear_residual(&leaf(tape, p[0])?, p[1], Some(p[3]), &leaf(tape, p[2])?)
            }, |p| reference::add(&p[2], &reference::linear(&p[0], &p[1], &p[3], k, n)));
            Case::new("linear_residual without bias", seed, length, values[..3].to_vec()).check(device, |_, tape, p| {
                tape.linear_residual(&leaf(tape, p[0])?, p[1], None, &leaf(tape, p[2])?)
            }, |p| reference::add(&p[2], &reference::linear(&p[0], &p[1], &[], k, n)));
        }
    }

    fn rms_norm(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, cols] = extents(&mut random, seed, if seed % 2 == 1 { [131, 9] } else { [5, 301] });
            // The norm of one number is its sign, whose gradient is what epsilon leaves: let that be something.
            let epsilon = if cols == 1 { 0.5 } else { 1e-6 };
            let values = vec![normal(&mut random, &[rows, cols]), normal(&mut random, &[cols])];
            Case::new("rms_norm", seed, longest(&[rows, cols]), values).check(device, |_, tape, p| {
                tape.rms_norm(&leaf(tape, p[0])?, p[1], epsilon)
            }, |p| reference::rms_norm(&p[0], &p[1], f64::from(epsilon)));
        }
    }

    fn norm_project(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, members] = extents(&mut random, seed, [13, 5, 3]);
            let [k, n] = extents(&mut random, seed, [71, 9]);
            let epsilon = if k == 1 { 0.5 } else { 1e-6 };
            let operands = vec![
                normal(&mut random, &[batch, tokens, k]),
                normal(&mut random, &[k]),
                stack(&mut random, members, &[k, n]),
            ];
            let case = Case::new("norm_project", seed, longest(&[batch * tokens, members * n, k]), operands);
            case.check(device, |_, tape, p| {
                tape.norm_project(&leaf(tape, p[0])?, p[1], epsilon, &p.stacks[2])
            }, |p| {
                let z = reference::rms_norm(&p[0], &p[1], f64::from(epsilon));
                p[2].chunks_exact(k * n).flat_map(|w| reference::linear(&z, w, &[], k, n)).collect()
            });
        }
    }

    fn attention(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, heads] = extents(&mut random, seed, [2, 5, 2]);
            let width = heads * 64;
            let operands =
                vec![normal(&mut random, &[3 * batch, tokens, width]), stack(&mut random, 2, &[64])];
            let case = Case::new("attention", seed, longest(&[64, batch * heads * tokens]), operands);
            case.check(device, |_, tape, p| {
                let qkv = tape.reshape(&leaf(tape, p[0])?, [3, batch, tokens, width])?;
                tape.attention(&qkv, &p.stacks[1], 1e-3, 0.125)
            }, |p| {
                let part = |part: usize| &p[0][part * p[0].len() / 3..][..p[0].len() / 3];
                let norm = |at: usize| reference::rms_norm(part(at), &p[1][at * 64..][..64], f64::from(1e-3f32));
                reference::attention(&norm(0), &norm(1), part(2), tokens, heads, 0.125)
            });
        }
    }

    fn mean_tokens(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, cols] = extents(&mut random, seed, [7, 13, 5]);
            let values = vec![normal(&mut random, &[batch, tokens, cols])];
            Case::new("mean_tokens", seed, tokens, values).check(device, |_, tape, p| {
                tape.mean_tokens(&leaf(tape, p[0])?)
            }, |p| reference::mean_tokens(&p[0], tokens, cols));
        }
    }

    fn cross_entropy(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, classes] = extents(&mut random, seed, [71, 11]);
            // One class alone has no gradient at all.
            let classes = classes + 1;
            let labels = random.belows(rows, classes as u32);
            let weight = 1.0 / rows as f32;
            let values = vec![normal(&mut random, &[rows, classes])];
            Case::new("cross_entropy", seed, longest(&[rows, classes]), values).check(device, |step, tape, p| {
                let labels = step.upload(&labels, [rows])?.save();
                tape.cross_entropy(&leaf(tape, p[0])?, labels, weight)
            }, |p| reference::cross_entropy(&p[0], &labels, classes, f64::from(weight)));
        }
    }

    fn linear_per_token(device: &Device) {
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
                    y.extend(reference::linear(&x, w, b, k, n));
                }
                y
            });
        }
    }

    /// A gradient that comes from three sides, one of them added in place by a multiply.
    fn a_variable_used_three_times(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k] = extents(&mut random, seed, [37, 11]);
            let mut operands = vec![normal(&mut random, &[rows, k])];
            operands.extend((0..2).map(|_| linear_values(&mut random, [rows, k, k]).swap_remove(1)));
            Case::new("used three times", seed, longest(&[rows, k]), operands).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let y = tape.linear_residual(&x, p[1], None, &x)?;
                tape.linear_residual(&tape.gelu(&x)?, p[2], None, &y)
            }, |p| {
                let y = reference::add(&p[0], &reference::linear(&p[0], &p[1], &[], k, k));
                reference::add(&y, &reference::linear(&reference::gelu(&p[0]), &p[2], &[], k, k))
            });
        }
    }

    /// A weight in two layers; and an output that the loss does not depend on, which gives nothing.
    fn a_parameter_used_twice_and_a_dead_end(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k] = extents(&mut random, seed, [37, 11]);
            let operands = linear_values(&mut random, [rows, k, k]);
            Case::new("parameter used twice", seed, longest(&[rows, k]), operands).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let h = tape.tanh(&tape.linear(&x, p[1], Some(p[2]))?)?;
                let y = tape.linear(&h, p[1], Some(p[2]))?;
                let _dead_end = tape.linear_gelu(&y, p[1], Some(p[2]))?;
                Ok(y)
            }, |p| {
                let h: Vec<f64> = reference::linear(&p[0], &p[1], &p[2], k, k).iter().map(|h| h.tanh()).collect();
                reference::linear(&h, &p[1], &p[2], k, k)
            });
        }
    }

    /// Everything together: a transformer layer over tokens, the mean over them, a head and the loss.
    fn a_transformer_layer(device: &Device) {
        const EPSILON: f32 = 1e-6;
        let (batch, tokens, width, hidden, classes) = (3, 4, 64, 20, 3);
        for seed in 0..2 {
            let mut random = Random::new(seed);
            let mut matrix = |k: usize, n: usize| linear_values(&mut random, [1, k, n]).swap_remove(1);
            let (wo, mut qkv) = (matrix(width, width), matrix(width, width));
            qkv.values.extend([matrix(width, width).values, matrix(width, width).values].concat());
            qkv.count = 3;
            let [w1, w2, head] = [matrix(width, hidden), matrix(hidden, width), matrix(width, classes)];
            let labels = random.belows(batch, classes as u32);
            let qk_norm = stack(&mut random, 2, &[64]);
            let mut vector = |len: usize| normal(&mut random, &[len]);
            let [norm1, norm2] = [(); 2].map(|()| vector(width));
            let [b1, b2, head_bias] = [vector(hidden), vector(width), vector(classes)];
            let x = normal(&mut random, &[batch, tokens, width]);
            let operands = vec![x, norm1, qkv, qk_norm, wo, norm2, w1, b1, w2, b2, head, head_bias];
            let weight = 1.0 / batch as f32;
            let case = Case::new("transformer layer", seed, 2 * width, operands);
            Case { sample: 24, ..case }.check(device, |step, tape, p| {
                let h = leaf(tape, p[0])?;
                let qkv = tape.norm_project(&h, p[1], EPSILON, &p.stacks[2])?;
                let mixed = tape.attention(&qkv, &p.stacks[3], EPSILON, 0.125)?;
                let h = tape.linear_residual(&mixed, p[4], None, &h)?;
                let z = tape.rms_norm(&h, p[5], EPSILON)?;
                let h = tape.linear_residual(&tape.linear_gelu(&z, p[6], Some(p[7]))?, p[8], Some(p[9]), &h)?;
                let logits = tape.linear(&tape.mean_tokens(&h)?, p[10], Some(p[11]))?;
                tape.cross_entropy(&logits, step.upload(&labels, [batch])?.save(), weight)
            }, |p| {
                use reference::{add, attention, gelu, linear, rms_norm};
                let norm = |x: &[f64], gain: &[f64]| rms_norm(x, gain, f64::from(EPSILON));
                let z = norm(&p[0], &p[1]);
                let project = |part: usize| linear(&z, &p[2][part * width * width..][..width * width], &[], width, width);
                let (q, k) = (norm(&project(0), &p[3][..64]), norm(&project(1), &p[3][64..]));
                let mixed = attention(&q, &k, &project(2), tokens, 1, 0.125);
                let h = add(&p[0], &linear(&mixed, &p[4], &[], width, width));
                let z = norm(&h, &p[5]);
                let inner = gelu(&linear(&z, &p[6], &p[7], width, hidden));
                let h = add(&h, &linear(&inner, &p[8], &p[9], hidden, width));
                let mean = reference::mean_tokens(&h, tokens, width);
                let logits = linear(&mean, &p[10], &p[11], width, classes);
                reference::cross_entropy(&logits, &labels, classes, f64::from(weight))
            });
        }
    }

    /// A pass that overwrites leaves nothing of the last one: not where no gradient comes, nor where a stack is written of
    /// which a member has been.
    fn afresh_is_from_zero(device: &Device) {
        let mut random = Random::new(0);
        let operands =
            [normal(&mut random, &[2, 3, 64]), normal(&mut random, &[64]), stack(&mut random, 2, &[64, 64])];
        let (parameters, p) = parameters_of(device, &operands);
        let [mut dirty, mut zero] = [(); 2].map(|()| Gradients::zeros(&parameters).unwrap());
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        arena.step(|step| {
            for (pass, few) in [false, true, false].into_iter().enumerate() {
                zero.zero(step)?;
                for afresh in [true, false] {
                    let tape = Tape::new(step, &parameters);
                    let y = if few {
                        tape.linear(&tape.input(ops::fill(step, [12, 64], 0.5)?), p.stacks[2].members()[1], None)?
                    } else {
                        let y = tape.norm_project(&leaf(&tape, p[0])?, p[1], 1e-6, &p.stacks[2])?;
                        // The first member again, whose gradient comes before the stack's.
                        tape.linear(&tape.reshape(&y, [12, 64])?, p[2], None)?
                    };
                    let loss = tape.cross_entropy(&y, step.upload(&[1; 12], [12])?.save(), 1.0)?;
                    if afresh { tape.backward_afresh(&loss, &mut dirty)? } else { tape.backward(&loss, &mut zero)? }
                }
                let read = |gradients: &Gradients| step.read(&step.lend(gradients.flat(), [gradients.flat().len()])?);
                let (got, want) = (read(&dirty)?, read(&zero)?);
                assert!(want.iter().any(|&gradient| gradient != 0.0));
                assert_eq!(got, want, "pass {pass}");
            }
            Ok(())
        }).unwrap();
    }

    fn misuse_of_a_tape_is_refused(device: &Device) {
        let mut random = Random::new(0);
        let operands = [normal(&mut random, &[2, 3]), stack(&mut random, 2, &[3, 5]), stack(&mut random, 2, &[5])];
        let (parameters, p) = parameters_of(device, &operands);
        let (others, _) = parameters_of(device, &operands);
        let mut gradients = Gradients::zeros(&parameters).unwrap();
        let mut others_gradients = Gradients::zeros(&others).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let op_of = |error: Error| match error {
            Error::Misuse { op, .. } => op,
            other => panic!("{other}"),
        };
        arena.step(|step| {
            let (tape, other) = (Tape::new(step, &parameters), Tape::new(step, &parameters));
            let x = leaf(&tape, p[0])?;
            let y = tape.linear(&x, p[1], None)?;
            assert_eq!(op_of(other.tanh(&x).unwrap_err()), "tanh");
            let own = other.input(step.empty([2, 3])?);
            assert_eq!(op_of(other.linear_residual(&own, p[1], None, &y).unwrap_err()), "linear_residual");
            assert_eq!(op_of(tape.linear(&y, p[1], None).unwrap_err()), "linear");
            assert_eq!(op_of(tape.rms_norm(&x, p[2], 1e-6).unwrap_err()), "rms_norm");
            assert_eq!(op_of(tape.reshape(&x, [7]).unwrap_err()), "reshape");
            let cube = tape.reshape(&x, [1, 2, 3])?;
            let not_an_input = tape.linear_per_token(&cube, &p.stacks[1], &p.stacks[2]);
            assert_eq!(op_of(not_an_input.unwrap_err()), "linear_per_token");
            let input = tape.input(step.empty([1, 2, 3])?);
            let odd = tape.linear_per_token(&input, &p.stacks[1], &p.stacks[2]);
            assert_eq!(op_of(odd.unwrap_err()), "linear_per_token");
            assert_eq!(op_of(tape.backward(&y, &mut gradients).unwrap_err()), "backward");
            let tape = Tape::new(step, &parameters);
            let loss = tape.input(step.upload(&[1.0], [1])?);
            assert_eq!(op_of(other.backward(&loss, &mut gradients).unwrap_err()), "backward");
            assert_eq!(op_of(tape.backward(&loss, &mut others_gradients).unwrap_err()), "backward");
            Ok(())
        }).unwrap();
        assert!(gradients.flat().read().unwrap().iter().all(|&gradient| gradient == 0.0));
    }
}
