//! All that decides what a run does: the arguments, and what they name, read and checked before anything is made.

use std::sync::Arc;

use stepscope::ops::Precision;
use stepscope::{
    AdamWConfig, Arena, Capacity, Checkpoint, Device, HostMemory, Layout, Learner, Model, Result, Samples, Schedule,
    Tape, Trainer, Windows,
};

use crate::bad_input::{Outcome, bad};
use crate::cli::{Arch, Args};
use crate::model::{Gpt, Mode, Sizes};
use crate::samples::{Form, Sequences};
use crate::shared::settings::Settings;
use crate::text::{self, Text};
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// A vocabulary is rounded up to a multiple of these, as matrices of such sizes are faster; no text has the tokens beyond.
const VOCABULARY_UNIT: usize = 128;
/// The learning rate at the end, as a share of the highest.
const FLOOR: f64 = 0.1;
/// Room in the arena for what differs from the steps that were measured.
const ROOM: usize = 4 << 20;

/// What a run works on, and how.
pub(crate) struct Plan<'r> {
    pub(crate) args: &'r Args,
    /// Steps of an update, on all ranks together.
    pub(crate) accumulate: usize,
    shards: usize,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) text: Arc<Text>,
    pub(crate) sizes: Sizes,
    /// What the weights start from, if not from the seed.
    weights: Option<Weights>,
    pub(crate) resumed: Option<Checkpoint>,
    /// The tokens that the sample begins with.
    pub(crate) beginning: Vec<u32>,
}

impl<'r> Plan<'r> {
    /// Reads all that the arguments name, for batches in so many shards.
    pub(crate) fn load(args: &'r Args, shards: usize) -> Outcome<Self> {
        let accumulate = args.accumulate.unwrap_or(shards);
        if accumulate < shards {
            let reason = format!("{accumulate} steps are fewer than {shards} shards: give at least as many, or none");
            return Err(bad("--accumulate", reason));
        }
        check_batch(args)?;
        let weights = args.weights.as_ref().map(|folder| Weights::read(folder, args.context)).transpose()?;
        let tokenizer = Tokenizer::open(tokenizer_name(args, weights.as_ref()))?;
        if args.documents && tokenizer.end().is_none() {
            return Err(bad(
                "--documents",
                "the tokenizer has no token that ends a document: leave it out, or give another",
            ));
        }
        let beginning = tokenizer.encode("--sample", args.sample.as_bytes())?;
        if beginning.is_empty() {
            return Err(bad("--sample", "is empty: give what the sample begins with"));
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

    /// What samples are like.
    pub(crate) fn form(&self) -> Form {
        Form { context: self.sizes.context, end: self.args.documents.then(|| self.tokenizer.end()).flatten() }
    }

    /// Which tokens each sample has.
    ///
    /// # Errors
    /// Never: the text is long enough.
    pub(crate) fn windows(&self) -> Result<Windows> {
        Windows::new(self.text.training().len(), self.sizes.context, self.args.seed)
    }

    /// The model with its first weights, and the optimiser.
    pub(crate) fn learner(&self, device: &Device) -> Outcome<Learner<Gpt>> {
        let Args { seed, precision, recompute, documents, updates, .. } = *self.args;
        let bf16 = precision == Precision::Bf16;
        let (model, layout) = Gpt::new(self.sizes, Mode { bf16, recompute, documents })?;
        let total = updates as u64;
        let config = AdamWConfig {
            learning_rate: self.learning_rate(),
            beta2: 0.95,
            weight_decay: 0.1,
            clip: Some(1.0),
            schedule: Schedule::WarmupCosine { warmup: self.args.warmup(), total, floor: FLOOR },
            ..AdamWConfig::default()
        };
        let learner = Learner::new(device, model, &layout, seed, config)?.with_parameter_groups(&Gpt::groups())?;
        let mut learner = learner.with_precision(precision);
        if bf16 {
            learner = learner.with_bf16_copy()?;
        }
        if let Some(weights) = &self.weights {
            weights.load(&mut learner.parameters)?;
        }
        Ok(learner)
    }

    /// An arena with room for a training step and for a look at held-out text: both are measured, and nothing is computed.
    pub(crate) fn arena(&self, device: &Device, learner: &mut Learner<Gpt>) -> Result<Arena> {
        if let Some(mebibytes) = self.args.arena_mib {
            return Arena::builder(device).capacity(Capacity::mib(mebibytes)).build();
        }
        let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
        let mut needs = |samples: usize, train: bool| {
            let largest = Sequences::zeros(samples, self.form());
            let measured = small.measure(|step| {
                step.set_precision(learner.precision);
                let batch = step.upload_inputs(&largest.inputs()?)?;
                let tape = Tape::new(step, &learner.parameters);
                let tape = if train { tape } else { tape.evaluating() };
                let hidden = learner.model.forward(&tape, &batch)?;
                let loss = learner.model.loss(&tape, &hidden, &batch, 1.0)?;
                if train { tape.backward_afresh(&loss, &mut learner.gradients) } else { Ok(()) }
            });
            measured.map(|measured| measured.high_water_bytes())
        };
        let (step, look) = (needs(self.args.batch, true)?, needs(self.look(), false)?);
        Arena::builder(device).capacity(Capacity::Bytes(step + look + ROOM)).build()
    }

    /// Samples of a step that looks at held-out text: fewer than are trained on, as it takes memory besides.
    pub(crate) fn look(&self) -> usize {
        self.args.batch.div_ceil(4)
    }

    /// The learning rate at its highest: the wider a model, the lower.
    fn learning_rate(&self) -> f32 {
        self.args.learning_rate.unwrap_or(match self.sizes.width {
            ..=256 => 2e-3,
            257..=768 => 6e-4,
            769..=1024 => 3e-4,
            1025..=1280 => 2.5e-4,
            _ => 2e-4,
        })
    }

    /// All that decides the weights.
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

    /// All that ranks must have alike: what decides the weights, and when all look at held-out text
    /// or write a checkpoint together.
    pub(crate) fn settings_of_ranks(&self) -> Settings {
        let mut settings = self.settings();
        settings.push(("evaluate-every", self.args.evaluate_every().to_string()));
        settings.push(("checkpoint-every", format!("{:?}", self.args.checkpoint_every)));
        settings.push(("resumes", self.resumed.is_some().to_string()));
        settings
    }

    /// A trainer whose steps are one graph, or launches with `--eager`.
    pub(crate) fn trainer<'a>(&self, arena: &'a mut Arena, learner: Learner<Gpt>) -> Result<Trainer<'a, Gpt>> {
        match self.args.eager {
            true => Ok(Trainer::eager(arena, learner)),
            false => Trainer::captured(arena, learner, &Sequences::zeros(self.args.batch, self.form())),
        }
    }
}

/// An error for a batch whose tokens the host cannot hold: ids, labels and documents of each.
fn check_batch(args: &Args) -> Outcome<()> {
    let (batch, context) = (args.batch as u64, args.context() as u64);
    let (needed, available) = (batch * context * 3 * size_of::<u32>() as u64, HostMemory::available_bytes());
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "{batch} samples of {context} tokens take {needed} bytes of the host's memory, and {available} are available: give fewer, and more \
         to --accumulate"
    );
    Err(bad("--batch", reason))
}

/// The tokenizer that was asked for, or the one that fits what was given.
fn tokenizer_name<'a>(args: &'a Args, weights: Option<&Weights>) -> &'a str {
    let of_gpt2 = weights.is_some_and(|weights| weights.sizes.arch == Arch::Gpt2);
    let default = if of_gpt2 || args.data.iter().any(|path| text::is_token_file(path)) { "gpt2" } else { "bytes" };
    args.tokenizer.as_deref().unwrap_or(default)
}

/// The sizes of a model that has the tokens of the tokenizer and no more, but for those that a vocabulary is rounded up by.
fn matching(sizes: Sizes, tokenizer: &Tokenizer) -> Outcome<Sizes> {
    let (has, needs) = (sizes.vocabulary, tokenizer.vocabulary());
    if !(needs..=needs.next_multiple_of(VOCABULARY_UNIT)).contains(&has) {
        let reason = format!(
            "the weights have a vocabulary of {has}, and {} of {needs}: give the one they were made with",
            tokenizer.name()
        );
        return Err(bad("--tokenizer", reason));
    }
    Ok(sizes)
}

/// The layout of a model of these sizes.
pub(crate) fn layout(sizes: Sizes) -> Result<Layout> {
    Ok(Gpt::new(sizes, Mode::default())?.1)
}
