//! Samples of a long text: windows of one length, in an order that a seed determines.
//!
//! Invariant: a window depends only on the seed and its number, so a run resumes from the number of
//! samples that it has processed. Each pass over the text contains each window once.

#![forbid(unsafe_code)]

use std::ops::Range;
use stepscope_core::{Error, Result, SplitMix64};

/// The rounds of the network that shuffles.
const ROUNDS: u64 = 4;

/// The adjacent windows of a text, shuffled anew in each pass, without end.
///
/// They take no memory, however long the text is, because the order is a computed permutation
/// (Feistel, 1973).
///
/// ```
/// use stepscope::data::Windows;
///
/// let windows = Windows::new(1_000_000, 1024, 7)?;
/// let window = windows.window(0);
/// assert_eq!(window.len(), 1025, "the last token is only a label");
/// assert_eq!(windows.per_pass(), 976);
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: usize,
    context: usize,
    seed: u64,
}

impl Windows {
    /// Creates windows of `context` tokens, and one more for the last label, of a text of `tokens`
    /// tokens.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a context of zero tokens, or a text that is shorter than a window.
    pub fn new(tokens: usize, context: usize, seed: u64) -> Result<Self> {
        if context == 0 || tokens <= context {
            let expected =
                format!("a context of at least one token, and a text of at least {}", context.saturating_add(1));
            return Err(Error::misuse("windows", expected, format!("a context of {context}, and a text of {tokens}")));
        }
        Ok(Self { tokens, context, seed })
    }

    /// Returns the number of windows in a pass.
    pub fn per_pass(&self) -> u64 {
        ((self.tokens - 1) / self.context) as u64
    }

    /// Returns the token range of this window, counted from 0 over all passes. It has `context`
    /// inputs, whose labels are the tokens one further.
    pub fn window(&self, number: u64) -> Range<usize> {
        let (pass, place) = (number / self.per_pass(), number % self.per_pass());
        let key = SplitMix64::mix(self.seed ^ SplitMix64::mix(pass));
        // Tokens that no window covers at the end of one pass may be covered in another.
        let slack = (self.tokens - 1) % self.context;
        let first = (SplitMix64::mix(key) % (slack as u64 + 1)) as usize;
        let start = first + permuted(place, self.per_pass(), key) as usize * self.context;
        start..start + self.context + 1
    }

    /// Returns the windows of these numbers as a batch: the tokens of each window, and for each
    /// token the next one.
    ///
    /// ```
    /// use stepscope::data::Windows;
    ///
    /// let text = [0, 1, 2, 3, 4, 5, 6, 7, 8];
    /// let (tokens, next) = Windows::new(text.len(), 4, 7)?.batch::<4>(&text, 0..2)?;
    /// assert!(tokens.len() == 2 && tokens[0][1..] == next[0][..3] && tokens[1][1..] == next[1][..3]);
    /// # Ok::<(), stepscope::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Misuse`] for a text or a context of another length than that of the windows.
    #[allow(clippy::type_complexity, reason = "a tuple is a batch")]
    pub fn batch<const CONTEXT: usize>(
        &self,
        text: &[u32],
        numbers: Range<u64>,
    ) -> Result<(Vec<[u32; CONTEXT]>, Vec<[u32; CONTEXT]>)> {
        if (text.len(), CONTEXT) != (self.tokens, self.context) {
            let expected = format!("a text of {} tokens and a context of {}", self.tokens, self.context);
            return Err(Error::misuse("windows", expected, format!("{} and {CONTEXT}", text.len())));
        }
        let sample = |number| {
            let start = self.window(number).start;
            let from = |first: usize| std::array::from_fn(|at| text[first + at]);
            (from(start), from(start + 1))
        };
        Ok(numbers.map(sample).unzip())
    }
}

/// Maps a number below `count` to its image under the permutation that the key determines.
fn permuted(mut number: u64, count: u64, key: u64) -> u64 {
    // Half the bits of the largest number, rounded up. The network permutes numbers of twice as
    // many bits, and repeats for results outside the range.
    let half = (u64::BITS - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    loop {
        let (mut left, mut right) = (number >> half, number & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (SplitMix64::mix(key ^ SplitMix64::mix(right << 8 | round)) & mask));
        }
        number = left << half | right;
        if number < count {
            return number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each pass contains each window once, and all windows lie in the text.
        #[test]
        fn a_pass_has_each_window_once(context in 1usize..40, more in 0usize..2000, seed: u64, pass in 0u64..5) {
            let tokens = context + 1 + more;
            let windows = Windows::new(tokens, context, seed).unwrap();
            let count = windows.per_pass();
            let mut starts: Vec<usize> = (pass * count..(pass + 1) * count)
                .map(|number| {
                    let window = windows.window(number);
                    assert!(window.len() == context + 1 && window.end <= tokens, "{window:?} of {tokens}");
                    window.start
                })
                .collect();
            starts.sort_unstable();
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == context));
        }
    }

    #[test]
    fn passes_and_seeds_have_own_orders() {
        let order = |seed, pass: u64| -> Vec<usize> {
            let windows = Windows::new(100 * 8 + 1, 8, seed).unwrap();
            (pass * 100..(pass + 1) * 100).map(|number| windows.window(number).start).collect()
        };
        let (first, second, other) = (order(7, 0), order(7, 1), order(8, 0));
        assert!(first != second && first != other && second != other && first == order(7, 0));
        let stays = first.windows(2).filter(|pair| pair[0] + 8 == pair[1]).count();
        assert!(stays < 10, "too many windows keep the order of the text: {stays} of 99");
    }

    #[test]
    fn batches_are_their_windows() {
        let text: Vec<u32> = (0..50).collect();
        let windows = Windows::new(50, 8, 3).unwrap();
        let (tokens, next) = windows.batch::<8>(&text, 4..11).unwrap();
        for (number, (tokens, next)) in (4..11).zip(tokens.iter().zip(&next)) {
            let window = windows.window(number);
            assert_eq!(
                (&tokens[..], &next[..]),
                (&text[window.start..window.end - 1], &text[window.start + 1..window.end])
            );
        }
        assert_eq!((tokens.len(), next.len()), (7, 7));
        let error = windows.batch::<7>(&text[1..], 0..1).unwrap_err().to_string();
        assert!(error.ends_with("a text of 50 tokens and a context of 8, got 49 and 7"), "{error}");
    }

    #[test]
    fn short_texts_are_refused() {
        for (tokens, context) in [(0, 1), (8, 8), (3, 0)] {
            let error = Windows::new(tokens, context, 7).unwrap_err().to_string();
            assert!(error.contains(&format!("a text of {tokens}")), "{error}");
        }
        assert_eq!(Windows::new(9, 8, 7).unwrap().window(u64::MAX), 0..9);
    }
}
