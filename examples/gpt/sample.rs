//! What a trained model writes: token by token, each drawn from what the model makes of those before it.
//!
//! Invariant: the same weights, beginning, settings and seed give the same tokens on every machine: logits have the same bits everywhere,
//! and the host's part is in f64, by functions that have.

use stepscope::{Arena, Capacity, Device, Eager, Parameters, Result, SplitMix64, ops};

use crate::model::Gpt;

/// How a token is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    /// Logits are divided by it; 0: the likeliest token is taken.
    pub(crate) temperature: f32,
    /// Only so many of the likeliest tokens.
    pub(crate) top_k: Option<usize>,
    /// Only the likeliest tokens that have this probability together.
    pub(crate) top_p: Option<f32>,
}

/// Up to `count` tokens that follow `beginning`, as many as the model's context holds; ends behind `end`.
///
/// # Errors
/// Those of the device.
pub(crate) fn write(
    device: &Device,
    model: &Gpt,
    weights: &Parameters,
    beginning: &[u32],
    (count, end): (usize, Option<u32>),
    draw: Draw,
    seed: u64,
) -> Result<Vec<u32>> {
    let text = |end| Text { model, weights, beginning: newest(beginning, model), count, end, draw, seed };
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    let needed = small.measure(|step| text(None).write(step).map(drop))?.high_water_bytes();
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(needed)).build()?;
    arena.step(|step| text(end).write(step))
}

/// The end of a beginning that is long: half a context, so that there is room for what follows.
fn newest<'b>(beginning: &'b [u32], model: &Gpt) -> &'b [u32] {
    &beginning[beginning.len().saturating_sub((model.sizes.context / 2).max(1))..]
}

/// A text that is to be written.
struct Text<'t> {
    model: &'t Gpt,
    weights: &'t Parameters,
    beginning: &'t [u32],
    count: usize,
    end: Option<u32>,
    draw: Draw,
    seed: u64,
}

impl Text<'_> {
    /// What follows the beginning. The keys and values of all tokens are kept to the end of the step; the rest of a token ends with its scratch.
    fn write(&self, step: &mut Eager<'_>) -> Result<Vec<u32>> {
        let Self { model, weights, beginning, .. } = *self;
        let (mut tokens, mut random) = (beginning.to_vec(), SplitMix64::new(SplitMix64::mix(self.seed)));
        let (mut caches, mut logits) = (model.caches(step)?, step.empty([1, model.sizes.vocabulary])?);
        let most = model.sizes.context.min(beginning.len() + self.count);
        for place in 0..most.saturating_sub(1) {
            let token = step.upload(&tokens[place..=place], [1, 1])?;
            let at = step.upload(&[place as u32], [1, 1])?;
            step.scratch(|scratch| {
                let next = model.next(scratch, weights, [&token, &at], &mut caches)?;
                ops::copy_into(scratch, &next, &mut scratch.lend_mut(&mut logits))
            })?;
            if place + 1 < tokens.len() {
                continue;
            }
            let next = choose(&step.read(&logits)?, self.draw, &mut random);
            if Some(next) == self.end {
                break;
            }
            tokens.push(next);
        }
        Ok(tokens.split_off(beginning.len()))
    }
}

/// One of the tokens, as likely as their logits and `draw` say.
pub(crate) fn choose(logits: &[f32], draw: Draw, random: &mut SplitMix64) -> u32 {
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    // The likeliest first; of equal ones the first in the vocabulary.
    ranked.sort_by(|(a, one), (b, other)| other.total_cmp(one).then(a.cmp(b)));
    if draw.temperature == 0.0 {
        return ranked[0].0;
    }
    ranked.truncate(draw.top_k.unwrap_or(usize::MAX).max(1));
    let most = ranked[0].1;
    for (_, weight) in &mut ranked {
        *weight = libm::exp((*weight - most) / f64::from(draw.temperature));
    }
    if let Some(share) = draw.top_p {
        let all: f64 = ranked.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let kept = ranked.iter().take_while(|(_, weight)| {
            let before = sum;
            sum += weight;
            before < f64::from(share) * all
        });
        let kept = kept.count();
        ranked.truncate(kept.max(1));
    }
    let all: f64 = ranked.iter().map(|(_, weight)| weight).sum();
    let mut left = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * all;
    for &(token, weight) in &ranked {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Rounding has left a little.
    ranked[ranked.len() - 1].0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Draw = Draw { temperature: 1.0, top_k: None, top_p: None };

    fn drawn(draw: Draw) -> Vec<usize> {
        // Probabilities 0.1, 0.4, 0.2, 0.3.
        let logits = [0.1_f32, 0.4, 0.2, 0.3].map(f32::ln);
        let (mut random, mut counts) = (SplitMix64::new(3), vec![0; 4]);
        (0..10_000).for_each(|_| counts[choose(&logits, draw, &mut random) as usize] += 1);
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        for (counted, expected) in drawn(PLAIN).into_iter().zip([1000.0, 4000.0, 2000.0, 3000.0_f64]) {
            // Five standard deviations.
            assert!((counted as f64 - expected).abs() < 5.0 * (expected * (1.0 - expected / 1e4)).sqrt(), "{counted}");
        }
        // Squares of the probabilities, over 0.3.
        let cold = drawn(Draw { temperature: 0.5, ..PLAIN });
        assert!((cold[1] as f64 - 5333.0).abs() < 5.0 * 50.0, "{cold:?}");
    }

    #[test]
    fn only_what_is_asked_for_comes() {
        assert_eq!(drawn(Draw { temperature: 0.0, ..PLAIN }), [0, 10_000, 0, 0]);
        let two = drawn(Draw { top_k: Some(2), ..PLAIN });
        assert!(two[0] == 0 && two[2] == 0 && two[1] > two[3] && two[3] > 0, "{two:?}");
        let half = drawn(Draw { top_p: Some(0.5), ..PLAIN });
        assert!(half[0] == 0 && half[2] == 0 && half[3] > 0, "0.4 is too little, and 0.3 more is enough: {half:?}");
        assert_eq!(drawn(Draw { top_p: Some(0.3), ..PLAIN }), [0, 10_000, 0, 0]);
    }

    #[test]
    fn of_equal_logits_the_first_is_taken() {
        let mut random = SplitMix64::new(1);
        assert_eq!(choose(&[0.0, 1.0, 1.0], Draw { temperature: 0.0, ..PLAIN }, &mut random), 1);
    }
}
