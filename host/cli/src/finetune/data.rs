//! The data of a run: rows of chats as packed contexts, and batches of them.
//!
//! Invariant: the same files, tokenizer and template give the same contexts. A batch depends only
//! on its number, so that a run resumes from the number of contexts that it has processed.

use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::Arc;

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde::Serialize;
use sha2::{Digest, Sha256};
use stepscope::data::{Loader, SplitMix64, Windows};
use stepscope::memory::HostMemory;
use stepscope::{Error, HostBatch, HostInputs, Result};
use stepscope_chat::{Encoded, Encoder, IGNORED, Notes, Packed, Row, Sample, pack, read_rows, usable};
use stepscope_core::internals::hex;

use crate::run::updates::TokenBatch;
use crate::train::bad_input::{Outcome, bad};
use crate::train::tokenizer::Tokenizer;

/// The most bytes of memory that one byte of a file needs: the row, its text and its tokens.
const BYTES_OF_BYTE: u64 = 16;

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
}

/// Contexts to train on, and contexts held out.
pub(crate) struct Data {
    pub(crate) training: Arc<Vec<Packed>>,
    pub(crate) held_out: Vec<Packed>,
    pub(crate) size: DataSize,
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
            training.extend(encoded(path, sources.tokenizer, encoder)?);
        }
        let mut held_out = match sources.held_out {
            Some(path) => encoded(path, sources.tokenizer, encoder)?,
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
        let [training, held_out] = [training, held_out].map(|samples| match form.packs {
            true => pack(&samples, form.context),
            false => samples.iter().flat_map(|sample| pack(from_ref(sample), form.context)).collect(),
        });
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
        Ok(Self { training: Arc::new(training), held_out, size })
    }

    /// Returns the updates of a pass over the data, for updates of this many contexts. The last
    /// update may have fewer.
    pub(crate) fn updates_per_epoch(&self, contexts: usize) -> u64 {
        self.training.len().div_ceil(contexts) as u64
    }

    /// Returns an endless stream of batches that starts after this many contexts. Each pass over
    /// the data has an order of its own. Contexts without tokens fill the last batch of a pass.
    pub(crate) fn batches(
        &self,
        context: usize,
        [batch, accumulate]: [usize; 2],
        seed: u64,
        behind: u64,
    ) -> Result<Loader<Vec<Contexts>>> {
        let (training, per_update) = (Arc::clone(&self.training), batch * accumulate);
        let per_epoch = self.updates_per_epoch(per_update);
        let order = Windows::new(training.len() + 1, 1, seed)?;
        let first = behind / per_update as u64;
        Loader::new((first..).map(move |update| {
            let (pass, place) = (update / per_epoch, update % per_epoch * per_update as u64);
            let numbers = place..training.len().min(place as usize + per_update) as u64;
            let number = |at: u64| order.window(pass * order.per_pass() + at).start;
            let chosen: Vec<&Packed> = numbers.map(|at| &training[number(at)]).collect();
            let counted: usize = chosen.iter().map(|packed| packed.counted).sum();
            let part = |number: usize| {
                let own = chosen.iter().skip(number * batch).take(batch);
                Contexts::new(own.copied(), batch, context, per_update as f64 / counted as f64)
            };
            Ok((0..accumulate).map(part).collect())
        }))
    }

    /// Returns the held-out contexts in parts of `batch`.
    pub(crate) fn held_out(&self, context: usize, batch: usize) -> Vec<Contexts> {
        let parts = self.held_out.chunks(batch);
        parts.map(|part| Contexts::new(part, batch, context, 1.0)).collect()
    }
}

/// Reads and encodes the rows of a file.
fn encoded(path: &Path, tokenizer: &Tokenizer, encoder: &Encoder<'_>) -> Outcome<Vec<Encoded>> {
    let rows = read_rows(path, HostMemory::available_bytes() / BYTES_OF_BYTE).map_err(|error| match error {
        Error::File { path, reason } => bad(path.display(), reason),
        error => error.into(),
    })?;
    let encode = |(line, row): &(usize, Row)| {
        let checked = |row: Encoded| {
            row.samples.iter().try_for_each(|sample| tokenizer.check_tokens(&sample.ids))?;
            Ok(row)
        };
        (*line, encoder.encode(row).and_then(checked))
    };
    // Falls back to this thread if the system refuses to start threads.
    let encoded: Vec<_> = match ThreadPoolBuilder::new().build() {
        Ok(pool) => pool.install(|| rows.par_iter().map(encode).collect()),
        Err(_) => rows.iter().map(encode).collect(),
    };
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
    /// The contexts of the whole batch divided by its counted tokens.
    share: [f32; 1],
    counted: usize,
    tokens: usize,
}

impl Contexts {
    /// Joins packed contexts, and as many without tokens as `count` lacks.
    pub(crate) fn new<'p>(
        packed: impl IntoIterator<Item = &'p Packed>,
        count: usize,
        context: usize,
        share: f64,
    ) -> Self {
        let mut all = Self {
            context,
            ids: Vec::new(),
            labels: Vec::new(),
            documents: Vec::new(),
            share: [share as f32],
            counted: 0,
            tokens: 0,
        };
        for packed in packed {
            all.ids.extend(&packed.ids);
            all.labels.extend(&packed.labels);
            all.documents.extend(&packed.documents);
            all.counted += packed.counted;
            all.tokens += packed.tokens;
        }
        all.ids.resize(count * context, 0);
        all.labels.resize(count * context, IGNORED);
        all.documents.resize(count * context, 0);
        all
    }
}

impl HostBatch for Contexts {
    fn len(&self) -> usize {
        self.ids.len() / self.context
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        let shape = [self.len(), self.context];
        let inputs = HostInputs::new().with(&self.ids, shape)?.with(&self.labels, shape)?;
        inputs.with(&self.documents, shape)?.with(&self.share, [1])
    }
}

impl TokenBatch for Contexts {
    fn weight(&self) -> usize {
        self.counted
    }

    fn tokens(&self) -> usize {
        self.tokens
    }
}
