//! Samples packed into contexts of one length.
//!
//! ```text
//! ids        a0 a1 a2 a3 | b0 b1 b2 | 0      the tokens, and padding
//! labels     a1 a2 a3  - | b1 b2  - | -      each token's successor in its own sample, if it counts
//! documents   0  0  0  0 |  1  1  1 | 2      tokens attend only to their own sample
//! positions                                  rotary angles depend on distances only
//! ```
//! Invariant: each sample lies in one context, in order, and each counted token is the label of
//! exactly one token.

use crate::encode::Sample;
use std::collections::BTreeMap;

/// The label of a token that is not predicted.
pub const IGNORED: u32 = u32::MAX;

/// A context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The tokens, and zeros as padding.
    pub ids: Vec<u32>,
    /// The successor of each token, or [`IGNORED`].
    pub labels: Vec<u32>,
    /// The number of each token's sample within the context. Padding has a number of its own.
    pub documents: Vec<u32>,
    /// The tokens that are not padding.
    pub tokens: usize,
    /// The labels that are not [`IGNORED`].
    pub counted: usize,
}

/// Packs samples into contexts of `context` tokens. Each sample goes into the fullest context that
/// has room for it, or into a new one. Longer samples are cut to `context` tokens. Samples without
/// a counted token are left out. Contexts are in the order of their first samples.
pub fn pack(samples: &[Sample], context: usize) -> Vec<Packed> {
    let counts = |sample: &&Sample| sample.counted.iter().take(context).skip(1).any(|&counted| counted);
    let samples: Vec<&Sample> = samples.iter().filter(counts).collect();
    let contexts = places(samples.iter().map(|sample| sample.ids.len()), context);
    contexts.into_iter().map(|numbers| Packed::of(numbers.into_iter().map(|at| samples[at]), context)).collect()
}

/// Packs pairs of samples like [`pack`] into two contexts each: the first samples of some pairs,
/// and their second ones, by the same numbers. A pair takes the room of its longer sample in both.
pub fn pack_pairs(pairs: &[[Sample; 2]], context: usize) -> Vec<[Packed; 2]> {
    let length = |pair: &[Sample; 2]| pair[0].ids.len().max(pair[1].ids.len());
    let contexts = places(pairs.iter().map(length), context);
    let both =
        |numbers: Vec<usize>| [0, 1].map(|which| Packed::of(numbers.iter().map(|&at| &pairs[at][which]), context));
    contexts.into_iter().map(both).collect()
}

/// Returns the numbers of the samples of each context, from their lengths.
fn places(lengths: impl Iterator<Item = usize>, context: usize) -> Vec<Vec<usize>> {
    let (mut contexts, mut rooms): (Vec<Vec<usize>>, Vec<usize>) = (Vec::new(), Vec::new());
    // The contexts by their free tokens.
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (sample, length) in lengths.enumerate() {
        let length = length.min(context);
        let fitting =
            by_room.range_mut(length..).next().map(|(&room, list)| (room, list.pop().expect("no list is empty")));
        let number = match fitting {
            Some((room, number)) => {
                if by_room[&room].is_empty() {
                    by_room.remove(&room);
                }
                number
            }
            None => {
                contexts.push(Vec::new());
                rooms.push(context);
                contexts.len() - 1
            }
        };
        contexts[number].push(sample);
        rooms[number] -= length;
        if rooms[number] > 0 {
            by_room.entry(rooms[number]).or_default().push(number);
        }
    }
    contexts
}

impl Packed {
    /// Joins samples, each cut to `context` tokens, and fills the rest.
    fn of<'s>(samples: impl Iterator<Item = &'s Sample>, context: usize) -> Self {
        let mut packed = Self { ids: vec![], labels: vec![], documents: vec![], tokens: 0, counted: 0 };
        samples.for_each(|sample| packed.add(sample, sample.ids.len().min(context)));
        packed.pad(context);
        packed
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> usize {
        self.tokens.checked_sub(1).map_or(0, |last| self.documents[last] as usize + 1)
    }

    fn add(&mut self, sample: &Sample, length: usize) {
        let document = self.documents.last().map_or(0, |last| last + 1);
        let label = |at: usize| match at + 1 < length && sample.counted[at + 1] {
            true => sample.ids[at + 1],
            false => IGNORED,
        };
        self.ids.extend(&sample.ids[..length]);
        self.labels.extend((0..length).map(label));
        self.documents.extend(std::iter::repeat_n(document, length));
        self.tokens += length;
        self.counted += (1..length).filter(|&at| sample.counted[at]).count();
    }

    fn pad(&mut self, context: usize) {
        let document = self.documents.last().map_or(0, |last| last + 1);
        self.ids.resize(context, 0);
        self.labels.resize(context, IGNORED);
        self.documents.resize(context, document);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(ids: &[u32], counted: &[u8]) -> Sample {
        Sample { ids: ids.to_vec(), counted: counted.iter().map(|&counted| counted == 1).collect() }
    }

    #[test]
    fn samples_share_contexts() {
        let samples = [sample(&[1, 2, 3, 4], &[0, 0, 1, 1]), sample(&[5, 6, 7], &[1, 1, 0]), sample(&[8, 9], &[0, 0])];
        let packed = pack(&samples, 8);
        let want = Packed {
            ids: vec![1, 2, 3, 4, 5, 6, 7, 0],
            labels: vec![IGNORED, 3, 4, IGNORED, 6, IGNORED, IGNORED, IGNORED],
            documents: vec![0, 0, 0, 0, 1, 1, 1, 2],
            tokens: 7,
            counted: 3,
        };
        assert_eq!(packed, [want]);
        assert_eq!(packed[0].samples(), 2);
    }

    /// A pair is in two contexts with one number, as long as its longer sample.
    #[test]
    fn pairs_have_equal_numbers() {
        let long = sample(&[1, 2, 3, 4, 5], &[0, 0, 1, 1, 1]);
        let short = sample(&[1, 2, 6], &[0, 0, 1]);
        let pairs = [[long.clone(), short.clone()], [short.clone(), short.clone()], [short, long]];
        let packed = pack_pairs(&pairs, 8);
        let documents = |which: usize| packed.iter().map(|pair| &*pair[which].documents).collect::<Vec<_>>();
        assert_eq!(documents(0), [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]);
        assert_eq!(documents(1), [[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1]]);
        assert!(packed.iter().map(|pair| pair.each_ref().map(Packed::samples)).eq([[2, 2], [1, 1]]));
        assert_eq!(packed[1][1].labels, [IGNORED, 3, 4, 5, IGNORED, IGNORED, IGNORED, IGNORED]);
    }

    proptest! {
        /// Every counted token is a label once, after its predecessor, and no context is too long.
        #[test]
        fn counted_tokens_are_labels_once(lengths in prop::collection::vec(1usize..40, 0..60), context in 1usize..32) {
            let mut next = 0;
            let samples: Vec<Sample> = lengths.iter().map(|&length| {
                let ids: Vec<u32> = (next..next + length as u32).collect();
                next += length as u32;
                Sample { counted: ids.iter().map(|id| id % 3 != 0).collect(), ids }
            }).collect();
            let packed = pack(&samples, context);
            let mut labels = Vec::new();
            for one in &packed {
                prop_assert_eq!([one.ids.len(), one.labels.len(), one.documents.len()], [context; 3]);
                for at in 0..context {
                    if one.labels[at] != IGNORED {
                        prop_assert_eq!(one.labels[at], one.ids[at + 1]);
                        prop_assert_eq!(one.documents[at], one.documents[at + 1]);
                        labels.push(one.labels[at]);
                    }
                }
            }
            labels.sort_unstable();
            let mut want: Vec<u32> = samples.iter().flat_map(|sample| {
                (1..sample.ids.len().min(context)).filter(|&at| sample.counted[at]).map(|at| sample.ids[at])
            }).collect();
            want.sort_unstable();
            prop_assert_eq!(labels, want);
        }
    }
}
