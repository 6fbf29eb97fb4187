//! The rule by which a device's matrix instructions add, found from the results of products.
//!
//! [`check`] multiplies random and hard numbers on a device, and compares the bits with those of
//! the emulator's rule ([`RULE`]). If some differ, it searches for the rule that gives them.
//!
//! ```
//! use stepscope::check::matrix_rule::{Factors, check};
//! use stepscope::{Device, DeviceKind};
//!
//! let found = check(&Device::open(DeviceKind::Emulated)?, Factors::Bf16)?;
//! assert_eq!(found.different, 0);
//! assert!(found.to_string().starts_with("BF16: 16 products at once, 25 bits"));
//! # Ok::<(), stepscope::Error>(())
//! ```
//! Invariant: the sums of a product are chains of instructions over ascending k. A wrong rule of
//! those that are searched differs on some of the numbers.

#![forbid(unsafe_code)]

use crate::same_bits::{Random, SPECIAL};
use half::bf16;
use kernels::format::{Bf16, Format as _, Tf32, round_tf32};
use kernels::mma::rule::{RULE, Rule, sum};
use std::fmt;
use stepscope_core::ops::{self, Gemm, Precision};
use stepscope_core::{Arena, Device, Result, Tensor};

/// The extents of the products, `[m, k] [k, n]`. They are not split. A sum has four instructions of
/// BF16, or eight of TF32.
const EXTENTS: [usize; 3] = [64, 64, 64];
/// The bytes of the products' arena.
const ARENA_BYTES: usize = 2 << 20;

/// The format of the factors of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// BF16 tensors.
    Bf16,
    /// f32 tensors that are rounded to TF32.
    Tf32,
}

impl Factors {
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::Tf32];

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Tf32 => "TF32",
        }
    }

    /// The k of an instruction.
    fn depth(self) -> usize {
        match self {
            Self::Bf16 => Bf16::PER_STEP as usize,
            Self::Tf32 => Tf32::PER_STEP as usize,
        }
    }

    fn rounded(self, x: f32) -> f32 {
        match self {
            Self::Bf16 => bf16::from_f32(x).to_f32(),
            Self::Tf32 => f32::from_bits(round_tf32(x)),
        }
    }
}

/// The numbers of a product, by which rules are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Normal,
    /// Each second number is almost the negative of the one before.
    Cancelling,
    /// Magnitudes from 2^-40 to 2^40.
    Wide,
    /// Zeros next to large numbers, and small numbers.
    Zeros,
    /// Products of two are from 2^-130 to 2^-150.
    Tiny,
    /// Subnormal numbers among normal ones.
    Subnormal,
    /// Infinities, NaNs and other extremes, one in 60.
    Special,
}

impl Numbers {
    const ALL: [Self; 7] =
        [Self::Normal, Self::Cancelling, Self::Wide, Self::Zeros, Self::Tiny, Self::Subnormal, Self::Special];

    /// Returns the numbers of A, or of B if `is_right`.
    fn of(self, random: &mut Random, length: usize, is_right: bool) -> Vec<f32> {
        let power = |exponent: u32| f32::from_bits((127 + exponent) << 23);
        let small = |exponent: u32| f32::from_bits((127 - exponent) << 23);
        let mut values = random.normals(length);
        for at in 0..length {
            let x = &mut values[at];
            match self {
                Self::Normal => {}
                Self::Cancelling if at % 2 == 1 => {
                    values[at] = -values[at - 1] * (1.0 + random.below(3) as f32 / 128.0);
                }
                Self::Cancelling => {}
                Self::Wide => *x *= power(random.below(81)) * small(40),
                Self::Zeros if is_right => *x *= if random.below(24) == 0 { power(100) } else { 1.0 },
                Self::Zeros => *x *= if random.below(4) == 0 { small(60) } else { 0.0 },
                Self::Tiny => *x *= small(65 + random.below(11)),
                Self::Subnormal => *x *= if random.below(4) == 0 { small(126) } else { 1.0 },
                Self::Special if random.below(60) == 0 => *x = SPECIAL[random.below(SPECIAL.len() as u32) as usize],
                Self::Special => {}
            }
        }
        values
    }
}

/// A product: its factors, `[m, k]` and `[k, n]`, already rounded to their format.
#[derive(Debug)]
struct Product {
    numbers: Numbers,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Product {
    fn all(factors: Factors) -> Vec<Self> {
        let (mut random, [m, n, k]) = (Random::new(63), EXTENTS);
        let mut of = |numbers: Numbers, length, is_right| {
            let values = numbers.of(&mut random, length, is_right).into_iter();
            values.map(|x| factors.rounded(x)).collect::<Vec<f32>>()
        };
        Numbers::ALL.map(|numbers| Self { numbers, a: of(numbers, m * k, false), b: of(numbers, k * n, true) }).into()
    }

    /// Returns the bits of the sums by a rule.
    fn by_rule(&self, factors: Factors, rule: Rule) -> Vec<u32> {
        match factors {
            Factors::Bf16 => self.by_steps::<16>(rule),
            Factors::Tf32 => self.by_steps::<8>(rule),
        }
    }

    fn by_steps<const DEPTH: usize>(&self, rule: Rule) -> Vec<u32> {
        let [m, n, k] = EXTENTS;
        let element = |row: usize, column: usize| {
            (0..k).step_by(DEPTH).fold(0.0, |old, first| {
                let factors: &[f32; DEPTH] = self.a[row * k + first..].first_chunk().expect("whole instructions");
                sum(rule, old, factors, |at| self.b[(first + at) * n + column])
            })
        };
        (0..m * n).map(|at| element(at / n, at % n).to_bits()).collect()
    }

    /// Returns the bits of the sums on a device.
    fn on_device(&self, arena: &mut Arena, factors: Factors) -> Result<Vec<u32>> {
        let [m, n, k] = EXTENTS;
        let form = Gemm::new(m, n, k).precision(Precision::Tf32);
        let sums = arena.step(|step| {
            let none = None::<&Tensor<'_>>;
            let (a, b) = (step.upload(&self.a, [m, k])?, step.upload(&self.b, [k, n])?);
            let mut out = step.empty::<f32>([m, n])?;
            match factors {
                Factors::Bf16 => {
                    let (a, b) = (ops::to_bf16(step, &a)?, ops::to_bf16(step, &b)?);
                    ops::gemm_into(step, &form, &a, &b, none, &mut out)?;
                }
                Factors::Tf32 => ops::gemm_into(step, &form, &a, &b, none, &mut out)?,
            }
            step.read(&out)
        })?;
        Ok(sums.into_iter().map(f32::to_bits).collect())
    }
}

/// The results that differ from another's, NaNs aside.
fn differing(results: &[u32], others: &[u32]) -> usize {
    let is_nan = |bits: u32| f32::from_bits(bits).is_nan();
    results.iter().zip(others).filter(|&(&a, &b)| a != b && !(is_nan(a) && is_nan(b))).count()
}

/// The rule that a device's instructions follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// The format of the factors.
    pub factors: Factors,
    /// The rule that gives all results, if one of those that were searched does.
    pub rule: Option<Rule>,
    /// The results that were compared.
    pub results: usize,
    /// The results that differ from [`RULE`]'s.
    pub different: usize,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { factors, rule, results, different } = *self;
        write!(f, "{}: ", factors.name())?;
        match rule {
            Some(Rule { words, fraction, least, zeros_count, nan }) => {
                let at_once = factors.depth() * words / RULE.words;
                let zeros = if zeros_count { "with" } else { "without" };
                write!(
                    f,
                    "{at_once} products at once, {fraction} bits, least exponent {least}, zeros {zeros} exponents, \
                     NaN {nan:08x}; "
                )?;
            }
            None => f.write_str("no rule that was tried fits; ")?,
        }
        match different {
            0 => write!(f, "{results} results equal the emulator's"),
            count => write!(f, "{count} of {results} results DIFFER from the emulator's"),
        }
    }
}

/// Compares a device's products with the emulator's rule, and finds the rule that they follow.
///
/// # Errors
/// Returns the device's errors.
pub fn check(device: &Device, factors: Factors) -> Result<Found> {
    let mut arena = Arena::bare(device, ARENA_BYTES)?;
    find(factors, |product| product.on_device(&mut arena, factors))
}

/// Finds the rule of the products that `multiply` computes.
fn find(factors: Factors, mut multiply: impl FnMut(&Product) -> Result<Vec<u32>>) -> Result<Found> {
    let products = Product::all(factors);
    let results = products.iter().map(&mut multiply).collect::<Result<Vec<_>>>()?;
    let differ = |rule: Rule, kinds: &[Numbers]| -> usize {
        let chosen = products.iter().zip(&results).filter(|(product, _)| kinds.contains(&product.numbers));
        chosen.map(|(product, results)| differing(results, &product.by_rule(factors, rule))).sum()
    };
    let different = differ(RULE, &Numbers::ALL);
    let nan = results.iter().flatten().copied().find(|&bits| f32::from_bits(bits).is_nan()).unwrap_or(RULE.nan);
    let fits = |rule: &Rule, kinds: &[Numbers]| differ(*rule, kinds) == 0;
    let search = || {
        let of_words = |words| (20..=28).map(move |fraction| Rule { words, fraction, ..RULE });
        let mut of_bits = [2, 4, 8].into_iter().flat_map(of_words);
        let plain = of_bits.find(|rule| fits(rule, &[Numbers::Normal, Numbers::Cancelling, Numbers::Wide]))?;
        let of_zeros = [false, true].map(|zeros_count| Rule { zeros_count, ..plain });
        let plain = of_zeros.into_iter().find(|rule| fits(rule, &[Numbers::Zeros]))?;
        let mut of_least = (-160..=-100).rev().map(|least| Rule { least, ..plain });
        of_least.find(|rule| fits(rule, &[Numbers::Tiny])).filter(|rule| fits(rule, &Numbers::ALL))
    };
    let rule = if different == 0 { Some(RULE) } else { search() };
    let results = results.iter().map(Vec::len).sum();
    Ok(Found { factors, rule: rule.map(|rule| Rule { nan, ..rule }), results, different })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stepscope_core::DeviceKind;
    use stepscope_core::MatrixInstruction;

    #[test]
    fn the_emulator_follows_its_rule() {
        for instruction in [MatrixInstruction::MmaSync, MatrixInstruction::Wgmma] {
            let device = Device::builder(DeviceKind::Emulated).matrix_instruction(instruction).open().unwrap();
            for factors in Factors::ALL {
                let found = check(&device, factors).unwrap();
                assert_eq!((found.different, found.rule), (0, Some(RULE)), "{instruction}: {found}");
            }
        }
    }

    /// Instructions of other rules are found, with their rule.
    #[test]
    fn other_rules_are_named() {
        for factors in Factors::ALL {
            for rule in [
                Rule { fraction: 24, ..RULE },
                Rule { fraction: 26, ..RULE },
                Rule { words: 4, fraction: 24, ..RULE },
                Rule { zeros_count: true, ..RULE },
                Rule { least: -126, ..RULE },
                Rule { least: -134, ..RULE },
                Rule { nan: 0x7fc0_0000, ..RULE },
            ] {
                let found = find(factors, |product| Ok(product.by_rule(factors, rule))).unwrap();
                assert_eq!(found.rule, Some(rule), "{found}");
                assert_eq!(found.different == 0, rule.nan != RULE.nan, "{rule:?}: {found}");
            }
        }
    }

    /// Kernels that skip an instruction, or add instructions in another order, follow no rule.
    #[test]
    fn wrong_kernels_are_found() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let mut arena = Arena::bare(&device, ARENA_BYTES).unwrap();
        let [m, n, k] = EXTENTS;
        for factors in Factors::ALL {
            let depth = factors.depth();
            let skips = |product: &Product| {
                let mut a = product.a.clone();
                (0..m).for_each(|row| a[row * k + depth..][..depth].fill(0.0));
                Product { a, b: product.b.clone(), ..*product }
            };
            // The same products in another order: the first two instructions change places.
            let swaps = |product: &Product| {
                let (mut a, mut b) = (product.a.clone(), product.b.clone());
                (0..m).for_each(|row| a[row * k..][..2 * depth].rotate_left(depth));
                b[..2 * depth * n].rotate_left(depth * n);
                Product { a, b, ..*product }
            };
            for wrong in [&skips as &dyn Fn(&Product) -> Product, &swaps] {
                let found = find(factors, |product| wrong(product).on_device(&mut arena, factors)).unwrap();
                assert!(found.different > found.results / 50 && found.rule.is_none(), "{found}");
            }
        }
    }
}
