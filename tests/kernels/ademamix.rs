//! Tests of `ops::ademamix`: one update of one flat region, with one parameter group and with
//! several.

use crate::adamw::{assert_copied, no_copy, no_groups};
use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, bits, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, trial};
use kernels::ademamix::slot;
use kernels::update::RUN;
use stepscope::{Device, ops};

/// Weights, gradients, first moment, slow momentum and second moment, all of one length.
struct State([Vec<f32>; 5]);

impl State {
    fn new(length: usize) -> Self {
        let mut random = Random::new(length as u64);
        let [weights, gradients, first, slow] = [(); 4].map(|()| random.normals(length));
        Self([weights, gradients, first, slow, random.uniforms(length, 0.0, 2.0)])
    }

    /// Returns the new weights and moments, by the settings of each group, with and without a BF16
    /// copy of the weights.
    fn update(
        &self,
        device: &Device,
        hyper: &[[f32; slot::LEN]],
        groups: Option<&[u32]>,
        squared_norm: f32,
    ) -> [Vec<f32>; 4] {
        trial(device, |trial| {
            let upload = |part: usize| trial.upload(&self.0[part], [self.0[part].len()]);
            let hyper = trial.upload(hyper.as_flattened(), [hyper.len(), slot::LEN])?;
            let groups = groups.map(|groups| trial.upload(groups, [groups.len()])).transpose()?;
            let (gradients, norm) = (upload(1)?, trial.upload(&[squared_norm], [1])?);
            let mut results = Vec::new();
            let mut copy = trial.empty(gradients.shape())?;
            for to in [None, Some(&mut copy)] {
                let (mut weights, mut moments) = (upload(0)?, [upload(2)?, upload(3)?, upload(4)?]);
                ops::ademamix(trial, &mut weights, to, &gradients, moments.each_mut(), &hyper, groups.as_ref(), &norm)?;
                let [first, slow, second] = &moments;
                results.push([
                    trial.output(&weights)?,
                    trial.output(first)?,
                    trial.output(slow)?,
                    trial.output(second)?,
                ]);
            }
            assert_copied(&results[0], &results[1], &trial.output(&copy)?);
            Ok(results.swap_remove(0))
        })
    }

    /// Updates with one group.
    fn update_all(&self, device: &Device, hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<f32>; 4] {
        self.update(device, &[hyper], None, squared_norm)
    }

    /// Returns the same update in float64, as the paper states it.
    fn exact(&self, mut hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<Exact>; 4] {
        let is_cautious = hyper[slot::WEIGHT_DECAY] < 0.0;
        hyper[slot::WEIGHT_DECAY] = hyper[slot::WEIGHT_DECAY].abs();
        let [rate, beta1, beta2, epsilon, decay, correction1, correction2, max_norm, beta3, alpha] =
            hyper.map(Exact::given);
        let one = Exact::given(1.0);
        let clip = max_norm / (Exact::given(squared_norm).sqrt() + Exact::given(1e-6f32));
        let clip = if max_norm.value == 0.0 || clip.value > 1.0 { one } else { clip };
        // 1 - beta is exact.
        let [rest1, rest2, rest3] = [beta1, beta2, beta3].map(|beta| Exact::given(1.0 - beta.value));
        let mut results = [const { Vec::new() }; 4];
        for at in 0..self.0[0].len() {
            let [weight, gradient, first, slow, second] = [0, 1, 2, 3, 4].map(|part| Exact::given(self.0[part][at]));
            let g = gradient * clip;
            let first = first + rest1.times(g - first);
            let slow = slow + rest3.times(g - slow);
            let second = second * beta2 + (rest2 * g).times(g);
            let sum = first + (alpha * correction1).times(slow);
            let direction = sum / (second.sqrt() / correction2.sqrt() + epsilon);
            let stays = is_cautious && weight.value * direction.value < 0.0;
            let kept = if stays { weight } else { weight * (one - rate * decay) };
            let weight = kept - (rate / correction1).times(direction);
            for (results, exact) in results.iter_mut().zip([weight, first, slow, second]) {
                results.push(exact);
            }
        }
        results
    }
}

/// The settings of a late step, of the first one, and a cautious decay.
const LATE: [f32; slot::LEN] = [1e-2, 0.9, 0.999, 1e-8, 0.01, 0.9, 0.6, 1.0, 0.9999, 5.0];
const FIRST: [f32; slot::LEN] = [3e-4, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05, 0.0, 0.9, 0.01];
const CAUTIOUS: [f32; slot::LEN] = [1e-1, 0.9, 0.999, 1e-8, -0.5, 0.9, 0.6, 1.0, 0.99, 8.0];

on_each_device! {
    fn update(device: &Device) {
        let mut seen = ["weights", "first moment", "slow momentum", "second moment"].map(Closeness::new);
        for length in LENGTHS {
            let state = State::new(length);
            // Clipped to a third, inside the norm, and without clipping.
            for (hyper, squared_norm) in [(LATE, 9.0), (LATE, 0.25), (FIRST, 9.0), (CAUTIOUS, 9.0)] {
                let (got, want) = (state.update_all(device, hyper, squared_norm), state.exact(hyper, squared_norm));
                for ((seen, got), want) in seen.iter_mut().zip(&got).zip(&want) {
                    seen.check(format_args!("{length}, {hyper:?}"), got, want);
                }
            }
        }
        seen.into_iter().for_each(Closeness::finish);
    }

    /// The elements of each run have the bits of an update of all elements by their group's
    /// settings. There is one launch.
    fn groups_use_their_own_settings(device: &Device) {
        let hyper = [LATE, FIRST, CAUTIOUS];
        for length in LENGTHS {
            let (state, runs) = (State::new(length), length.div_ceil(RUN));
            let alone = hyper.map(|hyper| state.update_all(device, hyper, 9.0));
            let groups = Random::new(7).belows(runs, 3);
            for (part, got) in state.update(device, &hyper, Some(&groups), 9.0).iter().enumerate() {
                let want = (0..length).map(|at| alone[groups[at / RUN] as usize][part][at]);
                assert_eq!(bits(got), bits(&want.collect::<Vec<_>>()), "{length}, {part}");
            }
        }
    }

    /// The device reads group numbers. A group without settings makes its own weights NaN, and
    /// reads nothing out of bounds. A NaN among the gradients reaches only its own weight.
    fn not_a_number(device: &Device) {
        let mut state = State::new(3 * RUN);
        for group in [2, 3, u32::MAX] {
            for results in state.update(device, &[LATE, FIRST], Some(&[1, group, 0]), 9.0) {
                assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at / RUN == 1)), "{group}");
            }
        }
        state.0[1][4] = f32::NAN;
        for results in state.update_all(device, FIRST, f32::NAN) {
            assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at == 4)), "{results:?}");
        }
    }

    /// Without a slow momentum an update has the bits of AdamW.
    fn without_alpha_it_is_adamw(device: &Device) {
        let (state, mut hyper) = (State::new(1025), LATE);
        hyper[slot::ALPHA] = 0.0;
        let [weights, first, _, second] = state.update_all(device, hyper, 9.0);
        let want = trial(device, |trial| {
            let upload = |part: usize| trial.upload(&state.0[part], [1025]);
            let (mut weights, gradients, mut first, mut second) = (upload(0)?, upload(1)?, upload(2)?, upload(4)?);
            let (hyper, norm) = (trial.upload(&hyper[..8], [8])?, trial.upload(&[9.0], [1])?);
            ops::adamw(trial, &mut weights, no_copy(), &gradients, &mut first, &mut second, &hyper, no_groups(), &norm)?;
            Ok([trial.output(&weights)?, trial.output(&first)?, trial.output(&second)?])
        });
        assert_eq!([weights, first, second].map(|part| bits(&part)), want.map(|part| bits(&part)));
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let ones = |length: usize| trial.upload(&vec![1.0; length], [length]);
            let (mut weights, gradients, norm) = (ones(3)?, ones(3)?, ones(1)?);
            let hyper = trial.upload(&LATE, [slot::LEN])?;
            let mut moments = [ones(3)?, ones(4)?, ones(3)?];
            assert_refused(
                ops::ademamix(trial, &mut weights, no_copy(), &gradients, moments.each_mut(), &hyper, no_groups(), &norm),
                &["ademamix", "[3]", "[4]"],
            );
            let mut moments = [ones(3)?, ones(3)?, ones(3)?];
            assert_refused(
                ops::ademamix(trial, &mut weights, no_copy(), &gradients, moments.each_mut(), &norm, no_groups(), &norm),
                &["ademamix", "`hyper`", "10 elements"],
            );
            assert_refused(
                ops::ademamix(trial, &mut weights, no_copy(), &gradients, moments.each_mut(), &hyper, no_groups(), &gradients),
                &["ademamix", "`squared_norm`", "1 elements"],
            );
            Ok(())
        });
    }
}

attack! {
    ademamix::ademamix {
        weights: out 9, copy: out_halves 9, has_bf16: number 1_u32, gradients: f32s 9, m: out 9, slow: out 9, v: out 9,
        hyper: f32s 20, groups: u32s 1, squared_norm: f32s 1,
    }
}
