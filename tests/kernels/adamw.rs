//! Tests of `ops::adamw`: one update of one flat region, with one parameter group and with several.

use crate::hostile::attack;
use crate::shapes::LENGTHS;
use crate::support::{Random, bits, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use kernels::adamw::slot;
use kernels::update::{MasterType, RUN};
use stepscope::{Device, Tensor, bf16, ops};

/// Returns no BF16 copy, for weights without one.
pub(crate) fn no_copy<'t, 's>() -> Option<&'t mut Tensor<'s, bf16>> {
    None
}

/// Returns no groups, for parameters of one group.
pub(crate) fn no_groups<'t, 's>() -> Option<&'t Tensor<'s, u32>> {
    None
}

/// Weights, gradients, first and second moments, all of one length.
struct State([Vec<f32>; 4]);

impl State {
    fn new(length: usize) -> Self {
        let mut random = Random::new(length as u64);
        let [weights, gradients, first] = [random.normals(length), random.normals(length), random.normals(length)];
        Self([weights, gradients, first, random.uniforms(length, 0.0, 2.0)])
    }

    /// Returns the new weights, first and second moments.
    fn update(&self, device: &Device, hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<f32>; 3] {
        trial(device, |trial| {
            let upload = |part: usize| trial.upload(&self.0[part], [self.0[part].len()]);
            let (mut weights, gradients, mut first, mut second) = (upload(0)?, upload(1)?, upload(2)?, upload(3)?);
            let (hyper, squared_norm) = (trial.upload(&hyper, [slot::LEN])?, trial.upload(&[squared_norm], [1])?);
            ops::adamw(
                trial,
                &mut weights,
                no_copy(),
                &gradients,
                &mut first,
                &mut second,
                &hyper,
                no_groups(),
                &squared_norm,
            )?;
            let plain = [trial.output(&weights)?, trial.output(&first)?, trial.output(&second)?];
            let (mut weights, mut first, mut second) = (upload(0)?, upload(2)?, upload(3)?);
            let mut copy = trial.empty([gradients.shape().elements()])?;
            let to = Some(&mut copy);
            ops::adamw(
                trial,
                &mut weights,
                to,
                &gradients,
                &mut first,
                &mut second,
                &hyper,
                no_groups(),
                &squared_norm,
            )?;
            let copied = [trial.output(&weights)?, trial.output(&first)?, trial.output(&second)?];
            assert_copied(&plain, &copied, &trial.output(&copy)?);
            Ok(plain)
        })
    }

    /// Updates like [`State::update`], with a parameter group for each run.
    fn update_groups(
        &self,
        device: &Device,
        hyper: &[[f32; slot::LEN]],
        groups: &[u32],
        squared_norm: f32,
    ) -> [Vec<f32>; 3] {
        trial(device, |trial| {
            let upload = |part: usize| trial.upload(&self.0[part], [self.0[part].len()]);
            let (mut weights, gradients, mut first, mut second) = (upload(0)?, upload(1)?, upload(2)?, upload(3)?);
            let hyper = trial.upload(hyper.as_flattened(), [hyper.len(), slot::LEN])?;
            let (groups, norm) = (trial.upload(groups, [groups.len()])?, trial.upload(&[squared_norm], [1])?);
            ops::adamw(
                trial,
                &mut weights,
                no_copy(),
                &gradients,
                &mut first,
                &mut second,
                &hyper,
                Some(&groups),
                &norm,
            )?;
            let plain = [trial.output(&weights)?, trial.output(&first)?, trial.output(&second)?];
            let (mut weights, mut first, mut second) = (upload(0)?, upload(2)?, upload(3)?);
            let mut copy = trial.empty([gradients.shape().elements()])?;
            let to = Some(&mut copy);
            ops::adamw(trial, &mut weights, to, &gradients, &mut first, &mut second, &hyper, Some(&groups), &norm)?;
            let copied = [trial.output(&weights)?, trial.output(&first)?, trial.output(&second)?];
            assert_copied(&plain, &copied, &trial.output(&copy)?);
            Ok(plain)
        })
    }

    /// Returns the same update in float64, as PyTorch's documentation states it.
    fn exact(&self, hyper: [f32; slot::LEN], squared_norm: f32) -> [Vec<Exact>; 3] {
        let [rate, beta1, beta2, epsilon, decay, correction1, correction2, max_norm] = hyper.map(Exact::given);
        let one = Exact::given(1.0);
        let clip = max_norm / (Exact::given(squared_norm).sqrt() + Exact::given(1e-6f32));
        let clip = if max_norm.value == 0.0 || clip.value > 1.0 { one } else { clip };
        // 1 - beta is exact.
        let [rest1, rest2] = [beta1, beta2].map(|beta| Exact::given(1.0 - beta.value));
        let mut results = [const { Vec::new() }; 3];
        for at in 0..self.0[0].len() {
            let [weight, gradient, first, second] = [0, 1, 2, 3].map(|part| Exact::given(self.0[part][at]));
            let g = gradient * clip;
            let m = first + rest1.times(g - first);
            let v = second * beta2 + (rest2 * g).times(g);
            let direction = m / (v.sqrt() / correction2.sqrt() + epsilon);
            let w = weight * (one - rate * decay) - (rate / correction1).times(direction);
            for (results, exact) in results.iter_mut().zip([w, m, v]) {
                results.push(exact);
            }
        }
        results
    }
}

/// Asserts that a BF16 copy does not change the other results of an update. The copy must equal the
/// new weights, which come first, rounded once.
pub(crate) fn assert_copied<const N: usize>(plain: &[Vec<f32>; N], copied: &[Vec<f32>; N], copy: &[bf16]) {
    for (plain, copied) in plain.iter().zip(copied) {
        assert_same("the weights, updated with a BF16 copy", copied, plain);
    }
    let rounded: Vec<f32> = plain[0].iter().map(|&weight| bf16::from_f32(weight).to_f32()).collect();
    assert_same("the BF16 copy", &copy.iter().map(|half| half.to_f32()).collect::<Vec<_>>(), &rounded);
}

/// Learning rate, betas, epsilon, weight decay, bias corrections, maximal norm: those of a late
/// step, and of the first.
const LATE: [f32; slot::LEN] = [1e-2, 0.9, 0.999, 1e-8, 0.01, 0.9, 0.6, 1.0];
const FIRST: [f32; slot::LEN] = [3e-4, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.05, 0.0];

on_each_device! {
    fn update(device: &Device) {
        let mut seen = ["weights", "first moment", "second moment"].map(Closeness::new);
        for length in LENGTHS {
            let state = State::new(length);
            // Clipped to a third, inside the norm, and without clipping.
            for (hyper, squared_norm) in [(LATE, 9.0), (LATE, 0.25), (FIRST, 9.0)] {
                let (got, want) = (state.update(device, hyper, squared_norm), state.exact(hyper, squared_norm));
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
        let hyper = [LATE, FIRST, [2e-2, 0.8, 0.99, 1e-6, 0.1, 0.5, 0.3, 2.0]];
        for length in LENGTHS {
            let (state, runs) = (State::new(length), length.div_ceil(RUN));
            let alone = hyper.map(|hyper| state.update(device, hyper, 9.0));
            let groups = Random::new(7).belows(runs, 3);
            let got = state.update_groups(device, &hyper, &groups, 9.0);
            for (part, got) in got.iter().enumerate() {
                let want = (0..length).map(|at| alone[groups[at / RUN] as usize][part][at]);
                assert_eq!(bits(got), bits(&want.collect::<Vec<_>>()), "{length}, {part}");
            }
            // A single group equals an update without groups.
            assert_eq!(state.update_groups(device, &hyper[..1], &vec![0; runs], 9.0), alone[0]);
        }
    }

    /// The device reads group numbers. A group without settings makes its own weights NaN, and
    /// reads nothing out of bounds.
    fn group_without_settings_gives_nan(device: &Device) {
        let state = State::new(3 * RUN);
        for group in [2, 3, u32::MAX] {
            for results in state.update_groups(device, &[LATE, FIRST], &[1, group, 0], 9.0) {
                assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at / RUN == 1)), "{group}");
            }
        }
    }

    /// A NaN among the gradients must reach the results, and a weight's gradient must not affect
    /// other weights.
    fn not_a_number(device: &Device) {
        let mut state = State::new(9);
        for results in state.update(device, LATE, f32::NAN) {
            assert!(results.iter().all(|value| value.is_nan()), "{results:?}");
        }
        state.0[1][4] = f32::NAN;
        for results in state.update(device, FIRST, f32::NAN) {
            assert!(results.iter().enumerate().all(|(at, value)| value.is_nan() == (at == 4)), "{results:?}");
        }
    }

    /// The weights do not change without gradient, moments and decay.
    fn nothing_to_do(device: &Device) {
        let mut state = State::new(7);
        state.0[1..].iter_mut().for_each(|part| part.fill(0.0));
        let [weights, first, second] = state.update(device, FIRST, 0.0);
        assert_eq!(weights, state.0[0]);
        assert_eq!([first, second], [[0.0; 7], [0.0; 7]]);
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let ones = |length: usize| trial.upload(&vec![1.0; length], [length]);
            let (mut a, mut b, mut c, mut d) = (ones(3)?, ones(3)?, ones(4)?, ones(3)?);
            let (g, hyper, norm) = (ones(3)?, trial.upload(&LATE, [slot::LEN])?, ones(1)?);
            assert_refused(ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut c, &hyper, no_groups(), &norm), &["adamw", "[3]", "[4]"]);
            let mut longer = trial.upload(&[bf16::ONE; 4], [4])?;
            let copy = Some(&mut longer);
            assert_refused(ops::adamw(trial, &mut a, copy, &g, &mut b, &mut d, &hyper, no_groups(), &norm), &["adamw", "[3]", "[4]"]);
            assert_refused(
                ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut d, &norm, no_groups(), &norm),
                &["adamw", "`hyper`", "8 elements"],
            );
            assert_refused(
                ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut d, &hyper, no_groups(), &g),
                &["adamw", "`squared_norm`", "1 elements"],
            );
            let (runs, none) = (trial.upload(&[0u32, 0], [2])?, trial.upload(&[0u32; 0], [0])?);
            assert_refused(
                ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut c, &hyper, Some(&runs), &norm),
                &["adamw", "[3]", "[4]"],
            );
            assert_refused(
                ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut d, &hyper, Some(&runs), &norm),
                &["adamw", "`groups`", "1 elements"],
            );
            // Without groups, the settings of one group.
            let two = trial.upload(&[LATE, FIRST].concat(), [2, slot::LEN])?;
            for groups in [None, Some(&none)] {
                assert_refused(
                    ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut d, &two, groups, &norm),
                    &["adamw", "`hyper`", "8 elements"],
                );
            }
            let one = trial.upload(&[0u32], [1])?;
            for hyper in [&norm, &trial.upload(&[0.0; 12], [12])?, &trial.upload(&[0.0; 0], [0])?] {
                assert_refused(
                    ops::adamw(trial, &mut a, no_copy(), &g, &mut b, &mut d, hyper, Some(&one), &norm),
                    &["adamw", "`hyper`", "whole groups"],
                );
            }
            Ok(())
        });
    }
}

attack! {
    adamw::adamw {
        weights: out 9, copy: out_halves 9, has_bf16: number 1_u32, gradients: f32s 9, m: out 9, v: out 9,
        hyper: f32s 16, groups: u32s 1, squared_norm: f32s 1,
    }
    adamw::adamw_small by formats {
        weights: out if formats.0 == MasterType::F32 { 128 } else { 0 }, has_bf16: number 1_u32,
        halves: out_halves 128, corrections: out_u32 if formats.0 == MasterType::F32 { 0 } else { 32 },
        gradients: f32s 128, m: out_u32 2 * formats.1.run_words(), v: out_u32 2 * formats.1.run_words(),
        hyper: f32s 16, groups: u32s 2, squared_norm: f32s 1,
    }
}
