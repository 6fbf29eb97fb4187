//! A tape with several ops: variables and parameters that several ops use, a whole transformer
//! layer, and a tape's refusals.

use crate::crossasset::{linear_per_token, norm_project};
use crate::elementwise::add_in_float64;
use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal, parameters_of, stack};
use crate::reference::gelu;
use crate::support::{Random, on_each_device};
use crate::trial::assert_refused;
use crate::{attention, linear, loss, norm, tokens};
use stepscope::nn::RmsNorm;
use stepscope::{Arena, Capacity, Error, Gradients, Tape, ops};

on_each_device! {
    fn gradient_of_reshape(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, b, c] = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &[a, b, c])];
            Case::new("reshape", seed, 1, values).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?.reshape([a * b, c])?;
                (x.reshape([c, b * a])?).tanh()
            }, |p| p[0].iter().map(|x| x.tanh()).collect());
        }
    }

    /// A gradient from three uses, one of which a multiply adds in place.
    fn variable_used_three_times(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k] = extents(&mut random, seed, [37, 11]);
            let mut operands = vec![normal(&mut random, &[rows, k])];
            operands.extend((0..2).map(|_| linear::operands(&mut random, [rows, k, k]).swap_remove(1)));
            Case::new("used three times", seed, longest(&[rows, k]), operands).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let y = tape.linear_residual(&x, p[1], None, &x)?;
                tape.linear_residual(&x.gelu()?, p[2], None, &y)
            }, |p| {
                let active: Vec<f64> = p[0].iter().map(|&x| gelu(x)).collect();
                let y = add_in_float64(&p[0], &linear::in_float64(&p[0], &p[1], &[], k, k));
                add_in_float64(&y, &linear::in_float64(&active, &p[2], &[], k, k))
            });
        }
    }

    /// A weight in two layers, and an output that does not affect the loss and adds no gradient.
    fn shared_parameter_and_unused_output(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, k] = extents(&mut random, seed, [37, 11]);
            let operands = linear::operands(&mut random, [rows, k, k]);
            Case::new("parameter used twice", seed, longest(&[rows, k]), operands).check(device, |_, tape, p| {
                let x = leaf(tape, p[0])?;
                let h = tape.linear(&x, p[1], Some(p[2]))?.tanh()?;
                let y = tape.linear(&h, p[1], Some(p[2]))?;
                let _dead_end = tape.linear_gelu(&y, p[1], Some(p[2]))?;
                Ok(y)
            }, |p| {
                let h: Vec<f64> = linear::in_float64(&p[0], &p[1], &p[2], k, k).iter().map(|h| h.tanh()).collect();
                linear::in_float64(&h, &p[1], &p[2], k, k)
            });
        }
    }

    /// All together: a transformer layer over tokens, the mean over them, a head and the loss.
    fn a_transformer_layer(device: &Device) {
        const EPSILON: f32 = 1e-6;
        let (batch, tokens, width, hidden, classes) = (3, 4, 64, 20, 3);
        for seed in 0..2 {
            let mut random = Random::new(seed);
            let mut matrix = |k: usize, n: usize| linear::operands(&mut random, [1, k, n]).swap_remove(1);
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
                let qkv = norm_project(tape, &h, RmsNorm { gain: p[1], epsilon: EPSILON }, &p.stacks[2])?;
                let mixed = tape.attention(&qkv, Some((&p.stacks[3], EPSILON)), &ops::AttentionConfig::new(1))?;
                let h = tape.linear_residual(&mixed, p[4], None, &h)?;
                let z = tape.rms_norm(&h, p[5], EPSILON)?;
                let h = tape.linear_residual(&tape.linear_gelu(&z, p[6], Some(p[7]))?, p[8], Some(p[9]), &h)?;
                let logits = tape.linear(&tape.mean_tokens(&h)?, p[10], Some(p[11]))?;
                tape.cross_entropy_by(&logits, step.upload_indices(&labels, [batch])?, ops::LabelRules::default().weighted(weight))
            }, |p| {
                use add_in_float64 as add;
                use linear::in_float64 as linear;
                let norm = |x: &[f64], gain: &[f64]| norm::in_float64(x, gain, f64::from(EPSILON));
                let z = norm(&p[0], &p[1]);
                let project = |part: usize| linear(&z, &p[2][part * width * width..][..width * width], &[], width, width);
                let (q, k) = (norm(&project(0), &p[3][..64]), norm(&project(1), &p[3][64..]));
                let mixed = attention::in_float64(&q, &k, &project(2), tokens, 1, 0.125);
                let h = add(&p[0], &linear(&mixed, &p[4], &[], width, width));
                let z = norm(&h, &p[5]);
                let inner: Vec<f64> = linear(&z, &p[6], &p[7], width, hidden).into_iter().map(gelu).collect();
                let h = add(&h, &linear(&inner, &p[8], &p[9], hidden, width));
                let mean = tokens::in_float64(&h, tokens, width);
                let logits = linear(&mean, &p[10], &p[11], width, classes);
                loss::in_float64(&logits, &labels, classes, f64::from(weight))
            });
        }
    }

    /// A pass that overwrites removes all of the previous gradient. This includes parameters
    /// without a new gradient, and a stack that is written after one of its members.
    fn overwriting_starts_from_zero(device: &Device) {
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
                        let norm = RmsNorm { gain: p[1], epsilon: 1e-6 };
                        let y = norm_project(&tape, &leaf(&tape, p[0])?, norm, &p.stacks[2])?;
                        // The first member again, whose gradient comes before the stack's.
                        tape.linear(&y.reshape([12, 64])?, p[2], None)?
                    };
                    let loss = tape.cross_entropy_by(&y, step.upload_indices(&[1; 12], [12])?, ops::LabelRules::default().weighted(1.0))?;
                    if afresh { tape.backward_overwrite(&loss, &mut dirty)? } else { tape.backward(&loss, &mut zero)? }
                }
                let read = |gradients: &Gradients| step.read(&gradients.lend(step, 0..gradients.spec().elements())?);
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
            let own = other.input(step.empty([2, 3])?);
            assert_eq!(op_of(own.add(x).unwrap_err()), "add");
            assert_eq!(op_of(other.linear_residual(&own, p[1], None, &y).unwrap_err()), "linear_residual");
            assert_eq!(op_of(tape.linear(&y, p[1], None).unwrap_err()), "linear");
            assert_eq!(op_of(tape.rms_norm(&x, p[2], 1e-6).unwrap_err()), "rms_norm");
            assert_eq!(op_of(x.reshape([7]).unwrap_err()), "reshape");
            let cube = x.reshape([1, 2, 3])?;
            let not_an_input = linear_per_token(&tape, &cube, &p.stacks[1], &p.stacks[2]);
            assert_eq!(op_of(not_an_input.unwrap_err()), "linear_per_token");
            let input = tape.input(step.empty::<f32>([1, 2, 3])?);
            let odd = linear_per_token(&tape, &input, &p.stacks[1], &p.stacks[2]);
            assert_eq!(op_of(odd.unwrap_err()), "linear_per_token");
            assert_eq!(op_of(tape.backward(&y, &mut gradients).unwrap_err()), "backward");
            let tape = Tape::new(step, &parameters);
            let loss = tape.input(step.upload(&[1.0], [1])?);
            assert_eq!(op_of(other.backward(&loss, &mut gradients).unwrap_err()), "backward");
            assert_eq!(op_of(tape.backward(&loss, &mut others_gradients).unwrap_err()), "backward");
            let tape = Tape::new(step, &parameters);
            let loss = tape.input(step.upload(&[1.0; 6], [2, 3])?).square()?.mean(..)?;
            assert_refused(tape.backward(&loss, &mut gradients), &["backward", "depends on a trained parameter"]);
            Ok(())
        }).unwrap();
        assert!(gradients.read_flat().unwrap().iter().all(|&gradient| gradient == 0.0));
    }
}
