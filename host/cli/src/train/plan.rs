//! The plan of a run: the arguments and everything that they name, read and checked before any
//! device memory is allocated.

use std::sync::Arc;

use stepscope::{
    AdamW, Arena, Capacity, Checkpoint, Device, HostBatch, HostMemory, Model, ParameterSpec, Result, Schedule, Tape,
    TrainState, Trainer, Windows,
};

use crate::program::settings::Settings;
use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::{Arch, Args};
use crate::train::model::{Activation, Gpt, Mode, Sizes};
use crate::train::samples::{Form, Sequences};
use crate::train::text::{self, Text};
use crate::train::tokenizer::Tokenizer;
use crate::train::weights::Weights;

/// Vocabulary sizes are rounded up to a multiple of this, because matrices of such sizes are
/// faster. No text contains the added tokens.
const VOCABULARY_UNIT: usize = 128;
/// The final learning rate, as a share of the peak.
const FLOOR: f64 = 0.1;
/// Spare bytes of the arena, for differences from the measured steps.
const ROOM: usize = 4 << 20;

/// The settings, data and model of a run.
pub(crate) struct Plan<'r> {
    pub(crate) args: &'r Args,
    /// Steps per update, over all ranks together.
    pub(crate) accumulate: usize,
    shards: usize,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) text: Arc<Text>,
    pub(crate) sizes: Sizes,
    /// The initial weights, if they do not come from the seed.
    weights: Option<Weights>,
    pub(crate) resumed: Option<Checkpoint>,
    /// The tokens that the sample begins with.
    pub(crate) beginning: Vec<u32>,
}

impl<'r> Plan<'r> {
    /// Reads everything that the arguments name, for batches cut into this many shards.
    pub(crate) fn load(args: &'r Args, shards: usize) -> Outcome<Self> {
        let accumulate = args.accumulate.unwrap_or(shards);
        if accumulate < shards {
            let reason = format!(
                "{accumulate} steps are fewer than {shards} shards: give --accumulate {shards} or more, or leave it out"
            );
            return Err(bad("--accumulate", reason));
        }
        check_batch(args)?;
        let weights = args.weights.as_ref().map(|folder| Weights::read(folder, args.context)).transpose()?;
        let tokenizer = Tokenizer::open(tokenizer_name(args, weights.as_ref()))?;
        if args.documents && tokenizer.end().is_none() {
            return Err(bad(
                "--documents",
                "the tokenizer has no token that ends a document: leave out --documents, or use another --tokenizer",
            ));
        }
        let beginning = tokenizer.encode("--sample", args.sample.as_bytes())?;
        if beginning.is_empty() {
            return Err(bad("--sample", "is empty: give the text that the sample begins with"));
        }
        let sizes = match &weights {
            Some(weights) => matching(weights.sizes, &tokenizer)?,
            None => {
                let vocabulary = tokenizer.vocabulary().next_multiple_of(VOCABULARY_UNIT);
                Sizes::new(args.size, args.arch, vocabulary, args.context())
            }
        };
        let text = Arc::new(Text::load(&args.data, &tokenizer, sizes.context)?);
        let resumed = args.resume.as_ref().map(|path| Checkpoint::load(path).map_err(|error| bad("--resume", error)));
        let resumed = resumed.transpose()?;
        Ok(Self { args, accumulate, shards, tokenizer, text, sizes, weights, resumed, beginning })
    }

    /// Returns the shape of a sample.
    pub(crate) fn form(&self) -> Form {
        Form { context: self.sizes.context, end: self.args.documents.then(|| self.tokenizer.end()).flatten() }
    }

    /// Returns the windows of tokens that the samples are.
    ///
    /// # Errors
    /// Never, since the text is long enough.
    pub(crate) fn windows(&self) -> Result<Windows> {
        Windows::new(self.text.training().len(), self.sizes.context, self.args.seed)
    }

    /// Creates the model with its initial weights, and the optimizer.
    pub(crate) fn state<S: Activation>(&self, device: &Device) -> Outcome<TrainState<Gpt<S>>> {
        let Args { seed, precision, recompute, documents, updates, .. } = *self.args;
        let (model, spec) = Gpt::new(self.sizes, Mode { recompute, documents })?;
        let total = updates as u64;
        let config = AdamW {
            learning_rate: self.learning_rate(),
            beta2: 0.95,
            weight_decay: 0.1,
            clip: Some(1.0),
            schedule: Schedule::WarmupCosine { warmup: self.args.warmup(), total, floor: FLOOR },
            ..AdamW::default()
        };
        let state = TrainState::new(device, model, &spec, seed, config)?.with_parameter_groups(&Gpt::<S>::groups())?;
        let mut state = state.with_precision(precision);
        if let Some(weights) = &self.weights {
            weights.load(&mut state.parameters)?;
        }
        Ok(state)
    }

    /// Builds an arena with room for a training step and an evaluation step. Both are measured by
    /// dry run.
    pub(crate) fn arena<S: Activation>(&self, device: &Device, state: &mut TrainState<Gpt<S>>) -> Result<Arena> {
        if let Some(mebibytes) = self.args.arena_mib {
            return Arena::builder(device).capacity(Capacity::mib(mebibytes)).build();
        }
        let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
        let mut needs = |samples: usize, train: bool| {
            let largest = Sequences::zeros(samples, self.form());
            let measured = small.measure(|step| {
                step.set_precision(state.precision);
                let batch = step.upload_inputs(&largest.inputs()?)?;
                let tape = Tape::new(step, &state.parameters);
                let tape = if train { tape } else { tape.evaluating() };
                let hidden = state.model.forward(&tape, &batch)?;
                let loss = state.model.loss(&tape, &hidden, &batch, 1.0)?;
                if train { tape.backward_overwrite(&loss, &mut state.gradients) } else { Ok(()) }
            });
            measured.map(|measured| measured.high_water_bytes())
        };
        let (step, look) = (needs(self.args.batch, true)?, needs(self.look(), false)?);
        Arena::builder(device).capacity(Capacity::Bytes(step + look + ROOM)).build()
    }

    /// Returns the samples of an evaluation step. It is smaller than a training batch, because it
    /// needs memory in addition.
    pub(crate) fn look(&self) -> usize {
        self.args.batch.div_ceil(4)
    }

    /// Returns the peak learning rate: the wider the model, the lower.
    fn learning_rate(&self) -> f32 {
        self.args.learning_rate.unwrap_or(match self.sizes.width {
            ..=256 => 2e-3,
            257..=768 => 6e-4,
            769..=1024 => 3e-4,
            1025..=1280 => 2.5e-4,
            _ => 2e-4,
        })
    }

    /// Returns all settings that decide the weights.
    pub(crate) fn settings(&self) -> Settings {
        let Args { precision, batch, updates, documents, seed, .. } = self.args;
        let Sizes { arch, vocabulary, context, layers, width, heads, hidden, tied, epsilon, base } = self.sizes;
        vec![
            ("arch", format!("{arch:?}")),
            ("vocabulary", vocabulary.to_string()),
            ("context", context.to_string()),
            ("layers", layers.to_string()),
            ("width", width.to_string()),
            ("heads", format!("{heads:?}")),
            ("hidden", hidden.to_string()),
            ("tied", tied.to_string()),
            ("epsilon", format!("{epsilon:e}")),
            ("rotary base", format!("{base:e}")),
            ("precision", precision.to_string()),
            ("batch", batch.to_string()),
            ("accumulate", self.accumulate.to_string()),
            ("shards", self.shards.to_string()),
            ("updates", updates.to_string()),
            ("learning-rate", format!("{:e}", self.learning_rate())),
            ("warmup", self.args.warmup().to_string()),
            ("documents", documents.to_string()),
            ("seed", seed.to_string()),
            ("tokenizer", self.tokenizer.name()),
            ("text", self.text.sha256.clone()),
        ]
    }

    /// Returns all settings that ranks must share: those that decide the weights, and the times of
    /// evaluations and checkpoints, which all ranks do together.
    pub(crate) fn settings_of_ranks(&self) -> Settings {
        let mut settings = self.settings();
        settings.push(("evaluate-every", self.args.evaluate_every().to_string()));
        settings.push(("checkpoint-every", format!("{:?}", self.args.checkpoint_every)));
        settings.push(("resumes", self.resumed.is_some().to_string()));
        settings
    }

    /// Creates a trainer that replays each step as one graph, or launches each kernel with
    /// `--eager`.
    pub(crate) fn trainer<'a, S: Activation>(
        &self,
        arena: &'a mut Arena,
        state: TrainState<Gpt<S>>,
    ) -> Result<Trainer<'a, Gpt<S>>> {
        match self.args.eager {
            true => Ok(Trainer::eager(arena, state)),
            false => Trainer::captured(arena, state, &Sequences::zeros(self.args.batch, self.form())),
        }
    }
}

/// Returns an error if the host cannot hold a batch's tokens: ids, labels and documents.
fn check_batch(args: &Args) -> Outcome<()> {
    let (batch, context) = (args.batch as u64, args.context() as u64);
    let (needed, available) = (batch * context * 3 * size_of::<u32>() as u64, HostMemory::available_bytes());
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "{batch} samples of {context} tokens take {needed} bytes of the host's memory, and {available} are available: give a smaller --batch \
         and a larger --accumulate"
    );
    Err(bad("--batch", reason))
}

/// Returns the requested tokenizer, or the one that fits the given data or weights.
fn tokenizer_name<'a>(args: &'a Args, weights: Option<&Weights>) -> &'a str {
    let of_gpt2 = weights.is_some_and(|weights| weights.sizes.arch == Arch::Gpt2);
    let default = if of_gpt2 || args.data.iter().any(|path| text::is_token_file(path)) { "gpt2" } else { "bytes" };
    args.tokenizer.as_deref().unwrap_or(default)
}

/// Returns the sizes if their vocabulary is the tokenizer's, possibly rounded up.
fn matching(sizes: Sizes, tokenizer: &Tokenizer) -> Outcome<Sizes> {
    let (has, needs) = (sizes.vocabulary, tokenizer.vocabulary());
    if !(needs..=needs.next_multiple_of(VOCABULARY_UNIT)).contains(&has) {
        let reason = format!(
            "the weights have a vocabulary of {has}, but {} has {needs}: give the tokenizer that the weights were trained with",
            tokenizer.name()
        );
        return Err(bad("--tokenizer", reason));
    }
    Ok(sizes)
}

/// Returns the parameter spec of a model of these sizes.
pub(crate) fn layout(sizes: Sizes) -> Result<ParameterSpec> {
    Ok(Gpt::<f32>::new(sizes, Mode::default())?.1)
}
