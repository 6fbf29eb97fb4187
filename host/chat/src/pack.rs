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
    let mut contexts: Vec<Packed> = Vec::new();
    // The contexts by their free tokens.
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for sample in samples {
        let length = sample.ids.len().min(context);
        if !sample.counted[..length].iter().skip(1).any(|&counted| counted) {
            continue;
        }
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
                contexts.push(Packed { ids: vec![], labels: vec![], documents: vec![], tokens: 0, counted: 0 });
                contexts.len() - 1
            }
        };
        contexts[number].add(sample, length);
        let room = context - contexts[number].tokens;
        if room > 0 {
            by_room.entry(room).or_default().push(number);
        }
    }
    contexts.iter_mut().for_each(|packed| packed.pad(context));
    contexts
}

impl Packed {
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
