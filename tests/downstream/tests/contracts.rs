//! No argument of any size gets a kernel out of its buffers: what the contracts multiply and add does not wrap.
//!
//! Every kernel of the library is launched with small honest buffers while its numbers, one or two at a time, are hostile: near
//! powers of two, near `usize::MAX`, and such that products of them wrap to the length of a buffer. Each launch must be refused by
//! the contract, or stay inside its arguments, which the emulator's race mode watches. Invariant: this package is compiled without
//! overflow checks (see its `Cargo.toml`), as a release build is; with them, a contract that wraps would panic, and be seen.

#![forbid(unsafe_code)]

use cuda_std::emulator::Mode;
use cuda_std::launch::{Contract, Scalar};
use kernels::mma::FRAGMENT;
use std::collections::BTreeSet;
use stepscope::{Arena, Capacity, Device, DeviceKind, Error, Result, Source, Target};

/// A parameter of a kernel that is a number.
struct Number {
    name: &'static str,
    honest: u64,
    /// The largest that it can be.
    most: u64,
}

/// The numbers of a launch, in the order of the parameters.
struct Numbers<'n> {
    hostile: [Option<(usize, u64)>; 2],
    known: &'n mut Vec<Number>,
    next: usize,
}

impl Numbers<'_> {
    /// The number that the launch's next parameter is.
    fn next<S: Scalar>(&mut self, name: &'static str, honest: S) -> S {
        let at = self.next;
        self.next += 1;
        if self.known.len() == at {
            self.known.push(Number { name, honest: honest.to_word(), most: S::from_word(u64::MAX).to_word() });
        }
        let chosen = self.hostile.iter().flatten().find(|(number, _)| *number == at);
        S::from_word(chosen.map_or(honest.to_word(), |(_, word)| *word))
    }
}

/// What a number may be set to, where buffers have `lengths` elements.
fn hostile(&Number { honest, most, .. }: &Number, lengths: &[u64]) -> Vec<u64> {
    let mut words = vec![0, 1, 2, 3, honest.wrapping_sub(1), honest + 1, honest << 1];
    words.extend(
        [31, 32, 58, 59, 60, 61, 62, 63].into_iter().flat_map(|bit| [1 << bit, (1 << bit) + 1, (1 << bit) + honest]),
    );
    words.extend([u64::from(u32::MAX), u64::from(u32::MAX - 1), u64::MAX, u64::MAX - 1, u64::MAX.wrapping_sub(honest)]);
    words.extend(u64::MAX.checked_div(honest).into_iter().flat_map(|most| [most, most + 1]));
    // Three times this is a length, modulo 2^64.
    words.extend(lengths.iter().map(|length| length.wrapping_mul(0xaaaa_aaaa_aaaa_aaab)));
    let words: BTreeSet<u64> = words.into_iter().map(|word| word & most).filter(|word| *word != honest).collect();
    words.into_iter().collect()
}

/// Where a contract accepts more hostile values of a number than this, it is free, or not looked at.
const FEW: usize = 6;

/// All values of which there are few, else the least and the largest, which tell the two apart.
fn telling(values: &[u64]) -> Vec<u64> {
    match values {
        [least, .., largest] if values.len() > FEW => vec![*least, *largest],
        few => few.to_vec(),
    }
}

/// Launches of a kernel: the honest one; with each number hostile; with each two of them, where the contract accepts both and
/// not each alone, as it would if their product wrapped. `run` asks the contract, and launches if told to.
fn attack(kernel: &'static str, lengths: &[u64], mut run: impl FnMut(&mut Numbers<'_>, bool) -> Result<()>) {
    let mut known = Vec::new();
    let mut accepted = |hostile, known: &mut Vec<Number>, launch| {
        let outcome = Mode::RACES.scope(|| run(&mut Numbers { hostile, known, next: 0 }, launch));
        let choice = || hostile.iter().flatten().map(|&(at, word)| (known[at].name, word)).collect::<Vec<_>>();
        let refused = matches!(outcome, Err(Error::Contract { .. }));
        assert!(refused || outcome.is_ok(), "{kernel}, with {:?}: {outcome:?}", choice());
        !refused
    };
    assert!(accepted([None; 2], &mut known, true), "{kernel}: the honest launch is refused");
    // Of each number the values that are refused alone, and of the others those that tell.
    let mut alone: Vec<[Vec<u64>; 2]> = Vec::new();
    for at in 0..known.len() {
        let words = hostile(&known[at], lengths).into_iter();
        let (good, bad): (Vec<u64>, Vec<u64>) =
            words.partition(|word| accepted([Some((at, *word)), None], &mut known, false));
        let good = telling(&good);
        good.iter().for_each(|word| assert!(accepted([Some((at, *word)), None], &mut known, true)));
        alone.push([bad, good]);
    }
    for (at, [bad, good]) in alone.iter().enumerate() {
        for (other, [bad_with, good_with]) in alone[..at].iter().enumerate() {
            for (words, with) in [(bad, bad_with), (bad, good_with), (good, bad_with)] {
                for with in with {
                    let pair = |word| [Some((at, word)), Some((other, *with))];
                    let both: Vec<u64> =
                        words.iter().copied().filter(|&word| accepted(pair(word), &mut known, false)).collect();
                    for word in telling(&both) {
                        accepted(pair(word), &mut known, true);
                    }
                }
            }
        }
    }
}

/// Attacks kernels. After a parameter's name stands what it is: a buffer that is read (`f32s`, `u32s`), read by a pointer
/// (`pointer`) or written (`out`, `out_u32`), by its elements; a `number`; or a `float`.
macro_rules! attack {
    ($($file:ident :: $kernel:ident $(by $choice:ident)? { $($name:ident: $kind:ident $value:expr),* $(,)? })*) => {
        /// The kernels' names.
        fn attacked() -> BTreeSet<&'static str> {
            let mut names = BTreeSet::new();
            $(names.extend(attack!(@variants $file $kernel $($choice)?).map(|(name, _)| name));)*
            names
        }

        $(#[test]
        fn $kernel() {
            let device = Device::open(DeviceKind::Emulated).unwrap();
            let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
            arena
                .step(|step| {
                    let mut lengths: Vec<u64> = Vec::new();
                    $(attack!(@make step, lengths, $name, $kind, $value);)*
                    for (name, _choice) in attack!(@variants $file $kernel $($choice)?) {
                        attack(name, &lengths, |numbers, launch| {
                            let _ = &numbers;
                            let kernel = kernels::$file::$kernel {
                                $($choice: _choice,)?
                                $($name: attack!(@argument numbers, $name, $kind, $value)),*
                            };
                            match kernel.grid() {
                                Ok(_) if !launch => Ok(()),
                                _ => step.launch(kernel),
                            }
                        });
                    }
                    Ok(())
                })
                .unwrap();
        })*
    };
    (@variants $file:ident $kernel:ident) => { [(stringify!($kernel), ())].into_iter() };
    (@variants $file:ident $family:ident $choice:ident) => { kernels::$file::$family::VARIANTS.iter().copied() };
    (@make $step:ident, $lengths:ident, $name:ident, f32s, $length:expr) => {
        let $name = $step.upload(&vec![1.0_f32; $length], [$length])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, pointer, $length:expr) => {
        attack!(@make $step, $lengths, $name, f32s, $length);
    };
    (@make $step:ident, $lengths:ident, $name:ident, u32s, $length:expr) => {
        let $name = $step.upload(&vec![0_u32; $length], [$length])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out, $length:expr) => {
        let mut $name = $step.upload(&vec![1.0_f32; $length], [$length])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out_u32, $length:expr) => {
        let mut $name = $step.upload(&vec![0_u32; $length], [$length])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, $number:ident, $value:expr) => {};
    (@argument $numbers:ident, $name:ident, f32s, $length:expr) => { $name.slice() };
    (@argument $numbers:ident, $name:ident, u32s, $length:expr) => { $name.slice() };
    (@argument $numbers:ident, $name:ident, pointer, $length:expr) => { $name.pointer() };
    (@argument $numbers:ident, $name:ident, out, $length:expr) => { $name.out() };
    (@argument $numbers:ident, $name:ident, out_u32, $length:expr) => { $name.out() };
    (@argument $numbers:ident, $name:ident, number, $value:expr) => { $numbers.next(stringify!($name), $value) };
    (@argument $numbers:ident, $name:ident, float, $value:expr) => { $value };
}

/// The words of the fragments of one matrix of up to 32 rows and eight k.
const WORDS: usize = FRAGMENT as usize;

// Products: two batches of `[5, 7] [7, 6]`.
attack! {
    matmul::matmul by tile {
        a: f32s 70, b: f32s 84, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60, m: number 5, n: number 6, k: number 7,
        lda: number 7, ldb: number 6, ldc: number 6, chunk: number 7, batches: number 2, stride_a: number 35,
        stride_b: number 42, stride_c: number 30, stride_bias: number 6, beta: float 1.0, flags: number 12,
    }
    matmul_tensor::matmul_tensor by variant {
        a: u32s 2 * WORDS, b: u32s 2 * WORDS, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60, m: number 5,
        n: number 6, k: number 7, ldc: number 6, chunk: number 7, batches: number 2, stride_a: number WORDS,
        stride_b: number WORDS, stride_c: number 30, stride_bias: number 6, beta: float 1.0, flags: number 12,
    }
    precision::round by format {
        a: f32s 70, a_along: out_u32 2 * WORDS, a_across: out_u32 2 * WORDS, a_rows: number 5, a_cols: number 7,
        a_ld: number 7, a_batches: number 2, a_stride: number 35,
        b: f32s 84, b_along: out_u32 2 * WORDS, b_across: out_u32 2 * WORDS, b_rows: number 7, b_cols: number 6,
        b_ld: number 6, b_batches: number 2, b_stride: number 42,
        c: f32s 60, c_along: out_u32 2 * WORDS, c_across: out_u32 2 * WORDS, c_rows: number 5, c_cols: number 6,
        c_ld: number 6, c_batches: number 2, c_stride: number 30, sides: number 0x999,
    }
    activation::tanh_forward { x: f32s 9, y: out 9 }
    activation::tanh_backward { y: f32s 9, dy: f32s 9, dx: out 9 }
    activation::gelu_forward { x: f32s 9, y: out 9 }
    activation::gelu_backward { x: f32s 9, dy: f32s 9, dx: out 9 }
    activation::gelu_bias_backward {
        x: f32s 24, dy: f32s 24, cols: number 8, accumulate: number 1, dx: out 24, db: out 8,
    }
    adamw::adamw { weights: out 9, gradients: f32s 9, m: out 9, v: out 9, hyper: f32s 8, squared_norm: f32s 1 }
    adamw::adamw_groups {
        weights: out 9, gradients: f32s 9, m: out 9, v: out 9, hyper: f32s 16, groups: u32s 1, squared_norm: f32s 1,
    }
    attention::attention_forward {
        qkv: f32s 3072, gains: f32s 128, tokens: number 4, heads: number 2, epsilon: float 1e-6, scale: float 0.125,
        out: out 1024, probabilities: out 64, inverse_rms: out 32,
    }
    attention::attention_backward {
        qkv: f32s 3072, gains: f32s 128, inverse_rms: f32s 32, probabilities: f32s 64, dout: f32s 1024, tokens: number 4,
        heads: number 2, scale: float 0.125, dqkv: out 3072, dgains: out 512,
    }
    checksum::checksum { x: u32s 5000, out: out_u32 4 }
    clip::clip_factor { squared_norm: f32s 1, max_norm: float 1.0, out: out 1 }
    elementwise::add { a: f32s 9, b: f32s 9, out: out 9 }
    elementwise::add_assign { a: f32s 9, out: out 9 }
    elementwise::scale { x: f32s 9, factor: float 2.0, out: out 9 }
    elementwise::scale_by { x: f32s 9, factor: f32s 1, out: out 9 }
    elementwise::add_bias { x: f32s 24, bias: f32s 8, cols: number 8, out: out 24 }
    fill::fill { out: out 9, length: number 9, value: float 1.0 }
    fill::copy { x: f32s 9, out: out 9 }
    guard::guard_write { block: out_u32 100, length: number 100, start: number 40 }
    guard::guard_check { block: u32s 100, start: number 40, place: number 1, found: out_u32 2 }
    loss::cross_entropy {
        logits: f32s 24, labels: u32s 3, classes: number 8, weight: float 1.0, scale: float 1.0, losses: out 1,
        dlogits: out 24,
    }
    matmul::sum_splits {
        partials: f32s 180, splits: number 3, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60, m: number 5, n: number 6,
        ldc: number 6, batches: number 2, stride_c: number 30, stride_bias: number 6, beta: float 1.0, flags: number 12,
    }
    norm::rms_norm_forward {
        x: f32s 24, gain: f32s 8, cols: number 8, epsilon: float 1e-6, y: out 24, inverse_rms: out 3,
    }
    norm::rms_norm_backward {
        x: f32s 24, gain: f32s 8, inverse_rms: f32s 3, dy: f32s 48, parts: number 2, cols: number 8,
        chunk: number kernels::norm::backward_rows(3, 8), add: number 3, dx: out 24, dgain: out 8,
    }
    reduce::sum_columns { x: f32s 24, cols: number 8, scale: float 1.0, accumulate: number 1, out: out 3 }
    reduce::sum_rows { x: f32s 24, cols: number 8, chunk: number 2, scale: float 1.0, accumulate: number 1, out: out 16 }
    reduce::sum_all { x: f32s 5000, scale: float 1.0, accumulate: number 1, out: out 2 }
    reduce::squared_norm { x: f32s 5000, out: out 2 }
    reduce::max_all { x: f32s 5000, out: out 2 }
    reduce::max_columns { x: f32s 24, cols: number 8, out: out 3 }
    reduce::argmax_columns { x: f32s 24, cols: number 8, out: out_u32 3 }
    scalars::scalars { y: out 9, length: number 9, function: number 0, first: number 0, stride: number 1 }
    sgd::sgd { weights: out 9, gradients: f32s 9, velocity: out 9, hyper: f32s 5, squared_norm: f32s 1 }
    sgd::sgd_groups {
        weights: out 9, gradients: f32s 9, velocity: out 9, hyper: f32s 10, groups: u32s 1, squared_norm: f32s 1,
    }
    softmax::softmax_forward { x: f32s 24, cols: number 8, y: out 24 }
    softmax::softmax_backward { y: f32s 24, dy: f32s 24, cols: number 8, dx: out 24 }
    tokens::mean_tokens_forward { x: f32s 24, tokens: number 3, cols: number 4, length: number 8, y: out 8 }
    tokens::mean_tokens_backward { dy: f32s 8, tokens: number 3, cols: number 4, dx: out 24 }
    transpose::transpose { x: f32s 24, rows: number 3, cols: number 4, y: out 24 }
}

#[test]
fn every_kernel_is_attacked() {
    let known: BTreeSet<&str> = kernels::entries().map(|entry| entry.name).collect();
    assert!(known.contains("fill"), "{known:?}");
    assert_eq!(known, attacked(), "kernels that exist, and those attacked here");
}

#[test]
fn this_package_has_no_overflow_checks() {
    assert_eq!(
        std::hint::black_box(usize::MAX).wrapping_add(1),
        std::hint::black_box(usize::MAX) + std::hint::black_box(1)
    );
}
