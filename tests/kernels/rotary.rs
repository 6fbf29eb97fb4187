//! Tests of `ops::rotary` and its backward pass.

use crate::gradients::{Case, SEEDS, leaf, normal};
use crate::hostile::attack;
use crate::reference::error_ulps;
use crate::support::{Random, on_each_device, relative_l2, tolerance};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops::{self, AttentionConfig, Rotary};
use stepscope::{Device, Shape};

/// Heads and key heads, their width, and a matching shape.
const FORMS: [([usize; 2], usize, &[usize]); 4] =
    [([1, 1], 32, &[2, 7, 96]), ([4, 2], 64, &[1, 33, 512]), ([2, 2], 80, &[3, 2, 5, 160]), ([2, 1], 8, &[2, 9, 32])];

/// Large angles, each of which is nearly right in float64.
const FAR: Rotary = Rotary { base: 500_000.0, offset: 100_000 };

fn shape(extents: &[usize]) -> Shape {
    match *extents {
        [a, b, c] => [a, b, c].into(),
        [a, b, c, d] => [a, b, c, d].into(),
        _ => unreachable!("three or four"),
    }
}

/// Returns the angle of a pair.
fn angle(Rotary { base, offset }: Rotary, width: usize, token: usize, pair: usize) -> f64 {
    (f64::from(offset) + token as f64) * base.powf(-2.0 * pair as f64 / width as f64)
}

/// Computes the rotation in float64.
fn in_float64(x: &[f64], rotary: Rotary, [heads, kv_heads]: [usize; 2], width: usize, extents: &[usize]) -> Vec<f64> {
    let (stacked, tokens) = (extents.len() == 4, extents[extents.len() - 2]);
    let all = heads + 2 * kv_heads;
    let mut y = x.to_vec();
    for (row, (y, x)) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
        let (token, is_v) = if stacked {
            (row / heads % tokens, row * 3 / (x_rows(extents) / width) == 2)
        } else {
            (row / all % tokens, row % all >= heads + kv_heads)
        };
        for pair in (0..width / 2).filter(|_| !is_v) {
            let (sin, cos) = angle(rotary, width, token, pair).sin_cos();
            let (a, b) = (x[pair], x[pair + width / 2]);
            (y[pair], y[pair + width / 2]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    y
}

fn x_rows(extents: &[usize]) -> usize {
    extents.iter().product()
}

fn turned(
    device: &Device,
    x: &[f32],
    rotary: Rotary,
    [heads, kv_heads]: [usize; 2],
    extents: &[usize],
) -> [Vec<f32>; 2] {
    trial(device, |trial| {
        let form = AttentionConfig::new(heads).kv_heads(kv_heads);
        let [x, dy] = [(); 2].map(|()| trial.upload(x, shape(extents)));
        let y = ops::rotary(trial, &x?, rotary, &form)?;
        Ok([trial.output(&y)?, trial.output(&ops::rotary_backward(trial, dy?, rotary, &form)?)?])
    })
}

on_each_device! {
    /// The result for a column of 1 and a column of 0 is the cosine and the sine. The angle is
    /// exact up to the float64 error of the base's power.
    fn cosine_and_sine(device: &Device) {
        let mut worst = 0.0f64;
        for width in [8, 32, 64, 80, 96, 128, 256] {
            for rotary in [Rotary::default(), Rotary { base: 1.5, offset: 1000 }, FAR, Rotary { offset: u32::MAX, ..FAR }] {
                let tokens = 40;
                let x: Vec<f32> =
                    (0..tokens * 3 * width).map(|at| if at % width < width / 2 { 1.0 } else { 0.0 }).collect();
                let [y, back] = turned(device, &x, rotary, [1, 1], &[1, tokens, 3 * width]);
                for (token, pair) in (0..tokens).flat_map(|token| (0..width / 2).map(move |pair| (token, pair))) {
                    let angle = angle(rotary, width, token, pair);
                    let at = |part: usize| (token * 3 + part) * width + pair;
                    for (got, want) in [(y[at(0)], angle.cos()), (y[at(0) + width / 2], angle.sin())] {
                        let lost = angle * 2f64.powi(-44) / f64::from(f32::EPSILON) / want.abs().max(1e-30);
                        let error = error_ulps(got, want);
                        assert!(error <= 2.0 + 2.0 * lost, "{width}, {rotary:?}, {token}, {pair}: {error} ulp, {got} for {want}");
                        worst = if lost < 0.01 { worst.max(error) } else { worst };
                    }
                    assert_eq!([y[at(0)], back[at(0)]], [y[at(1)], y[at(1)]], "k as q; the cosine is even");
                    assert_eq!(back[at(0) + width / 2], -y[at(0) + width / 2], "the sine is odd");
                }
            }
        }
        println!("worst error {worst:.3} ulp");
        assert!(worst > 0.75, "the bound is loose: {worst}");
    }

    fn against_float64(device: &Device) {
        for (heads, width, extents) in FORMS {
            for rotary in [Rotary::default(), FAR] {
                let x = Random::new(width as u64).normals(extents.iter().product());
                let [y, back] = turned(device, &x, rotary, heads, extents);
                let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let want = in_float64(&exact, rotary, heads, width, extents);
                assert!(relative_l2(&y, &want) <= tolerance(1), "{extents:?}");
                // v is unchanged.
                let same = x.iter().zip(&want).filter(|(x, want)| f64::from(**x) == **want).count();
                assert!(same >= x.len() * heads[1] / (heads[0] + 2 * heads[1]));
                for ((y, x), _) in y.iter().zip(&x).zip(&want).filter(|((_, x), want)| f64::from(**x) == **want) {
                    assert_eq!(y.to_bits(), x.to_bits());
                }
                // Backward rotates back.
                let there: Vec<f32> = want.iter().map(|&y| y as f32).collect();
                let [_, again] = turned(device, &there, rotary, heads, extents);
                assert!(relative_l2(&again, &exact) <= tolerance(1), "{extents:?}");
                assert!(back != y);
            }
        }
    }

    /// An offset is a later position.
    fn offsets_continue_positions(device: &Device) {
        let row = Random::new(1).normals(96);
        let rows: Vec<f32> = row.iter().copied().cycle().take(5 * 96).collect();
        let [all, _] = turned(device, &rows, Rotary { offset: 10, ..FAR }, [1, 1], &[1, 5, 96]);
        for token in 0..5 {
            let [one, _] = turned(device, &row, Rotary { offset: 10 + token as u32, ..FAR }, [1, 1], &[1, 1, 96]);
            assert_same(token, &one, &all[token * 96..][..96]);
        }
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (heads, width, extents) = FORMS[seed as usize % FORMS.len()];
            let rotary = Rotary { base: 100.0, offset: seed as u32 };
            let shape = shape(extents);
            let operands = vec![normal(&mut random, &shape.as_rows())];
            let case = Case { sample: 40, ..Case::new("rotary", seed, 2, operands) };
            case.check(device, |_, tape, p| {
                let form = AttentionConfig::new(heads[0]).kv_heads(heads[1]);
                tape.rotary(&tape.reshape(&leaf(tape, p[0])?, shape)?, rotary, &form)
            }, |p| in_float64(&p[0], rotary, heads, width, extents));
        }
    }

    fn refuses(device: &Device) {
        trial(device, |trial| {
            let form = AttentionConfig::new(1);
            let [x, odd] = [24, 36].map(|length| trial.upload(&vec![1.0; length], [1, 1, length]));
            let (x, odd) = (x?, odd?);
            assert_refused(ops::rotary(trial, &odd, FAR, &form), &["rotary", "multiple of 8", "12 columns"]);
            assert_refused(ops::rotary(trial, &x, Rotary::new(1.0), &form), &["rotary", "a base above 1", "1"]);
            assert_refused(ops::rotary(trial, &x, Rotary::new(f64::NAN), &form), &["rotary", "a base above 1", "NaN"]);
            assert_refused(ops::rotary(trial, &x, FAR, &AttentionConfig::new(5)), &["rotary", "15 width", "[1, 1, 24]"]);
            let form = AttentionConfig::new(5);
            assert_refused(ops::rotary_backward(trial, x, FAR, &form), &["rotary_backward", "15 width", "[1, 1, 24]"]);
            Ok(())
        });
    }
}

attack! {
    rotary::rotary <S> {
        x: stored_pointer 128, tokens: number 2, heads: number 2, kv_heads: number 1, width: number 8, stacked: number 0,
        ratio: number 1u64 << 60, offset: number 3, back: number 0, samples: number 2, out: out_stored 128,
    }
}
