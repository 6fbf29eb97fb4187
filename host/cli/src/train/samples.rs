//! Samples of a text, as batches for the trainer.
//!
//! Invariant: a sample depends only on its number, the text, the shares and the seed, so a run
//! resumes from the number of samples that it has processed.

use std::ops::Range;
use std::sync::Arc;

use stepscope::data::{Loader, Windows};
use stepscope::{HostBatch, HostInputs, Result};

use crate::run::updates::TokenBatch;
use crate::train::text::{Source, Text};

/// The samples of one step.
pub(crate) struct Sequences {
    /// Tokens per sample.
    context: usize,
    /// `[samples, context]`.
    pub(crate) ids: Vec<u32>,
    /// The next tokens, `[samples, context]`.
    pub(crate) labels: Vec<u32>,
    /// The document number of each token, `[samples, context]`, if requested.
    documents: Option<Vec<u32>>,
}

/// The shape of a sample.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// Tokens per sample.
    pub(crate) context: usize,
    /// The token that ends each document, if tokens attend only to their own document.
    pub(crate) end: Option<u32>,
}

impl Sequences {
    /// Returns samples of zeros, for measurements that ignore the values.
    pub(crate) fn zeros(samples: usize, form: Form) -> Self {
        let zeros = vec![0; samples * form.context];
        let documents = form.end.map(|_| zeros.clone());
        Self { context: form.context, ids: zeros.clone(), labels: zeros, documents }
    }

    /// Returns the samples at these windows.
    pub(crate) fn of(text: &Text, windows: &[Range<usize>], form: Form) -> Result<Self> {
        let mut sequences = Self { context: form.context, ids: Vec::new(), labels: Vec::new(), documents: None };
        let mut tokens = Vec::new();
        for window in windows {
            tokens.clear();
            text.read(window.clone(), &mut tokens)?;
            sequences.ids.extend_from_slice(&tokens[..form.context]);
            sequences.labels.extend_from_slice(&tokens[1..]);
        }
        sequences.documents = form.end.map(|end| documents(&sequences.ids, form.context, end));
        Ok(sequences)
    }
}

/// Returns the document number of each token, which increases by one after each end token.
fn documents(ids: &[u32], context: usize, end: u32) -> Vec<u32> {
    let number = |document: &mut u32, &id: &u32| {
        let own = *document;
        *document += u32::from(id == end);
        Some(own)
    };
    ids.chunks(context).flat_map(|sample| sample.iter().scan(0, number)).collect()
}

impl HostBatch for Sequences {
    fn len(&self) -> usize {
        self.ids.len() / self.context
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        let shape = [self.len(), self.context];
        let inputs = HostInputs::new().with(&self.ids, shape)?.with(&self.labels, shape)?;
        match &self.documents {
            Some(documents) => inputs.with(documents, shape),
            None => Ok(inputs),
        }
    }
}

impl TokenBatch for Sequences {
    fn weight(&self) -> usize {
        self.len()
    }

    fn tokens(&self) -> usize {
        self.ids.len()
    }
}

/// The order of the samples of a text. In each round, every source gives as many samples as its
/// share, spread evenly over the round. A source's samples are its [`Windows`], so each pass over
/// it contains each window once.
#[derive(Clone)]
pub(crate) struct Order {
    /// The position of the first token of each source, and its windows.
    sources: Vec<(usize, Windows)>,
    shares: Vec<u64>,
    /// The source of each sample of a round, and the number of samples that the source gave before
    /// in the round.
    turns: Vec<(usize, u64)>,
}

impl Order {
    /// Creates the order for these shares, one for each source.
    ///
    /// # Errors
    /// Never, since each source is long enough.
    pub(crate) fn new(text: &Text, context: usize, seed: u64, shares: &[u32]) -> Result<Self> {
        let sources = text
            .sources()
            .iter()
            .map(|source| Ok((source.training.start, Windows::new(source.training.len(), context, seed)?)));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let shares: Vec<u64> = shares.iter().copied().map(u64::from).collect();
        let round: u64 = shares.iter().sum();
        let mut given = vec![0; shares.len()];
        let turns = (1..=round).map(|turn| {
            // The source that lacks the most of its share.
            let lacking = |source: &usize| {
                i128::from(shares[*source]) * i128::from(turn) - i128::from(given[*source]) * i128::from(round)
            };
            let source = (0..shares.len()).rev().max_by_key(lacking).unwrap_or(0);
            given[source] += 1;
            (source, given[source] - 1)
        });
        let turns = turns.collect();
        Ok(Self { sources, shares, turns })
    }

    /// Returns the positions of a sample's tokens, and of the token after them.
    pub(crate) fn window(&self, number: u64) -> Range<usize> {
        let round = self.turns.len() as u64;
        let (source, before) = self.turns[(number % round) as usize];
        let (start, windows) = &self.sources[source];
        let window = windows.window(number / round * self.shares[source] + before);
        start + window.start..start + window.end
    }
}

/// Returns an endless stream of batches that starts after this many samples. Each has `accumulate`
/// parts of `batch` samples, and is prepared while earlier ones are trained on.
pub(crate) fn batches(
    text: &Arc<Text>,
    order: &Order,
    form: Form,
    [batch, accumulate]: [usize; 2],
    behind: u64,
) -> Result<Loader<Vec<Sequences>>> {
    let (text, order) = (Arc::clone(text), order.clone());
    let part = move |first: u64| {
        let windows: Vec<_> = (first..first + batch as u64).map(|number| order.window(number)).collect();
        Sequences::of(&text, &windows, form)
    };
    let update = (batch * accumulate) as u64;
    Loader::new((0..).map(move |number: u64| {
        (0..accumulate as u64).map(|step| part(behind + number * update + step * batch as u64)).collect()
    }))
}

/// Returns the positions of the held-out samples of an evaluation, and of the token after each: at
/// most `most` in all, divided by the shares, and at least one of each source.
pub(crate) fn evaluated(text: &Text, context: usize, most: usize, shares: &[u32]) -> Vec<Range<usize>> {
    let round: usize = shares.iter().map(|&share| share as usize).sum();
    let of_source = |(source, &share): (&Source, &u32)| {
        let places = source.held_out.clone();
        let count = ((places.len() - 1) / context).min((most * share as usize / round).max(1));
        (0..count).map(move |sample| places.start + sample * context).map(move |start| start..start + context + 1)
    };
    text.sources().iter().zip(shares).flat_map(of_source).collect()
}
