//! Draws the next token from a vocabulary according to its logits.
//!
//! Invariant: the same logits, settings and seed give the same tokens on every machine and in every
//! version. Everything is computed in f64, with functions that have the same bits everywhere, and
//! in a fixed order.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use stepscope_core::{Error, Result, SplitMix64};

/// The settings for drawing tokens. The default uses the plain probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenSamplerConfig {
    /// The divisor of the logits. Below 1, likely tokens become likelier. At 0, the likeliest token
    /// is always taken (Ackley, Hinton and Sejnowski, 1985).
    pub temperature: f32,
    /// Restricts the choice to this many of the likeliest tokens (Fan, Lewis and Dauphin,
    /// "Hierarchical Neural Story Generation", 2018).
    pub top_k: Option<usize>,
    /// Further restricts it to the fewest tokens whose probabilities sum to this, the likeliest
    /// first. Above 0 and at most 1 (Holtzman and others, "The Curious Case of Neural Text
    /// Degeneration", 2020).
    pub top_p: Option<f32>,
}

impl Default for TokenSamplerConfig {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None }
    }
}

/// Draws one token after another. The seed determines the sequence of random numbers.
///
/// ```
/// use stepscope::data::{TokenSampler, TokenSamplerConfig};
///
/// let config = TokenSamplerConfig { temperature: 0.8, top_k: Some(2), ..Default::default() };
/// let mut sampler = TokenSampler::new(config, 7)?;
/// let logits = [0.5, 2.0, f32::NEG_INFINITY, 1.5];
/// let tokens: Vec<u32> = (0..100).map(|_| sampler.next(&logits)).collect::<Result<_, _>>()?;
/// assert!(tokens.contains(&1) && tokens.contains(&3), "the two likeliest");
/// assert!(!tokens.contains(&0) && !tokens.contains(&2), "and no others");
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenSampler {
    config: TokenSamplerConfig,
    random: SplitMix64,
}

impl TokenSampler {
    /// Creates a sampler at the start of a seed's sequence.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a temperature that is negative or not finite, a `top_k` of 0, or a
    /// `top_p` outside of (0, 1].
    pub fn new(config: TokenSamplerConfig, seed: u64) -> Result<Self> {
        let TokenSamplerConfig { temperature, top_k, top_p } = config;
        let good = temperature.is_finite()
            && temperature >= 0.0
            && top_k != Some(0)
            && top_p.is_none_or(|share| share > 0.0 && share <= 1.0);
        if !good {
            let expected = "a finite temperature of at least 0, a top_k of at least 1, a top_p above 0 and at most 1";
            return Err(Error::misuse("token_sampler", expected, format!("{config:?}")));
        }
        Ok(Self { config, random: SplitMix64::new(SplitMix64::mix(seed)) })
    }

    /// Draws a token from `logits`, `[vocabulary]`. A logit of minus infinity forbids its token.
    /// Among equally likely tokens, earlier ones take precedence for `top_k`, `top_p` and a
    /// temperature of 0. Sorts the vocabulary, or its `top_k` likeliest tokens, unless the
    /// temperature is 0.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a logit that is NaN or infinity, and if no token is allowed.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        float_mode::in_default(|| self.draw(logits))
    }

    fn draw(&mut self, logits: &[f32]) -> Result<u32> {
        let TokenSamplerConfig { temperature, top_k, top_p } = self.config;
        let refused = |got: String| {
            Error::misuse("token_sampler", "logits that are finite or minus infinity, at least one of them finite", got)
        };
        if let Some(at) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(refused(format!("{} for token {at}", logits[at])));
        }
        let finite = || (0u32..).zip(logits).filter(|(_, logit)| logit.is_finite());
        let ranks = finite().map(|(token, &logit)| rank(token, logit));
        if temperature == 0.0 {
            let likeliest = ranks.min().map(|rank| rank as u32);
            return likeliest.ok_or_else(|| refused(format!("{} tokens", logits.len())));
        }
        let mut ranks: Vec<u64> = ranks.collect();
        if let Some(top_k) = top_k.filter(|&top_k| top_k < ranks.len()) {
            ranks.select_nth_unstable(top_k);
            ranks.truncate(top_k);
        }
        ranks.sort_unstable();
        let logit = |rank: u64| f64::from(logits[rank as u32 as usize]);
        let most = logit(*ranks.first().ok_or_else(|| refused(format!("{} tokens", logits.len())))?);
        let weight = |rank| libm::exp((logit(rank) - most) / f64::from(temperature));
        let mut ranked: Vec<(u32, f64)> = ranks.into_iter().map(|rank| (rank as u32, weight(rank))).collect();
        let sum = |ranked: &[(u32, f64)]| ranked.iter().map(|(_, weight)| weight).sum::<f64>();
        if let Some(share) = top_p {
            let enough = f64::from(share) * sum(&ranked);
            let mut before = 0.0;
            let kept = ranked.iter().take_while(|(_, weight)| {
                let wanted = before < enough;
                before += weight;
                wanted
            });
            let kept = kept.count();
            ranked.truncate(kept.max(1));
        }
        let mut left = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * sum(&ranked);
        for &(token, weight) in &ranked {
            left -= weight;
            if left < 0.0 {
                return Ok(token);
            }
        }
        // Rounding has left a small remainder, which goes to the last token with a nonzero weight.
        // The likeliest token always has one.
        let last = ranked.iter().rfind(|(_, weight)| *weight > 0.0);
        Ok(last.unwrap_or(&ranked[0]).0)
    }
}

/// Returns a number that is smaller for a likelier token, and among equally likely ones for the
/// first in the vocabulary. Its lower half is the token.
fn rank(token: u32, logit: f32) -> u64 {
    // Adding plus zero maps both zeros to one. The bits of negative numbers fall as they rise.
    let bits = (logit + 0.0).to_bits();
    let rising = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!rising) << 32 | u64::from(token)
}

/// Makes tokens that a text already contains less likely, once each: divides a positive logit by
/// `penalty`, and multiplies a negative one by it (Keskar and others, "CTRL", 2019).
pub fn penalize_repetition(logits: &mut [f32], tokens: &[u32], penalty: f32) {
    if penalty == 1.0 {
        return;
    }
    let mut tokens = tokens.to_vec();
    tokens.sort_unstable();
    tokens.dedup();
    for token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: TokenSamplerConfig = TokenSamplerConfig { temperature: 1.0, top_k: None, top_p: None };
    const GREEDY: TokenSamplerConfig = TokenSamplerConfig { temperature: 0.0, ..PLAIN };

    fn drawn(config: TokenSamplerConfig) -> Vec<usize> {
        // Probabilities 0.1, 0.4, 0.2, 0.3.
        let logits = [0.1_f32, 0.4, 0.2, 0.3].map(f32::ln);
        let (mut sampler, mut counts) = (TokenSampler::new(config, 3).unwrap(), vec![0; 4]);
        (0..10_000).for_each(|_| counts[sampler.next(&logits).unwrap() as usize] += 1);
        counts
    }

    #[test]
    fn token_frequencies_match_probabilities() {
        for (counted, expected) in drawn(PLAIN).into_iter().zip([1000.0, 4000.0, 2000.0, 3000.0_f64]) {
            // Five standard deviations.
            assert!((counted as f64 - expected).abs() < 5.0 * (expected * (1.0 - expected / 1e4)).sqrt(), "{counted}");
        }
        // Squares of the probabilities, over 0.3.
        let cold = drawn(TokenSamplerConfig { temperature: 0.5, ..PLAIN });
        assert!((cold[1] as f64 - 5333.0).abs() < 5.0 * 50.0, "{cold:?}");
    }

    #[test]
    fn sampling_respects_its_limits() {
        assert_eq!(drawn(GREEDY), [0, 10_000, 0, 0]);
        assert_eq!(drawn(TokenSamplerConfig { temperature: f32::MIN_POSITIVE, ..PLAIN }), [0, 10_000, 0, 0]);
        let two = drawn(TokenSamplerConfig { top_k: Some(2), ..PLAIN });
        assert!(two[0] == 0 && two[2] == 0 && two[1] > two[3] && two[3] > 0, "{two:?}");
        let half = drawn(TokenSamplerConfig { top_p: Some(0.5), ..PLAIN });
        assert!(half[0] == 0 && half[2] == 0 && half[3] > 0, "a top_p of 0.5 must keep tokens 1 and 3: {half:?}");
        assert_eq!(drawn(TokenSamplerConfig { top_p: Some(0.3), ..PLAIN }), [0, 10_000, 0, 0]);
        assert_eq!(drawn(TokenSamplerConfig { top_k: Some(9), top_p: Some(1.0), ..PLAIN }), drawn(PLAIN));
    }

    /// Checks that the tokens of a seed never change.
    #[test]
    fn a_seed_names_the_tokens() {
        let tokens = |seed| {
            let config = TokenSamplerConfig { temperature: 0.8, top_k: Some(40), top_p: Some(0.9) };
            let mut sampler = TokenSampler::new(config, seed).unwrap();
            let logits: Vec<f32> = (0..100u32).map(|at| (at * 37 % 100) as f32 / 25.0).collect();
            (0..8).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<_>>()
        };
        // A Python program computes the same tokens.
        assert_eq!(tokens(7), [97, 62, 56, 48, 5, 89, 16, 51]);
        assert!(tokens(7) == tokens(7) && tokens(7) != tokens(8));
    }

    #[test]
    fn repeated_tokens_are_penalized_once() {
        let mut logits = [3.0, -1.0, 0.0, 2.0];
        penalize_repetition(&mut logits, &[1, 0, 0, 2, 9], 1.5);
        assert_eq!(logits, [2.0, -1.5, 0.0, 2.0]);
        penalize_repetition(&mut logits, &[3], 1.0);
        assert_eq!(logits, [2.0, -1.5, 0.0, 2.0]);
    }

    #[test]
    fn first_of_equal_logits_wins() {
        for zero in [0.0, -0.0] {
            let mut sampler = TokenSampler::new(GREEDY, 1).unwrap();
            assert_eq!(sampler.next(&[-1.0, zero, 0.0, -0.0]).unwrap(), 1);
            let mut sampler = TokenSampler::new(TokenSamplerConfig { top_k: Some(1), ..PLAIN }, 1).unwrap();
            assert_eq!(sampler.next(&[-1.0, zero, 0.0, -0.0]).unwrap(), 1);
        }
    }

    #[test]
    fn invalid_sampler_settings_are_refused() {
        for config in [
            TokenSamplerConfig { temperature: -1.0, ..PLAIN },
            TokenSamplerConfig { temperature: f32::NAN, ..PLAIN },
            TokenSamplerConfig { temperature: f32::INFINITY, ..PLAIN },
            TokenSamplerConfig { top_k: Some(0), ..PLAIN },
            TokenSamplerConfig { top_p: Some(0.0), ..PLAIN },
            TokenSamplerConfig { top_p: Some(1.5), ..PLAIN },
            TokenSamplerConfig { top_p: Some(f32::NAN), ..PLAIN },
        ] {
            let error = TokenSampler::new(config, 1).unwrap_err().to_string();
            assert!(error.contains("token_sampler: expected a finite temperature"), "{error}");
        }
        for config in [PLAIN, GREEDY] {
            let mut sampler = TokenSampler::new(config, 1).unwrap();
            for (logits, expected) in [
                (&[0.0, f32::NAN][..], "NaN for token 1"),
                (&[f32::INFINITY, 0.0], "inf for token 0"),
                (&[f32::NEG_INFINITY; 3], "3 tokens"),
                (&[], "0 tokens"),
            ] {
                let error = sampler.next(logits).unwrap_err().to_string();
                assert!(error.ends_with(expected), "{error}");
            }
        }
    }

    proptest! {
        /// Checks that for any logits the token is in the vocabulary, allowed, and among the
        /// likeliest.
        #[test]
        fn sampled_tokens_are_permitted(
            logits in prop::collection::vec(prop_oneof![-1e30f32..1e30, -3.0f32..3.0, Just(f32::NEG_INFINITY)], 1..50),
            (temperature, top_k, top_p, seed) in (0.0f32..4.0, 1usize..60, 0.01f32..1.0, any::<u64>()),
        ) {
            let config = TokenSamplerConfig { temperature, top_k: Some(top_k), top_p: Some(top_p) };
            let drawn = TokenSampler::new(config, seed).unwrap().next(&logits);
            let allowed = logits.iter().filter(|logit| logit.is_finite()).count();
            prop_assert_eq!(drawn.is_ok(), allowed > 0);
            if let Ok(token) = drawn {
                let own = logits[token as usize];
                prop_assert!(own.is_finite());
                prop_assert!(logits.iter().filter(|&&logit| logit > own).count() < top_k);
            }
        }
    }
}
