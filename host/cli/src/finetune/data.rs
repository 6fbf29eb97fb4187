//! The data of a run: rows of chats as packed contexts, and batches of them.
//!
//! Invariant: the same files, tokenizer and template give the same contexts. A batch depends only
//! on its number, so that a run resumes from the number of contexts that it has processed.

use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::Arc;

use serde::Serialize;
use sha2::{Digest, Sha256};
use stepscope::data::{Loader, SplitMix64, Windows};
use stepscope::memory::HostMemory;
use stepscope::{Error, HostBatch, HostInputs, Result};
use stepscope_chat::{
    Encoded, Encoder, IGNORED, Notes, Packed, Sample, pack, pack_pairs, read_preferences, read_rows, usable,
};
use stepscope_core::internals::hex;

use crate::program::workers::Workers;
use crate::run::updates::TokenBatch;
use crate::train::bad_input::{Outcome, bad};
use crate::train::tokenizer::Tokenizer;

/// The most bytes of memory that one byte of a file needs: the row, its text and its tokens.
const BYTES_OF_BYTE: u64 = 16;

/// The contexts of a pair of answers.
const TWO: usize = 2;

/// The files that are trained and evaluated on.
pub(crate) struct Sources<'s> {
    pub(crate) tokenizer: &'s Tokenizer,
    pub(crate) training: &'s [PathBuf],
    pub(crate) held_out: Option<&'s Path>,
    /// The share of the training rows that is held out instead.
    pub(crate) share: Option<f32>,
    pub(crate) seed: u64,
}

/// The shape of a context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// Its tokens.
    pub(crate) context: usize,
    /// True if several samples share a context. Without rotary positions, a sample must begin at
    /// the first one.
    pub(crate) packs: bool,
    /// True if rows have two answers, whose contexts come in twos.
    pub(crate) has_pairs: bool,
    /// True if batches have an input that marks padding.
    pub(crate) marks_padding: bool,
}

/// Contexts to train on, and contexts held out.
pub(crate) struct Data {
    pub(crate) training: Arc<Vec<Packed>>,
    pub(crate) held_out: Vec<Packed>,
    pub(crate) size: DataSize,
    has_pairs: bool,
    marks_padding: bool,
}

/// The size of the data.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DataSize {
    /// Rows to train on.
    pub(crate) rows: usize,
    /// Samples that these rows gave: a long text and some chats give several.
    pub(crate) samples: usize,
    /// Contexts into which they are packed.
    pub(crate) contexts: usize,
    /// Tokens of these contexts that are not padding.
    pub(crate) tokens: usize,
    /// Tokens that count in the loss.
    pub(crate) counted: usize,
    /// Rows held out.
    pub(crate) held_out_rows: usize,
    /// Tokens of theirs that count.
    pub(crate) held_out_counted: usize,
    /// Rows that were cut, because they have more tokens than a context.
    pub(crate) cut: usize,
    /// Tokens of these rows that would count, but lie beyond a context.
    pub(crate) lost: usize,
    /// Answers and completions that share their first token with the prompt.
    pub(crate) shared: usize,
    /// Answers that begin otherwise than the template's prompt for an answer ends.
    pub(crate) opened: usize,
    /// Messages after the last answer of a chat, which were left out.
    pub(crate) trailing: usize,
    /// The digest of the samples to train on.
    pub(crate) sha256: String,
}

impl DataSize {
    /// Describes what the rows have become, with a line for each fact that a reader may not expect.
    pub(crate) fn lines(&self, context: usize, updates: u64) -> Vec<String> {
        let Self { rows, samples, contexts, tokens, counted, cut, lost, shared, opened, trailing, .. } = *self;
        let samples = if samples == rows { String::new() } else { format!(" and {samples} samples") };
        let first = format!(
            "{rows} rows{samples} in {contexts} contexts of {context}: {tokens} tokens, of which {counted} count; {updates} updates"
        );
        let facts = [
            (
                lost,
                format!(
                    "{cut} rows are longer than a context and were cut: {lost} tokens that count are not trained on"
                ),
            ),
            (
                shared,
                format!(
                    "{shared} answers or completions begin within a token that also contains the end of their prompt; it counts"
                ),
            ),
            (
                opened,
                format!(
                    "{opened} answers begin otherwise than the chat template's prompt for one ends; they count from there on"
                ),
            ),
            (trailing, format!("{trailing} messages after the last answer of a chat were left out")),
        ];
        let facts = facts.into_iter().filter(|&(count, _)| count > 0).map(|(_, line)| line);
        std::iter::once(first).chain(facts).collect()
    }
}

impl Data {
    /// Reads, encodes and packs the rows. The samples of a row are all trained on, or all held out.
    pub(crate) fn load(sources: &Sources<'_>, encoder: &Encoder<'_>, form: Form) -> Outcome<Self> {
        let mut training = Vec::new();
        for path in sources.training {
            training.extend(encoded(path, sources.tokenizer, encoder, form)?);
        }
        let mut held_out = match sources.held_out {
            Some(path) => encoded(path, sources.tokenizer, encoder, form)?,
            None => Vec::new(),
        };
        let mut random = SplitMix64::new(sources.seed);
        shuffle(&mut training, &mut random);
        if let Some(share) = sources.share {
            let count = (f64::from(share) * training.len() as f64).round() as usize;
            if count == 0 || count == training.len() {
                let reason = format!("{count} of {} rows would be held out: give another share", training.len());
                return Err(bad("--eval-share", reason));
            }
            held_out = training.split_off(training.len() - count);
        }
        let (mut notes, mut cut) = (Notes::default(), 0);
        for row in training.iter().chain(&held_out) {
            notes += row.notes;
            cut += usize::from(row.notes.lost > 0);
        }
        let rows = [training.len(), held_out.len()];
        let [training, held_out] = [training, held_out].map(|rows| rows.into_iter().flat_map(|row| row.samples));
        let (training, held_out): (Vec<Sample>, Vec<Sample>) = (training.collect(), held_out.collect());
        let mut digest = Sha256::new();
        for sample in &training {
            digest.update((sample.ids.len() as u64).to_le_bytes());
            digest.update(bytemuck::cast_slice::<u32, u8>(&sample.ids));
            digest.update(sample.counted.iter().map(|&counted| u8::from(counted)).collect::<Vec<_>>());
        }
        let Notes { lost, shared, opened, trailing } = notes;
        let mut size = DataSize {
            rows: rows[0],
            samples: training.len(),
            held_out_rows: rows[1],
            cut,
            lost,
            shared,
            opened,
            trailing,
            sha256: hex(&digest.finalize()),
            ..DataSize::default()
        };
        let [training, held_out] = [training, held_out].map(|samples| form.packed(&samples));
        size.contexts = training.len();
        size.tokens = training.iter().map(|packed| packed.tokens).sum();
        size.counted = training.iter().map(|packed| packed.counted).sum();
        size.held_out_counted = held_out.iter().map(|packed| packed.counted).sum();
        for (option, rows, counted) in
            [("--data", size.rows, size.counted), ("--eval", size.held_out_rows, size.held_out_counted)]
        {
            if rows > 0 && counted == 0 {
                let reason = format!(
                    "in the first {} tokens of each of the {rows} rows, no token counts in the loss: give a larger --context",
                    form.context
                );
                return Err(bad(option, reason));
            }
        }
        let Form { has_pairs, marks_padding, .. } = form;
        Ok(Self { training: Arc::new(training), held_out, size, has_pairs, marks_padding })
    }

    /// Returns the updates of a pass over the data, for updates of this many contexts. The last
    /// update may have fewer.
    pub(crate) fn updates_per_epoch(&self, contexts: usize) -> u64 {
        self.training.len().div_ceil(contexts) as u64
    }

    /// Returns an endless stream of batches that starts after this many contexts. Each pass over
    /// the data has an order of its own. Contexts without tokens fill the last batch of a pass.
    /// `references` has the references of all pairs.
    pub(crate) fn batches(
        &self,
        context: usize,
        [batch, accumulate]: [usize; 2],
        seed: u64,
        behind: u64,
        references: Vec<f32>,
    ) -> Result<Loader<Vec<Contexts>>> {
        let (training, per_update) = (Arc::clone(&self.training), batch * accumulate);
        let per_epoch = self.updates_per_epoch(per_update);
        let (unit, pairs, marks_padding) = (self.unit(), self.pairs(&training), self.marks_padding);
        let order = Windows::new(training.len() / unit + 1, 1, seed)?;
        let first = behind / per_update as u64;
        Loader::new((first..).map(move |update| {
            let (pass, place) = (update / per_epoch, update % per_epoch * (per_update / unit) as u64);
            let numbers = place..(training.len() / unit).min(place as usize + per_update / unit) as u64;
            let number = |at: u64| order.window(pass * order.per_pass() + at).start;
            let numbers: Vec<usize> = numbers.map(number).collect();
            let all = |numbers: &[usize]| -> Vec<&Packed> {
                numbers.iter().flat_map(|&number| &training[number * unit..][..unit]).collect()
            };
            let counted = match pairs {
                None => all(&numbers).iter().map(|packed| packed.counted).sum(),
                Some(_) => numbers.iter().map(|&number| training[number * unit].samples()).sum::<usize>(),
            };
            let share = per_update as f64 / counted as f64;
            let part = |number: usize| {
                let own = numbers.chunks(batch / unit).nth(number).unwrap_or_default();
                let contexts = Contexts::new(all(own), batch, context, share, marks_padding);
                let Some(pairs) = pairs else { return contexts };
                let references = own.iter().flat_map(|&number| &references[number * TWO * pairs..][..TWO * pairs]);
                contexts.with_pairs(all(own), pairs, share, references.copied().collect())
            };
            Ok((0..accumulate).map(part).collect())
        }))
    }

    /// Returns contexts in parts of `batch`. `references` has the references of all their pairs, or
    /// nothing, which counts as zeros.
    pub(crate) fn in_order(&self, all: &[Packed], context: usize, batch: usize, references: &[f32]) -> Vec<Contexts> {
        let pairs = self.pairs(all);
        let part = |(number, part): (usize, &[Packed])| {
            let contexts = Contexts::new(part, batch, context, 1.0, self.marks_padding);
            let Some(pairs) = pairs else { return contexts };
            let (first, count) = (number * batch * pairs, part.len() * pairs);
            let own = references.get(first..first + count).unwrap_or_default();
            contexts.with_pairs(part, pairs, 1.0, own.to_vec())
        };
        all.chunks(batch).enumerate().map(part).collect()
    }

    /// Returns the number of references of contexts in parts of `batch`, of which the last is
    /// filled up.
    pub(crate) fn references(&self, all: &[Packed], batch: usize) -> usize {
        all.len().next_multiple_of(batch) * self.pairs(all).unwrap_or(0)
    }

    /// Returns the contexts that belong together: those of the two answers, or one.
    fn unit(&self) -> usize {
        if self.has_pairs { TWO } else { 1 }
    }

    /// Returns the most pairs of two contexts, or none if rows have no pairs.
    fn pairs(&self, contexts: &[Packed]) -> Option<usize> {
        self.has_pairs.then(|| contexts.iter().map(Packed::samples).max().unwrap_or(1))
    }

    /// Returns contexts without tokens, in the shape of those to train on.
    pub(crate) fn blank(&self, context: usize, count: usize) -> Contexts {
        let blank = Contexts::new([], count, context, 1.0, self.marks_padding);
        match self.pairs(&self.training) {
            Some(pairs) => blank.with_pairs([], pairs, 1.0, Vec::new()),
            None => blank,
        }
    }
}

impl Form {
    /// Packs samples, which are pairs if rows have them.
    fn packed(self, samples: &[Sample]) -> Vec<Packed> {
        match self {
            Self { context, packs: true, has_pairs: false, .. } => pack(samples, context),
            Self { context, has_pairs: false, .. } => {
                samples.iter().flat_map(|sample| pack(from_ref(sample), context)).collect()
            }
            Self { context, packs, has_pairs: true, .. } => {
                let (pairs, _) = samples.as_chunks::<TWO>();
                let packed = match packs {
                    true => pack_pairs(pairs, context),
                    false => pairs.iter().flat_map(|pair| pack_pairs(from_ref(pair), context)).collect(),
                };
                packed.into_iter().flatten().collect()
            }
        }
    }
}

/// Reads and encodes the rows of a file.
fn encoded(path: &Path, tokenizer: &Tokenizer, encoder: &Encoder<'_>, form: Form) -> Outcome<Vec<Encoded>> {
    let most = HostMemory::available_bytes() / BYTES_OF_BYTE;
    match form.has_pairs {
        true => encoded_by(path, tokenizer, read_preferences(path, most), |row| encoder.encode_preference(row)),
        false => encoded_by(path, tokenizer, read_rows(path, most), |row| encoder.encode(row)),
    }
}

/// Encodes the rows that were read from a file by `encode`.
fn encoded_by<T: Sync>(
    path: &Path,
    tokenizer: &Tokenizer,
    rows: Result<Vec<(usize, T)>>,
    encode: impl Fn(&T) -> std::result::Result<Encoded, String> + Send + Sync,
) -> Outcome<Vec<Encoded>> {
    let rows = rows.map_err(|error| match error {
        Error::File { path, reason } => bad(path.display(), reason),
        error => error.into(),
    })?;
    let encode = |(line, row): &(usize, T)| {
        let checked = |row: Encoded| {
            row.samples.iter().try_for_each(|sample| tokenizer.check_tokens(&sample.ids))?;
            Ok(row)
        };
        (*line, encode(row).and_then(checked))
    };
    let encoded = Workers::new().map(&rows, |row| Ok(encode(row)))?;
    usable(encoded).map_err(|reason| bad(path.display(), reason))
}

/// Shuffles rows (Fisher and Yates).
fn shuffle(rows: &mut [Encoded], random: &mut SplitMix64) {
    for last in (1..rows.len()).rev() {
        rows.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
    }
}

/// The contexts of one step.
#[derive(Clone, Debug)]
pub(crate) struct Contexts {
    context: usize,
    pub(crate) ids: Vec<u32>,
    labels: Vec<u32>,
    documents: Vec<u32>,
    /// 1 for each token and 0 for padding, if the model reads it.
    real: Option<Vec<f32>>,
    /// The contexts of the whole batch divided by its counted tokens.
    share: [f32; 1],
    pairs: Option<Pairs>,
    counted: usize,
    tokens: usize,
}

/// The inputs of a preference loss; see [`crate::train::model::preferences`].
#[derive(Clone, Debug)]
struct Pairs {
    /// The most pairs of two contexts.
    places: usize,
    references: Vec<f32>,
    weights: Vec<f32>,
    /// The number of pairs.
    count: usize,
}

impl Contexts {
    /// Joins packed contexts, and as many without tokens as `count` lacks. An input marks padding
    /// if `marks_padding`.
    pub(crate) fn new<'p>(
        packed: impl IntoIterator<Item = &'p Packed>,
        count: usize,
        context: usize,
        share: f64,
        marks_padding: bool,
    ) -> Self {
        let mut all = Self {
            context,
            ids: Vec::new(),
            labels: Vec::new(),
            documents: Vec::new(),
            real: marks_padding.then(Vec::new),
            share: [share as f32],
            pairs: None,
            counted: 0,
            tokens: 0,
        };
        for packed in packed {
            all.ids.extend(&packed.ids);
            all.labels.extend(&packed.labels);
            all.documents.extend(&packed.documents);
            if let Some(real) = &mut all.real {
                real.extend((0..packed.ids.len()).map(|at| if at < packed.tokens { 1.0 } else { 0.0 }));
            }
            all.counted += packed.counted;
            all.tokens += packed.tokens;
        }
        all.ids.resize(count * context, 0);
        all.labels.resize(count * context, IGNORED);
        all.documents.resize(count * context, 0);
        if let Some(real) = &mut all.real {
            real.resize(count * context, 0.0);
        }
        all
    }

    /// Adds the pairs of packed contexts, of which two have at most `places`, and their references.
    /// `share` is the contexts of the whole batch divided by its pairs.
    fn with_pairs<'p>(
        self,
        packed: impl IntoIterator<Item = &'p Packed>,
        places: usize,
        share: f64,
        mut references: Vec<f32>,
    ) -> Self {
        let counts = packed.into_iter().step_by(TWO).map(Packed::samples);
        let (mut weights, mut count, weight) = (Vec::new(), 0, (share / self.len() as f64) as f32);
        for pairs in counts {
            count += pairs;
            weights.extend((0..places).map(|place| if place < pairs { weight } else { 0.0 }));
        }
        weights.resize(self.len() / TWO * places, 0.0);
        references.resize(self.len() * places, 0.0);
        Self { pairs: Some(Pairs { places, references, weights, count }), ..self }
    }
}

impl HostBatch for Contexts {
    fn len(&self) -> usize {
        self.ids.len() / self.context
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        let shape = [self.len(), self.context];
        let inputs = HostInputs::new().with(&self.ids, shape)?.with(&self.labels, shape)?;
        let inputs = inputs.with(&self.documents, shape)?;
        let inputs = match &self.pairs {
            Some(Pairs { places, references, weights, .. }) => {
                let twos = self.len() / TWO;
                inputs.with(references, [twos, TWO, *places])?.with(weights, [twos, *places])?
            }
            None => inputs.with(&self.share, [1])?,
        };
        match &self.real {
            Some(real) => inputs.with(real, shape),
            None => Ok(inputs),
        }
    }
}

impl TokenBatch for Contexts {
    fn weight(&self) -> usize {
        self.pairs.as_ref().map_or(self.counted, |pairs| pairs.count)
    }

    fn tokens(&self) -> usize {
        self.tokens
    }
}
