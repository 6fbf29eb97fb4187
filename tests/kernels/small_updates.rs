//! Tests of weights in 24 bits and of state in 8 bits: the formats against their definitions in
//! integers and in float64, and updates against those in f32 of the same numbers.

use crate::adamw::{no_copy, no_groups};
use crate::hostile::attack;
use crate::support::{Random, bits, on_each_device};
use crate::trial::{assert_same, trial};
use kernels::companded::{Code, RUN_WORDS};
use kernels::split::{join, split};
use kernels::update::{MasterType, RUN, StateType};
use kernels::{adamw, sgd};
use stepscope::kernel::Slice;
use stepscope::tensor::{Source, Target};
use stepscope::{bf16, ops};

/// Returns the nearest number whose last 8 bits are zero, ties to even, by definition.
fn nearest24(x: f32) -> f32 {
    let below = f32::from_bits(x.to_bits() & !0xff);
    let above = f32::from_bits((x.to_bits() & !0xff) + 0x100);
    // The step past the largest value would be 2^128, which is infinity here.
    let wide = |x: f32| if x.is_infinite() { 2f64.powi(128).copysign(x.into()) } else { x.into() };
    let (down, up) = ((f64::from(x) - wide(below)).abs(), (wide(above) - f64::from(x)).abs());
    if x.is_infinite() || down < up || down == up && below.to_bits() >> 8 & 1 == 0 { below } else { above }
}

/// Returns a weight's BF16 and correction as numbers.
fn parts(weight: f32) -> (bf16, i8) {
    let (half, correction) = split(weight);
    assert!(half <= 0xffff && correction <= 0xff);
    (bf16::from_bits(half as u16), correction as u8 as i8)
}

/// Every exponent and sign, with all 24-bit neighbours of special significands, and odd rests.
fn weights() -> Vec<f32> {
    let tops =
        (0..=0x1ff_u32).flat_map(|top| [0, 1, 0x7f, 0x80, 0x81, 0xff, 0x7f80, 0x7fff].map(|low| top << 23 | low << 8));
    let all = tops.flat_map(|bits| [0, 1, 0x7f, 0x80, 0x81, 0xff].map(|rest| f32::from_bits(bits | rest)));
    all.chain(Random::new(5).belows(10_000, u32::MAX).into_iter().map(f32::from_bits)).collect()
}

#[test]
fn weights_round_to_24_bits() {
    for weight in weights() {
        let (half, correction) = parts(weight);
        let joined = join(half.to_bits().into(), correction as u8 as u32);
        if weight.is_nan() {
            assert!(joined.is_nan() && half.is_nan() && correction == 0);
            continue;
        }
        let want = nearest24(weight);
        assert_eq!(joined.to_bits(), want.to_bits(), "{weight:e}");
        // The BF16 is the nearest one, ties away from zero.
        let unit = 256 * (i64::from(joined.to_bits() >> 16) - i64::from(half.to_bits()))
            + i64::from(joined.to_bits() >> 8 & 0xff);
        assert_eq!(i64::from(correction), unit, "{weight:e}");
        assert_eq!(half.to_f32().is_sign_negative(), weight.is_sign_negative());
    }
    assert_eq!(parts(1.0 + 2f32.powi(-8)), (bf16::from_f32(1.0 + 2f32.powi(-7)), -128));
    assert_eq!(parts(-1.0 - 2f32.powi(-15)), (-bf16::ONE, 1));
    assert_eq!(parts(-0.0), (bf16::NEG_ZERO, 0));
    assert_eq!(parts(f32::NEG_INFINITY), (bf16::NEG_INFINITY, 0));
    assert_eq!(parts(f32::MAX), (bf16::INFINITY, 0));
    assert_eq!(parts(f32::from_bits(0x7f7f_ff00)), (bf16::INFINITY, -1));
}

/// Every number of 24 bits but a NaN is the join of its own split.
#[test]
fn split_inverts_join() {
    for bits in (0..1 << 24).map(|bits: u32| bits << 8) {
        let weight = f32::from_bits(bits);
        let (half, correction) = split(weight);
        assert!(weight.is_nan() || join(half, correction).to_bits() == bits, "{bits:#x}");
    }
}

/// Returns a code's exact place between codes, in float64, by the definition in FlashOptim.
fn exact_code(code: Code, value: f32, scale: f32) -> f64 {
    match code {
        Code::Signed => {
            let t = f64::from(value) / f64::from(scale);
            127.0 * 2.0 * t / (1.0 + t.abs())
        }
        Code::Squares => 255.0 * f64::from(value).sqrt() / f64::from(scale),
    }
}

/// Returns the number of a code in float64.
fn exact_number(code: Code, word: u32, scale: f32) -> f64 {
    match code {
        Code::Signed => {
            let z = f64::from(word as u8 as i8) / 127.0;
            f64::from(scale) * z / (2.0 - z.abs())
        }
        Code::Squares => (f64::from(word as u8) / 255.0 * f64::from(scale)).powi(2),
    }
}

/// Decodes the words of a state, and compares each number with float64.
fn decoded(code: Code, words: &[u32]) -> Vec<f32> {
    let run = |run: &[u32]| {
        let scale = f32::from_bits(run[RUN_WORDS - 1]);
        let codes: Vec<u32> = run[..RUN_WORDS - 1].iter().flat_map(|word| word.to_le_bytes()).map(u32::from).collect();
        codes
            .into_iter()
            .map(move |word| {
                let (number, exact) = (code.decode(word, scale), exact_number(code, word, scale));
                assert!(scale.is_nan() || (f64::from(number) - exact).abs() <= 4e-7 * exact.abs(), "{number} {exact}");
                number
            })
            .collect::<Vec<_>>()
    };
    words.chunks(RUN_WORDS).flat_map(run).collect()
}

/// Asserts that words hold these numbers: the scale of each run exactly, and each code rounded to
/// the nearest.
fn assert_encoded(code: Code, words: &[u32], values: &[f32]) {
    for (run, values) in words.chunks(RUN_WORDS).zip(values.chunks(RUN)) {
        let scale = f32::from_bits(run[RUN_WORDS - 1]);
        if values.iter().any(|value| !value.is_finite()) {
            assert_eq!((run[0], run[RUN_WORDS - 1]), (0, 0x7fc0_0000));
            continue;
        }
        let largest = values.iter().map(|&value| code.magnitude(value)).fold(0.0, f32::max);
        assert_eq!(scale, largest);
        let codes = run[..RUN_WORDS - 1].iter().flat_map(|word| word.to_le_bytes());
        for (found, &value) in codes.zip(values) {
            let found = if code == Code::Signed { f64::from(found as i8) } else { f64::from(found) };
            let exact = if scale == 0.0 { 0.0 } else { exact_code(code, value, scale) };
            let smallest = code == Code::Squares && found == 1.0 && exact > 0.0 && exact < 0.5;
            assert!((found - exact).abs() <= 0.500_02 || smallest, "{value} of {scale}: {found}, {exact}");
        }
    }
}

/// The state of a part in a type, as words.
fn state_words(stored: StateType, code: Code, random: &mut Random, length: usize) -> Vec<u32> {
    match (stored, code) {
        (StateType::F32, Code::Signed) => bits(&random.normals(length)),
        (StateType::F32, Code::Squares) => bits(&random.uniforms(length, 0.0, 2.0)),
        (StateType::Bits8, _) => {
            let scales = random.uniforms(length / RUN, 0.0, 2.0);
            let words = scales.iter().flat_map(|scale| {
                let mut run = random.belows(RUN_WORDS - 1, u32::MAX);
                // The code -128 is never written.
                run.iter_mut().for_each(|word| *word &= 0x7f7f_7f7f);
                run.push(scale.to_bits());
                run
            });
            words.collect()
        }
    }
}

fn values(stored: StateType, code: Code, words: &[u32]) -> Vec<f32> {
    match stored {
        StateType::F32 => words.iter().map(|&word| f32::from_bits(word)).collect(),
        StateType::Bits8 => decoded(code, words),
    }
}

fn assert_state(stored: StateType, code: Code, words: &[u32], want: &[f32]) {
    match stored {
        StateType::F32 => assert_same("state", &values(stored, code, words), want),
        StateType::Bits8 => assert_encoded(code, words, want),
    }
}

/// Weights in a type: f32, halves and corrections.
struct Stored {
    masters: MasterType,
    weights: Vec<f32>,
    halves: Vec<bf16>,
    corrections: Vec<u32>,
}

impl Stored {
    fn new(masters: MasterType, weights: &[f32]) -> Self {
        let parts: Vec<_> = weights.iter().map(|&weight| parts(weight)).collect();
        let halves = parts.iter().map(|(half, _)| *half).collect();
        if masters == MasterType::F32 {
            return Self { masters, weights: weights.to_vec(), halves, corrections: Vec::new() };
        }
        let corrections: Vec<u8> = parts.iter().map(|(_, correction)| *correction as u8).collect();
        let corrections = corrections.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect();
        Self { masters, weights: Vec::new(), halves, corrections }
    }

    /// Asserts that the arrays hold these f32, and the copy of f32 weights too.
    fn assert(&self, (weights, halves, corrections): (&[f32], &[bf16], &[u32]), want: &[f32]) {
        let half = |half: &bf16| half.to_f32();
        let halves: Vec<f32> = halves.iter().map(half).collect();
        if self.masters == MasterType::F32 {
            assert_same("weights", weights, want);
            let copy: Vec<f32> = want.iter().map(|&weight| half(&bf16::from_f32(weight))).collect();
            return assert_same("copy", &halves, &copy);
        }
        let stored = Self::new(self.masters, want);
        assert_same("halves", &halves, &stored.halves.iter().map(half).collect::<Vec<_>>());
        assert_eq!(corrections, stored.corrections);
    }
}

/// Rate, betas, epsilon, decay, bias corrections and norm of AdamW.
const ADAMW: [f32; adamw::slot::LEN] = [1e-2, 0.9, 0.999, 1e-8, 0.01, 0.9, 0.6, 1.0];
/// Rate, momentum, decay, norm and Nesterov's flag of SGD.
const SGD: [f32; sgd::slot::LEN] = [1e-2, 0.9, 0.01, 1.0, 1.0];

on_each_device! {
    /// An update has the weights and the state that an update in f32 of the same numbers has, each
    /// stored in its type.
    fn adamw_stores_the_f32_update(device: &Device) {
        for &(_, formats) in adamw::adamw_small::VARIANTS {
            for (runs, special) in [(1, 1.0), (3, f32::NAN), (40, 0.0), (3, f32::INFINITY)] {
                let (length, mut random) = (runs * RUN, Random::new(runs as u64));
                let (masters, state) = formats;
                let (mut weights, mut gradients) = (random.normals(length), random.normals(length));
                weights.iter_mut().for_each(|weight| *weight = if masters == MasterType::Split { nearest24(*weight) } else { *weight });
                gradients[7] = special;
                weights[9] = if special == 1.0 { f32::INFINITY } else { weights[9] };
                let stored = Stored::new(masters, &weights);
                let m = state_words(state, Code::Signed, &mut random, length);
                let v = state_words(state, Code::Squares, &mut random, length);
                let (old_m, old_v) = (values(state, Code::Signed, &m), values(state, Code::Squares, &v));
                trial(device, |trial| {
                    let gradients = trial.upload(&gradients, [length])?;
                    let (hyper, norm) = (trial.upload(&ADAMW, [ADAMW.len()])?, trial.upload(&[4.0], [1])?);
                    let (mut w, mut first, mut second) = (trial.upload(&weights, [length])?, trial.upload(&old_m, [length])?, trial.upload(&old_v, [length])?);
                    ops::adamw(trial, &mut w, no_copy(), &gradients, &mut first, &mut second, &hyper, no_groups(), &norm)?;
                    let want = [trial.output(&w)?, trial.output(&first)?, trial.output(&second)?];
                    let (mut w, mut halves) = (trial.upload(&stored.weights, [stored.weights.len()])?, trial.upload(&stored.halves, [length])?);
                    let mut corrections = trial.upload(&stored.corrections, [stored.corrections.len()])?;
                    let (mut m, mut v) = (trial.upload(&m, [m.len()])?, trial.upload(&v, [v.len()])?);
                    trial.launch(adamw::adamw_small {
                        formats, weights: w.out(), has_bf16: 1, halves: halves.out(), corrections: corrections.out(),
                        gradients: gradients.slice(), m: m.out(), v: v.out(), hyper: hyper.slice(),
                        groups: Slice::empty(), squared_norm: norm.slice(),
                    })?;
                    stored.assert((&trial.output(&w)?, &trial.output(&halves)?, &trial.output(&corrections)?), &want[0]);
                    assert_state(state, Code::Signed, &trial.output(&m)?, &want[1]);
                    assert_state(state, Code::Squares, &trial.output(&v)?, &want[2]);
                    Ok(())
                });
            }
        }
    }

    fn sgd_stores_the_f32_update(device: &Device) {
        for &(_, formats) in sgd::sgd_small::VARIANTS {
            for (runs, special) in [(1, 1.0), (3, f32::NAN), (40, 0.0)] {
                let (length, mut random) = (runs * RUN, Random::new(runs as u64));
                let (masters, state) = formats;
                let (mut weights, mut gradients) = (random.normals(length), random.normals(length));
                weights.iter_mut().for_each(|weight| *weight = if masters == MasterType::Split { nearest24(*weight) } else { *weight });
                gradients[7] = special;
                let stored = Stored::new(masters, &weights);
                let words = state_words(state, Code::Signed, &mut random, length);
                let old = values(state, Code::Signed, &words);
                trial(device, |trial| {
                    let gradients = trial.upload(&gradients, [length])?;
                    let (hyper, norm) = (trial.upload(&SGD, [SGD.len()])?, trial.upload(&[4.0], [1])?);
                    let (mut w, mut velocity) = (trial.upload(&weights, [length])?, trial.upload(&old, [length])?);
                    ops::sgd(trial, &mut w, no_copy(), &gradients, &mut velocity, &hyper, no_groups(), &norm)?;
                    let want = [trial.output(&w)?, trial.output(&velocity)?];
                    let (mut w, mut halves) = (trial.upload(&stored.weights, [stored.weights.len()])?, trial.upload(&stored.halves, [length])?);
                    let mut corrections = trial.upload(&stored.corrections, [stored.corrections.len()])?;
                    let mut velocity = trial.upload(&words, [words.len()])?;
                    trial.launch(sgd::sgd_small {
                        formats, weights: w.out(), has_bf16: 1, halves: halves.out(), corrections: corrections.out(),
                        gradients: gradients.slice(), velocity: velocity.out(), hyper: hyper.slice(),
                        groups: Slice::empty(), squared_norm: norm.slice(),
                    })?;
                    stored.assert((&trial.output(&w)?, &trial.output(&halves)?, &trial.output(&corrections)?), &want[0]);
                    assert_state(state, Code::Signed, &trial.output(&velocity)?, &want[1]);
                    Ok(())
                });
            }
        }
    }

    /// The join of split masters, at lengths that end within a word.
    fn joined_masters(device: &Device) {
        for length in [1, 3, 4, 1023, 4096] {
            let weights: Vec<f32> = weights().into_iter().cycle().skip(length).take(length).collect();
            let mut words: Vec<u8> = weights.iter().map(|&weight| parts(weight).1 as u8).collect();
            words.resize(length.next_multiple_of(4), 0);
            let words: Vec<u32> = words.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect();
            let halves: Vec<bf16> = weights.iter().map(|&weight| parts(weight).0).collect();
            trial(device, |trial| {
                let (halves, corrections) = (trial.upload(&halves, [length])?, trial.upload(&words, [words.len()])?);
                let mut out = trial.empty::<f32>([length])?;
                let (halves, corrections) = (halves.slice(), corrections.slice());
                trial.launch(kernels::split_masters::join_masters { halves, corrections, out: out.out() })?;
                let want: Vec<f32> = weights.iter().map(|&x| if x.is_nan() { x } else { nearest24(x) }).collect();
                assert_same("joined", &trial.output(&out)?, &want);
                Ok(())
            });
        }
    }
}

attack! {
    split_masters::join_masters { halves: halves 9, corrections: u32s 3, out: out 9 }
}
