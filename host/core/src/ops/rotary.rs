//! Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
//! Embedding", 2021).

use super::attention::{AttentionConfig, Sizes};
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::{Pointer, PointerMut};
use kernels::rotary::{self as kernel, Frequencies, PAIRS, RADIAN, times};

/// The rotation of pairs of columns at each position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base, above 1. Pair i rotates by `base^(-2 i / columns)` radians per position, before
    /// scaling.
    pub base: f64,
    /// The position of the first token.
    pub offset: u32,
    /// The columns of each head that rotate, from the first on: a multiple of 8. The others stay
    /// as they are. `None` rotates all.
    pub columns: Option<usize>,
    /// The change of the frequencies for a longer context.
    pub scaling: RotaryScaling,
}

/// A change of the frequencies of [`Rotary`] that extends the context of a trained model. All
/// factors are at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a `Rotary` is a value that is copied, so it owns no memory")]
pub enum RotaryScaling {
    /// The frequencies of the base.
    None,
    /// Position interpolation: all frequencies are divided by `factor` (Chen et al., "Extending
    /// Context Window of Large Language Models via Position Interpolation", 2023).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's scaling. Frequencies of at most `low` turns in `context` positions are divided
    /// by `factor`, those of at least `high` turns stay, and those in between are interpolated
    /// linearly over the frequency.
    Llama3 {
        /// The divisor of slow frequencies.
        factor: f64,
        /// The turns at which interpolation begins.
        low: f64,
        /// The turns at which it ends, above `low`.
        high: f64,
        /// The context of the model before scaling.
        context: usize,
    },
    /// YaRN (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models",
    /// 2023). Frequencies of at most `slow` turns in `context` positions are divided by `factor`,
    /// those of at least `fast` turns stay, and those in between are interpolated linearly over the
    /// pair's index. Sine and cosine are multiplied by `gain`.
    Yarn {
        /// The divisor of slow frequencies.
        factor: f64,
        /// The turns at which the ramp begins, 1 in the paper.
        slow: f64,
        /// The turns at which it ends, above `slow`; 32 in the paper.
        fast: f64,
        /// True if both ends of the ramp move outward to whole indices, as in the paper's code.
        whole: bool,
        /// The context of the model before scaling.
        context: usize,
        /// The factor of queries and keys: `0.1 ln(factor) + 1` in the paper.
        gain: f32,
    },
    /// LongRoPE (Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
    /// 2024), as in Phi-3. The frequency of each pair is divided by a factor of its own: one of
    /// `short` if no position reaches `context`, and otherwise one of `long`. Sine and cosine are
    /// multiplied by `gain`. This takes a copy, and a launch for 16 pairs.
    Long {
        /// The divisors for positions below `context`.
        short: PairFactors,
        /// The divisors for more positions.
        long: PairFactors,
        /// The context of the model before scaling.
        context: usize,
        /// The factor of queries and keys, `sqrt(1 + ln(factor) / ln(context))` in the paper.
        gain: f32,
    },
}

/// A factor for each pair of columns that rotates.
#[derive(Clone, Copy, PartialEq)]
pub struct PairFactors {
    factors: [f32; Self::MOST],
    pairs: usize,
}

impl PairFactors {
    /// The most pairs: those of a head of 128 columns.
    pub const MOST: usize = 64;

    /// Takes the factors of pairs 0, 1 and so on.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more than [`PairFactors::MOST`].
    pub fn new(factors: &[f32]) -> Result<Self> {
        let mut all = [1.0; Self::MOST];
        let Some(own) = all.get_mut(..factors.len()) else {
            let expected = format!("factors of at most {} pairs", Self::MOST);
            return Err(Error::misuse("rotary", expected, format!("{} factors", factors.len())));
        };
        own.copy_from_slice(factors);
        Ok(Self { factors: all, pairs: factors.len() })
    }
}

impl std::ops::Deref for PairFactors {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.factors[..self.pairs]
    }
}

impl std::fmt::Debug for PairFactors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

impl Rotary {
    /// Makes a rotation of all columns that starts at position 0, without scaling.
    pub const fn new(base: f64) -> Self {
        Self { base, offset: 0, columns: None, scaling: RotaryScaling::None }
    }

    /// Fixes the choice of [`RotaryScaling::Long`] to the factors for this many positions, for a
    /// text whose tokens are computed in several steps.
    #[must_use]
    pub fn for_positions(self, positions: usize) -> Self {
        match self.scaling {
            RotaryScaling::Long { short, long, context, gain } => {
                let factors = if positions > context { long } else { short };
                Self { scaling: RotaryScaling::Long { short: factors, long: factors, context, gain }, ..self }
            }
            _ => self,
        }
    }

    /// Computes the frequencies, the factor of sine and cosine, and the columns that rotate, for
    /// `tokens` of heads of `width` columns.
    fn angles(self, op: &'static str, Sizes { width, tokens, .. }: Sizes) -> Result<Angles> {
        let check = |holds: bool, expected: &str, got: String| match holds {
            true => Ok(()),
            false => Err(Error::misuse(op, expected, got)),
        };
        let columns = self.columns.unwrap_or(width);
        check(self.base > 1.0 && self.base.is_finite(), "a base above 1", self.base.to_string())?;
        check(width.is_multiple_of(8), "heads of a multiple of 8 columns", format!("{width} columns"))?;
        let fit = columns.is_multiple_of(8) && (1..=width).contains(&columns);
        check(fit, "a multiple of 8 of the heads' columns that rotate", format!("{columns} of {width} columns"))?;
        let scaled =
            |factor: f64| check(factor >= 1.0 && factor.is_finite(), "a factor of at least 1", factor.to_string());
        let rising = |low: f64, high: f64| {
            let fit = low > 0.0 && low < high && high.is_finite();
            check(fit, "two rising numbers of turns above 0", format!("{low} and {high}"))
        };
        // libm's functions are the same on every machine.
        let ratio = fraction(libm::pow(self.base, -2.0 / columns as f64));
        let all = Frequencies { start: RADIAN, ratio, shrink: 0, low: 0, span: 0, shift: 0, inverse: 0, by_pair: 0 };
        let (frequencies, gain) = match self.scaling {
            RotaryScaling::None => (all, 1.0),
            RotaryScaling::Linear { factor } => {
                scaled(factor)?;
                // A factor of 1 would be 2^64.
                let start = if factor > 1.0 { times(RADIAN, fraction(1.0 / factor)) } else { RADIAN };
                (Frequencies { start, ..all }, 1.0)
            }
            RotaryScaling::Llama3 { factor, low, high, context } => {
                scaled(factor)?;
                rising(low, high)?;
                check(context > 0, "a context of at least 1", context.to_string())?;
                let [low, high] = [low, high].map(|turns| fraction(turns / context as f64));
                (ramp(all, factor, false, low, high), 1.0)
            }
            RotaryScaling::Yarn { factor, slow, fast, whole, context, gain } => {
                scaled(factor)?;
                rising(slow, fast)?;
                check(context > 0, "a context of at least 1", context.to_string())?;
                check(gain.is_finite(), "a finite gain", gain.to_string())?;
                // The index of the pair that makes this many turns in the context.
                let index = |turns: f64| {
                    let radians = context as f64 / (turns * std::f64::consts::TAU);
                    columns as f64 * libm::log(radians) / (2.0 * libm::log(self.base))
                };
                let (first, last) = (index(fast), index(slow));
                let (first, last) = if whole { (first.floor(), last.ceil()) } else { (first, last) };
                let [first, last] =
                    [first.max(0.0), last.min(columns as f64 - 1.0)].map(|at| (at * 2f64.powi(32)) as u64);
                (ramp(all, factor, true, first, last), gain)
            }
            RotaryScaling::Long { short, long, context, gain } => {
                let factors = if self.offset as usize + tokens > context { long } else { short };
                let pairs = columns / 2;
                check(factors.len() == pairs, &format!("{pairs} factors"), factors.len().to_string())?;
                factors.iter().try_for_each(|&factor| scaled(factor.into()))?;
                check(gain.is_finite(), "a finite gain", gain.to_string())?;
                let of_pair = |(pair, &factor): (usize, &f32)| {
                    let slowed = libm::pow(self.base, -2.0 * pair as f64 / columns as f64) / f64::from(factor);
                    (RADIAN as f64 * slowed) as u64
                };
                let mut all = [0; PairFactors::MOST];
                all.iter_mut().zip(factors.iter().enumerate().map(of_pair)).for_each(|(place, turns)| *place = turns);
                return Ok(Angles { turns: Turns::OfPairs(all), gain, columns });
            }
        };
        Ok(Angles { turns: Turns::Geometric(frequencies), gain, columns })
    }
}

/// The kernel's form of [`Rotary`].
struct Angles {
    turns: Turns,
    gain: f32,
    columns: usize,
}

/// The turns per position, in units of 2^-64 turns.
#[expect(clippy::large_enum_variant, reason = "it exists only for the duration of a launch")]
enum Turns {
    /// The coefficients of a formula.
    Geometric(Frequencies),
    /// A number for each pair.
    OfPairs([u64; PairFactors::MOST]),
}

/// Returns a number below 1 in units of 2^-64.
fn fraction(number: f64) -> u64 {
    (number * 2f64.powi(64)) as u64
}

/// Divides slow frequencies by `factor`, with a ramp from `low` to `high`.
fn ramp(all: Frequencies, factor: f64, by_pair: bool, low: u64, high: u64) -> Frequencies {
    if factor == 1.0 {
        return all;
    }
    let span = high.saturating_sub(low).max(1);
    let shift = span.leading_zeros();
    let inverse = ((1 << 127) / u128::from(span << shift)).min(u128::from(u64::MAX)) as u64;
    Frequencies { shrink: fraction(1.0 / factor), low, span, shift, inverse, by_pair: u32::from(by_pair), ..all }
}

impl Default for Rotary {
    /// Makes a rotation with base 10,000 that starts at position 0.
    fn default() -> Self {
        Self::new(10_000.0)
    }
}

/// `(x cos - y sin, y cos + x sin)` for columns i and i + n / 2, `(x, y)`, of the n columns that
/// rotate of each head of q and k, as in GPT-NeoX and Llama; v is copied. The angle is `(offset +
/// token) base^(-2 i / n)`, unless it is scaled. Its sine and cosine are within 2 ulp at every
/// position. `qkv`: a layout of [`AttentionConfig`]; result: the same. Queues the work, and needs
/// no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when shapes do not fit `form`, the columns are not a multiple of 8, or the
/// scaling is invalid; [`Error::ArenaFull`].
#[track_caller]
pub fn rotary<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    rotary: Rotary,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    let sizes = form.sizes("rotary", qkv.shape())?;
    let angles = rotary.angles("rotary", sizes)?;
    match angles.turns {
        Turns::Geometric(frequencies) => {
            let mut y = step.empty(qkv.shape())?;
            launch(step, sizes, (frequencies, &angles, rotary.offset, false), (qkv.pointer(), y.out()))?;
            Ok(y)
        }
        Turns::OfPairs(turns) => {
            let mut y = ops::copy(step, qkv)?;
            launch_pairs(step, sizes, (&turns, &angles, rotary.offset, false), &mut y)?;
            Ok(y)
        }
    }
}

/// The gradient of [`rotary`]'s `qkv`, from `dy`, the gradient of its result, in the memory of
/// `dy`. It rotates back. Queues the work, and needs no scratch memory.
#[track_caller]
pub fn rotary_backward<'s, S: Stored>(
    step: &Step<'s>,
    mut dy: Tensor<'s, S>,
    rotary: Rotary,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    let sizes = form.sizes("rotary_backward", dy.shape())?;
    let angles = rotary.angles("rotary_backward", sizes)?;
    match angles.turns {
        Turns::Geometric(frequencies) => {
            launch(step, sizes, (frequencies, &angles, rotary.offset, true), dy.in_place())?;
        }
        Turns::OfPairs(turns) => launch_pairs(step, sizes, (&turns, &angles, rotary.offset, true), &mut dy)?,
    }
    Ok(dy)
}

#[track_caller]
fn launch<S: Stored>(
    step: &Step<'_>,
    sizes: Sizes,
    (frequencies, angles, offset, back): (Frequencies, &Angles, u32, bool),
    (x, out): (Pointer<'_, S>, PointerMut<'_, S>),
) -> Result<()> {
    step.launch(kernel::rotary {
        x,
        layout: sizes.layout(),
        rotated: angles.columns as u32,
        frequencies,
        gain: angles.gain,
        offset,
        back: u32::from(back),
        samples: sizes.batch as u32,
        out,
    })
}

/// Rotates `x` in place, with a launch for each 16 pairs.
#[track_caller]
fn launch_pairs<S: Stored>(
    step: &Step<'_>,
    sizes: Sizes,
    (turns, angles, offset, back): (&[u64; PairFactors::MOST], &Angles, u32, bool),
    x: &mut Tensor<'_, S>,
) -> Result<()> {
    let (groups, _) = turns.as_chunks::<PAIRS>();
    for (number, &turns) in groups.iter().enumerate() {
        let first = number * PAIRS;
        if first >= angles.columns / 2 {
            break;
        }
        step.launch(kernel::rotary_pairs {
            layout: sizes.layout(),
            rotated: angles.columns as u32,
            first: first as u32,
            turns,
            gain: angles.gain,
            offset,
            back: u32::from(back),
            samples: sizes.batch as u32,
            out: x.out(),
        })?;
    }
    Ok(())
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::rotary`]. Backward is [`ops::launch::rotary_backward`].
    #[track_caller]
    pub fn rotary<S: Stored>(
        &self,
        qkv: &Var<'s, S>,
        rotary: Rotary,
        form: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("rotary", [qkv])?;
        let y = ops::rotary(self.step(), qkv.value(), rotary, form)?;
        let (qkv, form) = (*qkv, *form);
        Ok(op.record(y.save(), move |back, dy| {
            let dqkv = ops::launch::rotary_backward(back.step(), dy, rotary, &form)?;
            back.add(&qkv, dqkv)
        }))
    }
}
