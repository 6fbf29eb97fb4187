//! Tests of `ops::rotary` and its backward pass.

use crate::gradients::{Case, SEEDS, leaf, normal};
use crate::hostile::attack;
use crate::reference::error_ulps;
use crate::support::{Random, on_each_device, relative_l2, tolerance};
use crate::trial::{assert_refused, assert_same, trial};
use std::f64::consts::TAU;
use stepscope::Device;
use stepscope::ops::{self, AttentionConfig, PairFactors, Rotary, RotaryScaling};
use stepscope::tensor::Shape;

/// Heads and key heads, their width, and a matching shape.
const FORMS: [([usize; 2], usize, &[usize]); 4] =
    [([1, 1], 32, &[2, 7, 96]), ([4, 2], 64, &[1, 33, 512]), ([2, 2], 80, &[3, 2, 5, 160]), ([2, 1], 8, &[2, 9, 32])];

/// Large angles, each of which is nearly right in float64.
const LARGE_OFFSET: Rotary = Rotary { offset: 100_000, ..Rotary::new(500_000.0) };

fn shape(extents: &[usize]) -> Shape {
    match *extents {
        [a, b, c] => [a, b, c].into(),
        [a, b, c, d] => [a, b, c, d].into(),
        _ => unreachable!("a form has three or four extents"),
    }
}

/// Each scaling, with the settings of Llama 3.1 8B, Llama 3.2 1B and Qwen 3 among them.
const SCALINGS: [RotaryScaling; 6] = [
    RotaryScaling::Linear { factor: 4.0 },
    RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192 },
    RotaryScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, context: 8192 },
    RotaryScaling::Yarn { factor: 4.0, slow: 1.0, fast: 32.0, whole: true, context: 32_768, gain: 1.138_629_4 },
    RotaryScaling::Yarn { factor: 40.0, slow: 1.0, fast: 32.0, whole: false, context: 4096, gain: 1.0 },
    RotaryScaling::Yarn { factor: 2.0, slow: 3.0, fast: 3.5, whole: true, context: 64, gain: 0.5 },
];

/// Returns the angle of a pair, with the frequencies as transformers' `modeling_rope_utils.py`
/// computes them.
fn angle(rotary: Rotary, width: usize, tokens: usize, token: usize, pair: usize) -> f64 {
    let (base, columns) = (rotary.base, rotary.columns.unwrap_or(width) as f64);
    let frequency = base.powf(-2.0 * pair as f64 / columns);
    let scaled = match rotary.scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor,
        RotaryScaling::Llama3 { factor, low, high, context } => {
            let smooth = ((context as f64 * frequency / TAU - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
        RotaryScaling::Yarn { factor, slow, fast, whole, context, .. } => {
            let dim = |rotations: f64| columns * (context as f64 / (rotations * TAU)).ln() / (2.0 * base.ln());
            let (low, high) = if whole { (dim(fast).floor(), dim(slow).ceil()) } else { (dim(fast), dim(slow)) };
            let (low, mut high) = (low.max(0.0), high.min(columns - 1.0));
            if low == high {
                high += 0.001;
            }
            let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            frequency / factor * ramp + frequency * (1.0 - ramp)
        }
        RotaryScaling::Long { short, long, context, .. } => {
            let is_long = rotary.offset as usize + tokens > context;
            frequency / f64::from(if is_long { long[pair] } else { short[pair] })
        }
    };
    (f64::from(rotary.offset) + token as f64) * scaled
}

fn gain(rotary: Rotary) -> f64 {
    match rotary.scaling {
        RotaryScaling::Yarn { gain, .. } | RotaryScaling::Long { gain, .. } => f64::from(gain),
        _ => 1.0,
    }
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
        let half = rotary.columns.unwrap_or(width) / 2;
        for pair in (0..half).filter(|_| !is_v) {
            let (sin, cos) = angle(rotary, width, tokens, token, pair).sin_cos();
            let (sin, cos) = (sin * gain(rotary), cos * gain(rotary));
            let (a, b) = (x[pair], x[pair + half]);
            (y[pair], y[pair + half]) = (a * cos - b * sin, b * cos + a * sin);
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
        Ok([trial.output(&y)?, trial.output(&ops::launch::rotary_backward(trial, dy?, rotary, &form)?)?])
    })
}

on_each_device! {
    /// The result for a column of 1 and a column of 0 is the cosine and the sine. The angle is
    /// exact up to the float64 error of the base's power.
    fn cosine_and_sine(device: &Device) {
        let mut worst = 0.0f64;
        for width in [8, 32, 64, 80, 96, 128, 256] {
            for rotary in [Rotary::default(), Rotary { offset: 1000, ..Rotary::new(1.5) }, LARGE_OFFSET, Rotary { offset: u32::MAX, ..LARGE_OFFSET }] {
                let tokens = 40;
                let x: Vec<f32> =
                    (0..tokens * 3 * width).map(|at| if at % width < width / 2 { 1.0 } else { 0.0 }).collect();
                let [y, back] = turned(device, &x, rotary, [1, 1], &[1, tokens, 3 * width]);
                for (token, pair) in (0..tokens).flat_map(|token| (0..width / 2).map(move |pair| (token, pair))) {
                    let angle = angle(rotary, width, tokens, token, pair);
                    let at = |part: usize| (token * 3 + part) * width + pair;
                    for (got, want) in [(y[at(0)], angle.cos()), (y[at(0) + width / 2], angle.sin())] {
                        let lost = angle * 2f64.powi(-44) / f64::from(f32::EPSILON) / want.abs().max(1e-30);
                        let error = error_ulps(got, want);
                        assert!(error <= 2.0 + 2.0 * lost, "{width}, {rotary:?}, {token}, {pair}: {error} ulp, {got} for {want}");
                        worst = if lost < 0.01 { worst.max(error) } else { worst };
                    }
                    assert_eq!([y[at(0)], back[at(0)]], [y[at(1)], y[at(1)]], "k is rotated like q, and the cosine is even");
                    assert_eq!(back[at(0) + width / 2], -y[at(0) + width / 2], "the sine is odd");
                }
            }
        }
        println!("the worst error is {worst:.3} ulp");
        assert!(worst > 0.75, "the bound is loose: the worst error is only {worst} ulp");
    }

    fn against_float64(device: &Device) {
        for (heads, width, extents) in FORMS {
            for rotary in [Rotary::default(), LARGE_OFFSET] {
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

    /// Scaled frequencies, forward and backward, of all columns and of some.
    fn scaled_against_float64(device: &Device) {
        for (scaling, (heads, width, extents)) in SCALINGS.into_iter().flat_map(|scaling| FORMS.map(|form| (scaling, form))) {
            for (base, columns, offset) in [(500_000.0, None, 0), (500_000.0, Some(8), 3), (1e6, Some(width), 9000)] {
                let rotary = Rotary { base, offset, columns, scaling };
                let x = Random::new(width as u64).normals(extents.iter().product());
                let [y, back] = turned(device, &x, rotary, heads, extents);
                let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                assert!(relative_l2(&y, &in_float64(&exact, rotary, heads, width, extents)) <= tolerance(1), "{rotary:?}");
                // Backward is the transpose: <back(x), x> = <x, y(x)>.
                let dot = |a: &[f32]| a.iter().zip(&exact).map(|(&a, b)| f64::from(a) * b).sum::<f64>();
                let norm = exact.iter().map(|x| x * x).sum::<f64>();
                assert!((dot(&y) - dot(&back)).abs() <= 1e-6 * norm, "{rotary:?}");
            }
        }
    }

    /// LongRoPE divides each frequency by its own factor, which depends on the number of positions.
    fn factors_of_pairs_against_float64(device: &Device) {
        let factors = |pairs: usize, seed: u64| -> PairFactors {
            let mut random = Random::new(seed);
            let factors: Vec<f32> = (0..pairs).map(|pair| 1.0 + pair as f32 * (0.1 + random.normal().abs())).collect();
            PairFactors::new(&factors).unwrap()
        };
        for (heads, width, extents) in FORMS {
            for (columns, offset, context) in [(None, 0, 4), (None, 5, 1000), (Some(8), 90_000, 64)] {
                let pairs = columns.unwrap_or(width) / 2;
                let scaling = RotaryScaling::Long { short: factors(pairs, 1), long: factors(pairs, 2), context, gain: 1.19 };
                let rotary = Rotary { offset, columns, scaling, ..Rotary::default() };
                let x = Random::new(width as u64).normals(extents.iter().product());
                let [y, back] = turned(device, &x, rotary, heads, extents);
                let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                assert!(relative_l2(&y, &in_float64(&exact, rotary, heads, width, extents)) <= tolerance(1), "{rotary:?}");
                // Backward is the transpose: <back(x), x> = <x, y(x)>.
                let dot = |a: &[f32]| a.iter().zip(&exact).map(|(&a, b)| f64::from(a) * b).sum::<f64>();
                let norm = exact.iter().map(|x| x * x).sum::<f64>();
                assert!((dot(&y) - dot(&back)).abs() <= 1e-6 * norm, "{rotary:?}");
                // The choice of the factors, made before.
                let positions = offset as usize + extents[extents.len() - 2];
                let [chosen, _] = turned(device, &x, rotary.for_positions(positions), heads, extents);
                assert_eq!(chosen, y, "{rotary:?}");
            }
        }
    }

    /// A factor of 1 and a rotation of all columns change no bit.
    fn neutral_scaling_is_none(device: &Device) {
        let x = Random::new(5).normals(5 * 96);
        let want = turned(device, &x, LARGE_OFFSET, [1, 1], &[1, 5, 96]);
        for scaling in [
            RotaryScaling::Linear { factor: 1.0 },
            RotaryScaling::Llama3 { factor: 1.0, low: 1.0, high: 4.0, context: 8192 },
            RotaryScaling::Yarn { factor: 1.0, slow: 1.0, fast: 32.0, whole: true, context: 4096, gain: 1.0 },
        ] {
            let got = turned(device, &x, Rotary { columns: Some(32), scaling, ..LARGE_OFFSET }, [1, 1], &[1, 5, 96]);
            assert_eq!(got, want, "{scaling:?}");
        }
    }

    /// An offset is a later position.
    fn offsets_continue_positions(device: &Device) {
        let row = Random::new(1).normals(96);
        let rows: Vec<f32> = row.iter().copied().cycle().take(5 * 96).collect();
        let [all, _] = turned(device, &rows, Rotary { offset: 10, ..LARGE_OFFSET }, [1, 1], &[1, 5, 96]);
        for token in 0..5 {
            let [one, _] = turned(device, &row, Rotary { offset: 10 + token as u32, ..LARGE_OFFSET }, [1, 1], &[1, 1, 96]);
            assert_same(token, &one, &all[token * 96..][..96]);
        }
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (heads, width, extents) = FORMS[seed as usize % FORMS.len()];
            let rotary = Rotary { offset: seed as u32, ..Rotary::new(100.0) };
            let shape = shape(extents);
            let operands = vec![normal(&mut random, &shape.as_rows())];
            let case = Case { sample: 40, ..Case::new("rotary", seed, 2, operands) };
            case.check(device, |_, tape, p| {
                let form = AttentionConfig::new(heads[0]).kv_heads(heads[1]);
                tape.rotary(&leaf(tape, p[0])?.reshape(shape)?, rotary, &form)
            }, |p| in_float64(&p[0], rotary, heads, width, extents));
        }
    }

    fn refuses(device: &Device) {
        trial(device, |trial| {
            let form = AttentionConfig::new(1);
            let [x, odd] = [24, 36].map(|length| trial.upload(&vec![1.0; length], [1, 1, length]));
            let (x, odd) = (x?, odd?);
            assert_refused(ops::rotary(trial, &odd, LARGE_OFFSET, &form), &["rotary", "multiple of 8", "12 columns"]);
            assert_refused(PairFactors::new(&[1.0; 65]), &["factors of at most 64 pairs", "65 factors"]);
            let long = |factors: &[f32], gain| {
                let factors = PairFactors::new(factors).unwrap();
                RotaryScaling::Long { short: factors, long: factors, context: 64, gain }
            };
            assert_refused(ops::rotary(trial, &x, Rotary::new(1.0), &form), &["rotary", "a base above 1", "1"]);
            assert_refused(ops::rotary(trial, &x, Rotary::new(f64::NAN), &form), &["rotary", "a base above 1", "NaN"]);
            for (columns, scaling, words) in [
                (Some(0), RotaryScaling::None, "0 of 8 columns"),
                (Some(12), RotaryScaling::None, "12 of 8 columns"),
                (Some(16), RotaryScaling::None, "16 of 8 columns"),
                (None, RotaryScaling::Linear { factor: 0.5 }, "a factor of at least 1"),
                (None, RotaryScaling::Linear { factor: f64::NAN }, "a factor of at least 1"),
                (None, RotaryScaling::Llama3 { factor: 8.0, low: 4.0, high: 1.0, context: 8192 }, "4 and 1"),
                (None, RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 0 }, "a context of at least 1"),
                (None, RotaryScaling::Yarn { factor: 2.0, slow: 1.0, fast: 32.0, whole: true, context: 64, gain: f32::INFINITY }, "a finite gain"),
                (None, long(&[1.0; 3], 1.0), "4 factors"),
                (None, long(&[1.0, 1.0, 0.5, 1.0], 1.0), "a factor of at least 1"),
                (None, long(&[1.0; 4], f32::NAN), "a finite gain"),
            ] {
                assert_refused(ops::rotary(trial, &x, Rotary { columns, scaling, ..LARGE_OFFSET }, &form), &["rotary", words]);
            }
            assert_refused(ops::rotary(trial, &x, LARGE_OFFSET, &AttentionConfig::new(5)), &["rotary", "15 width", "[1, 1, 24]"]);
            let form = AttentionConfig::new(5);
            assert_refused(ops::launch::rotary_backward(trial, x, LARGE_OFFSET, &form), &["rotary_backward", "15 width", "[1, 1, 24]"]);
            Ok(())
        });
    }
}

attack! {
    rotary::rotary <S> {
        x: stored_pointer 128, layout: qkv [2, 2, 1, 8, 0], rotated: number 8,
        frequencies: frequencies ([1 << 60, 1 << 60, 1 << 60, 1 << 50, 1 << 50, 1 << 60], [13, 0]),
        gain: float 1.0, offset: number 3, back: number 0, samples: number 2, out: out_stored 128,
    }
    rotary::rotary_pairs <S> {
        layout: qkv [2, 2, 1, 8, 0], rotated: number 8, first: number 0, turns: array [1_u64 << 60; 16], gain: float 1.0,
        offset: number 3, back: number 0, samples: number 2, out: out_stored 128,
    }
}
