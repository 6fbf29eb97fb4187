//! Tests of `ops::sgd`: one update of one flat region, with one parameter group and with several.

use crate::adamw::{assert_copied, no_copy, no_groups};
use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, bits, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, trial};
use kernels::sgd::slot;
use kernels::update::{MasterType, RUN};
use stepscope::{Device, ops};

/// Weights, gradients and velocity, all of one length.
struct State([Vec<f32>; 3]);

impl State {
    fn new(length: usize) -> Self {
        let mut random = Random::new(length as u64);
        Self([random.normals(length), random.normals(length), random.normals(length)])
    }

    /// Returns the new weights and velocity.
    fn update(&self, device: &Device, hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<f32>; 2] {
        trial(device, |trial| {
            let upload = |part: usize| trial.upload(&self.0[part], [self.0[part].len()]);
            let (mut weights, gradients, mut velocity) = (upload(0)?, upload(1)?, upload(2)?);
            let (hyper, norm) = (trial.upload(&hyper, [slot::LEN])?, trial.upload(&[squared_norm], [1])?);
            ops::sgd(trial, &mut weights, no_copy(), &gradients, &mut velocity, &hyper, no_groups(), &norm)?;
            let plain = [trial.output(&weights)?, trial.output(&velocity)?];
            let (mut weights, mut velocity) = (upload(0)?, upload(2)?);
            let mut copy = trial.empty([gradients.shape().elements()])?;
            ops::sgd(trial, &mut weights, Some(&mut copy), &gradients, &mut velocity, &hyper, no_groups(), &norm)?;
            assert_copied(&plain, &[trial.output(&weights)?, trial.output(&velocity)?], &trial.output(&copy)?);
            Ok(plain)
        })
    }

    /// Updates with a parameter group for each run.
    fn update_groups(&self, device: &Device, hyper: &[[f32; slot::LEN]], groups: &[u32]) -> [Vec<f32>; 2] {
        trial(device, |trial| {
            let upload = |part: usize| trial.upload(&self.0[part], [self.0[part].len()]);
            let (mut weights, gradients, mut velocity) = (upload(0)?, upload(1)?, upload(2)?);
            let hyper = trial.upload(hyper.as_flattened(), [hyper.len(), slot::LEN])?;
            let (groups, norm) = (trial.upload(groups, [groups.len()])?, trial.upload(&[9.0], [1])?);
            ops::sgd(trial, &mut weights, no_copy(), &gradients, &mut velocity, &hyper, Some(&groups), &norm)?;
            let plain = [trial.output(&weights)?, trial.output(&velocity)?];
            let (mut weights, mut velocity) = (upload(0)?, upload(2)?);
            let mut copy = trial.empty([gradients.shape().elements()])?;
            ops::sgd(trial, &mut weights, Some(&mut copy), &gradients, &mut velocity, &hyper, Some(&groups), &norm)?;
            assert_copied(&plain, &[trial.output(&weights)?, trial.output(&velocity)?], &trial.output(&copy)?);
            Ok(plain)
        })
    }

    /// Returns the same update in float64, as PyTorch's documentation states it.
    fn exact(&self, hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<Exact>; 2] {
        let nesterov = hyper[slot::NESTEROV] != 0.0;
        let [rate, momentum, decay, max_norm, _] = hyper.map(Exact::given);
        let clip = max_norm / (Exact::given(squared_norm).sqrt() + Exact::given(1e-6f32));
        let clip = if max_norm.value == 0.0 || clip.value > 1.0 { Exact::given(1.0) } else { clip };
        let mut results = [const { Vec::new() }; 2];
        for at in 0..self.0[0].len() {
            let [weight, gradient, velocity] = [0, 1, 2].map(|part| Exact::given(self.0[part][at]));
            let g = gradient * clip + decay.times(weight);
            let velocity = g + momentum.times(velocity);
            let direction = if nesterov { g + momentum.times(velocity) } else { velocity };
            results[0].push(weight - rate.times(direction));
            results[1].push(velocity);
        }
        results
    }
}

/// Rate, momentum, decay, largest norm, Nesterov: with everything; with Nesterov momentum; and
/// PyTorch's plain SGD.
const HEAVY: [f32; slot::LEN] = [0.3, 0.9, 0.1, 1.0, 0.0];
const AHEAD: [f32; slot::LEN] = [0.5, 0.8, 0.01, 0.0, 1.0];
const PLAIN: [f32; slot::LEN] = [0.4, 0.0, 0.0, 0.0, 0.0];

on_each_device! {
    fn update(device: &Device) {
        for (name, hyper) in [("heavy", HEAVY), ("ahead", AHEAD), ("plain", PLAIN)] {
            let mut seen = ["weights", "velocity"].map(Closeness::new);
            for length in LENGTHS {
                let state = State::new(length);
                // Clipped to a third, if at all, and inside the norm.
                for squared_norm in [9.0, 0.25] {
                    let (got, want) = (state.update(device, hyper, squared_norm), state.exact(hyper, squared_norm));
                    for ((seen, got), want) in seen.iter_mut().zip(&got).zip(&want) {
                        seen.check(format_args!("{name}, {length}"), got, want);
                    }
                }
            }
            // Without momentum and decay the velocity is the gradient, exactly.
            let [weights, velocity] = seen;
            weights.finish();
            if name != "plain" {
                velocity.finish();
            }
        }
    }

    fn plain_sgd_follows_negative_gradient(device: &Device) {
        let state = State::new(1025);
        let [weights, velocity] = state.update(device, PLAIN, 9.0);
        let [before, gradients, _] = &state.0;
        assert_eq!(bits(&velocity), bits(gradients));
        let want: Vec<f32> = before.iter().zip(gradients).map(|(w, g)| (-0.4f32).mul_add(*g, *w)).collect();
        assert_eq!(bits(&weights), bits(&want));
    }

    /// The elements of each run have the bits of an update of all elements by their group's
    /// settings. There is one launch.
    fn groups_use_their_own_settings(device: &Device) {
        let hyper = [HEAVY, AHEAD, PLAIN];
        for length in LENGTHS {
            let (state, runs) = (State::new(length), length.div_ceil(RUN));
            let alone = hyper.map(|hyper| state.update(device, hyper, 9.0));
            let groups = Random::new(7).belows(runs, 3);
            for (part, got) in state.update_groups(device, &hyper, &groups).iter().enumerate() {
                let want = (0..length).map(|at| alone[groups[at / RUN] as usize][part][at]);
                assert_eq!(bits(got), bits(&want.collect::<Vec<_>>()), "{length}, {part}");
            }
            // A single group equals an update without groups.
            assert_eq!(state.update_groups(device, &hyper[..1], &vec![0; runs]), alone[0]);
        }
    }

    /// The device reads group numbers. A group without settings makes its own weights NaN, and
    /// reads nothing out of bounds.
    fn group_without_settings_gives_nan(device: &Device) {
        let state = State::new(3 * RUN);
        for group in [2, 3, u32::MAX] {
            for results in state.update_groups(device, &[HEAVY, AHEAD], &[1, group, 0]) {
                assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at / RUN == 1)), "{group}");
            }
        }
    }

    /// A NaN among the gradients must reach the results, and a weight's gradient must not affect
    /// other weights.
    fn not_a_number(device: &Device) {
        let mut state = State::new(9);
        for results in state.update(device, HEAVY, f32::NAN) {
            assert!(results.iter().all(|value| value.is_nan()), "{results:?}");
        }
        state.0[1][4] = f32::NAN;
        for results in state.update(device, PLAIN, f32::NAN) {
            assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at == 4)), "{results:?}");
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let ones = |length: usize| trial.upload(&vec![1.0; length], [length]);
            let (mut a, mut b, mut c, g) = (ones(3)?, ones(3)?, ones(4)?, ones(3)?);
            let (hyper, norm) = (trial.upload(&HEAVY, [slot::LEN])?, ones(1)?);
            assert_refused(ops::sgd(trial, &mut a, no_copy(), &g, &mut c, &hyper, no_groups(), &norm), &["sgd", "[3]", "[4]"]);
            assert_refused(ops::sgd(trial, &mut c, no_copy(), &g, &mut b, &hyper, no_groups(), &norm), &["sgd", "[4]", "[3]"]);
            assert_refused(ops::sgd(trial, &mut a, no_copy(), &g, &mut b, &norm, no_groups(), &norm), &["sgd", "`hyper`", "5 elements"]);
            assert_refused(ops::sgd(trial, &mut a, no_copy(), &g, &mut b, &hyper, no_groups(), &g), &["sgd", "`squared_norm`", "1 elements"]);
            let (one, runs) = (trial.upload(&[0u32], [1])?, trial.upload(&[0u32, 0], [2])?);
            assert_refused(
                ops::sgd(trial, &mut a, no_copy(), &g, &mut c, &hyper, Some(&one), &norm),
                &["sgd", "[3]", "[4]"],
            );
            assert_refused(
                ops::sgd(trial, &mut a, no_copy(), &g, &mut b, &hyper, Some(&runs), &norm),
                &["sgd", "`groups`", "1 elements"],
            );
            // Without groups, the settings of one group.
            let two = trial.upload(&[HEAVY, PLAIN].concat(), [2, slot::LEN])?;
            assert_refused(
                ops::sgd(trial, &mut a, no_copy(), &g, &mut b, &two, no_groups(), &norm),
                &["sgd", "`hyper`", "5 elements"],
            );
            for hyper in [&norm, &trial.upload(&[0.0; 8], [8])?, &trial.upload(&[0.0; 0], [0])?] {
                assert_refused(
                    ops::sgd(trial, &mut a, no_copy(), &g, &mut b, hyper, Some(&one), &norm),
                    &["sgd", "`hyper`", "whole groups"],
                );
            }
            Ok(())
        });
    }
}

attack! {
    sgd::sgd {
        weights: out 9, copy: out_halves 9, has_bf16: number 1_u32, gradients: f32s 9, velocity: out 9,
        hyper: f32s 10, groups: u32s 1, squared_norm: f32s 1,
    }
    sgd::sgd_small by formats {
        weights: out if formats.0 == MasterType::F32 { 128 } else { 0 }, has_bf16: number 1_u32,
        halves: out_halves 128, corrections: out_u32 if formats.0 == MasterType::F32 { 0 } else { 32 },
        gradients: f32s 128, velocity: out_u32 2 * formats.1.run_words(),
        hyper: f32s 10, groups: u32s 2, squared_norm: f32s 1,
    }
}
