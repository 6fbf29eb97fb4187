//! Tests of `ops::dropout`: Philox words by place, the same words in backward, and other words in
//! each step, replayed or eager.

use crate::gradients::{Case, DRAWN, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, bits, on_each_device};
use crate::trial::{assert_refused, assert_same, trial};
use kernels::philox::philox;
use stepscope::ops::Generator;
use stepscope::{Arena, Capacity, HostInputs, Result, Step, Tensor, ops};

const SEED: u64 = DRAWN.0;

/// The known answers of the authors' implementation (Random123, `kat_vectors`), and of another key
/// for each counter.
#[test]
fn words_match_the_paper() {
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    for (counter, key, want) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
    ] {
        assert_eq!(philox(counter, key), want, "{counter:x?}, {key:x?}");
    }
}

/// Computes dropout on the CPU.
fn plain(x: &[f32], p: f32, call: u32, step: u64) -> Vec<f32> {
    let (threshold, scale) = ((f64::from(p) * 2f64.powi(32)) as u64, 1.0 / (1.0 - p));
    let word = |at: usize| {
        let counter = [(at / 4) as u32, call, step as u32, (step >> 32) as u32];
        philox(counter, [SEED as u32, (SEED >> 32) as u32])[at % 4]
    };
    x.iter().enumerate().map(|(at, x)| if u64::from(word(at)) < threshold { 0.0 } else { x * scale }).collect()
}

fn twice<'s>(step: &Step<'s>, generator: &Generator, x: &Tensor<'s>) -> Result<[Tensor<'s>; 2]> {
    let draws = generator.draws(step)?;
    Ok([ops::dropout(step, x, 0.3, &draws.next())?, ops::dropout(step, x, 0.5, &draws.next())?])
}

on_each_device! {
    fn place_call_and_step_determine_drops(device: &Device) {
        for (length, p) in LENGTHS.into_iter().zip([0.0, 0.1, 0.5, 0.999].into_iter().cycle()) {
            let x = Random::new(length as u64).normals(length);
            // The step's number has two words: start at the end of the first.
            for first in [0, u64::from(u32::MAX)] {
                let got = trial(device, |trial| {
                    let (x, generator) = (trial.upload(&x, [length])?, Generator::at(trial.device(), SEED, first)?);
                    let mut got = Vec::new();
                    for _ in 0..2 {
                        let draws = trial.with_scratch(|| generator.draws(trial))?;
                        for _ in 0..2 {
                            got.push(trial.output(&ops::dropout(trial, &x, p, &draws.next())?)?);
                        }
                    }
                    assert_eq!(generator.read()?, (SEED, first + 2));
                    Ok(got)
                });
                let want = [(0, 0), (1, 0), (0, 1), (1, 1)];
                for (got, (call, after)) in got.iter().zip(want) {
                    let want = plain(&x, p, call, first + after);
                    assert_same(format_args!("{length}, {p}, call {call} of step {first} + {after}"), got, &want);
                }
            }
        }
    }

    /// The share of dropped elements is within five standard deviations of p, in each of the four
    /// words. Calls are independent of each other.
    fn drop_rate_matches_p(device: &Device) {
        let generator = Generator::new(device, 5).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let count = 1 << 16;
        let [a, b] = arena.step(|step| {
            let x = step.upload(&vec![1.0; count], [count])?;
            let [a, b] = twice(step, &generator, &x)?;
            Ok([step.read(&a)?, step.read(&b)?])
        }).unwrap();
        let near = |found: usize, of: usize, p: f64| {
            let deviation = (of as f64 * p * (1.0 - p)).sqrt();
            assert!((found as f64 - of as f64 * p).abs() < 5.0 * deviation, "{found} of {of}, {p}");
        };
        for word in 0..4 {
            let zeros = |y: &[f32]| y.iter().skip(word).step_by(4).filter(|&&y| y == 0.0).count();
            near(zeros(&a), count / 4, 0.3);
            near(zeros(&b), count / 4, 0.5);
        }
        near(a.iter().zip(&b).filter(|&(&a, &b)| a == 0.0 && b == 0.0).count(), count, 0.15);
    }

    /// Values that are not finite are dropped like all others.
    fn special_numbers(device: &Device) {
        let x = [f32::NAN, f32::INFINITY, -0.0, 1e-45].repeat(20);
        let got = trial(device, |trial| {
            let (x, generator) = (trial.upload(&x, [x.len()])?, Generator::new(trial.device(), SEED)?);
            let draws = trial.with_scratch(|| generator.draws(trial))?;
            trial.output(&ops::dropout(trial, &x, 0.5, &draws.next())?)
        });
        assert_same("special", &got, &plain(&x, 0.5, 0, 0));
    }

    /// Each replay draws the values of an eager step with that number.
    fn replays_draw_anew(device: &Device) {
        let (eager, captured) = (Generator::new(device, SEED).unwrap(), Generator::new(device, SEED).unwrap());
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let x = Random::new(1).normals(1003);
        let inputs = HostInputs::new().with(&x, [x.len()]).unwrap();
        let mut steps = arena
            .capture(captured, &inputs, |step, generator, slots| {
                let x = ops::copy(step, &slots.input::<f32>(0)?)?;
                Ok(twice(step, generator, &x)?.map(|y| slots.output(&y)))
            })
            .unwrap();
        let mut seen = Vec::new();
        for _ in 0..3 {
            let replayed = {
                let replay = steps.replay(&inputs).unwrap();
                let [a, b] = *replay.outputs();
                [replay.read(a).unwrap(), replay.read(b).unwrap()]
            };
            let want = arena.step(|step| {
                let x = step.upload(&x, [x.len()])?;
                let [a, b] = twice(step, &eager, &x)?;
                Ok([step.read(&a)?, step.read(&b)?])
            }).unwrap();
            assert_eq!(replayed.each_ref().map(|y| bits(y)), want.each_ref().map(|y| bits(y)));
            assert!(!seen.contains(&replayed), "two replays drew the same numbers");
            seen.push(replayed);
        }
    }

    fn wrong_probabilities_are_refused(device: &Device) {
        trial(device, |trial| {
            let (x, generator) = (trial.upload(&[1.0; 4], [4])?, Generator::new(trial.device(), 1)?);
            let draws = trial.with_scratch(|| generator.draws(trial))?;
            for p in [1.0, -0.1, f32::NAN, f32::INFINITY] {
                assert_refused(ops::dropout(trial, &x, p, &draws.next()), &["dropout", "[0, 1)", &p.to_string()]);
            }
            Ok(())
        });
    }
}

stored_as_each! {
    /// Backward drops the elements that forward dropped.
    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            let count = shape.iter().product();
            let scales = [plain(&vec![1.0; count], 0.4, 0, DRAWN.1), plain(&vec![1.0; count], 0.4, 1, DRAWN.1)];
            Case::new("dropout", seed, 2, values).stored_as::<S>(Roundings { forward: 2.0, backward: 2.0, kept: 0.0 }).check(device, |_, tape, p| {
                let x = leaf_as::<S>(tape, p[0])?;
                tape.dropout(&tape.dropout(&x, 0.4)?, 0.4)
            }, |p| p[0].iter().enumerate().map(|(at, x)| x * f64::from(scales[0][at]) * f64::from(scales[1][at])).collect());
        }
    }
}

attack! {
    dropout::draw { generator: pointer_u32 4, next: out_u32 4, draw: out_u32 4 }
    dropout::dropout<S> {
        x: stored 9, draw: u32s 4, call: number 1, threshold: number 77, scale: float 2.0, y: out_stored 9,
    }
}
