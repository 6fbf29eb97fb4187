//! Samples of a text, as the trainer takes them.

use std::sync::Arc;

use stepscope::{Inputs, Loader, Result, Samples, Windows};

use crate::text::Text;

/// Samples that a step works on.
pub(crate) struct Sequences {
    /// Tokens of a sample.
    context: usize,
    /// `[samples, context]`.
    pub(crate) ids: Vec<u32>,
    /// The tokens one further, `[samples, context]`.
    pub(crate) labels: Vec<u32>,
    /// Which document each token is of, `[samples, context]`, where that is wanted.
    documents: Option<Vec<u32>>,
}

/// What samples are like.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// Tokens of each.
    pub(crate) context: usize,
    /// The token behind each document, where tokens see only their own.
    pub(crate) end: Option<u32>,
}

impl Sequences {
    /// So many samples whose values do not matter.
    pub(crate) fn zeros(samples: usize, form: Form) -> Self {
        let zeros = vec![0; samples * form.context];
        let documents = form.end.map(|_| zeros.clone());
        Self { context: form.context, ids: zeros.clone(), labels: zeros, documents }
    }

    /// The windows of these numbers.
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

/// Which document each token is of: one more behind each end.
fn documents(ids: &[u32], context: usize, end: u32) -> Vec<u32> {
    let number = |document: &mut u32, &id: &u32| {
        let own = *document;
        *document += u32::from(id == end);
        Some(own)
    };
    ids.chunks(context).flat_map(|sample| sample.iter().scan(0, number)).collect()
}

impl Samples for Sequences {
    fn len(&self) -> usize {
        self.ids.len() / self.context
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        let shape = [self.len(), self.context];
        let inputs = Inputs::new().with(&self.ids, shape)?.with(&self.labels, shape)?;
        match &self.documents {
            Some(documents) => inputs.with(documents, shape),
            None => Ok(inputs),
        }
    }
}

/// Batches without end, behind so many samples: each of `accumulate` parts of `batch` samples, made while others are trained on.
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

/// The held-out text, at most so many samples of it, in parts of at most `batch`.
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
