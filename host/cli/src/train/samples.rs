//! Samples of a text, as batches for the trainer.

use std::sync::Arc;

use stepscope::data::{Loader, Windows};
use stepscope::{HostBatch, HostInputs, Result};

use crate::run::updates::TokenBatch;
use crate::train::text::Text;

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
    pub(crate) fn of(text: &Text, windows: &[std::ops::Range<usize>], form: Form) -> Result<Self> {
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

/// Returns an endless stream of batches that starts after this many samples. Each has `accumulate`
/// parts of `batch` samples, and is prepared while earlier ones are trained on.
pub(crate) fn batches(
    text: &Arc<Text>,
    windows: &Windows,
    form: Form,
    [batch, accumulate]: [usize; 2],
    behind: u64,
) -> Result<Loader<Vec<Sequences>>> {
    let (text, windows) = (Arc::clone(text), windows.clone());
    let start = text.training().start;
    let part = move |first: u64| {
        let numbers = first..first + batch as u64;
        let windows: Vec<_> = numbers
            .map(|number| windows.window(number))
            .map(|window| start + window.start..start + window.end)
            .collect();
        Sequences::of(&text, &windows, form)
    };
    let update = (batch * accumulate) as u64;
    Loader::new((0..).map(move |number: u64| {
        (0..accumulate as u64).map(|step| part(behind + number * update + step * batch as u64)).collect()
    }))
}

/// Returns the held-out text as at most `most` samples, in parts of at most `batch`.
pub(crate) fn held_out(text: &Text, form: Form, most: usize, batch: usize) -> Result<Vec<Sequences>> {
    let places = text.held_out();
    let count = ((places.len() - 1) / form.context).min(most);
    let window = |number: usize| {
        let start = places.start + number * form.context;
        start..start + form.context + 1
    };
    let windows: Vec<_> = (0..count).map(window).collect();
    windows.chunks(batch).map(|windows| Sequences::of(text, windows, form)).collect()
}
