//! The plan of a run: the arguments and everything that they name, read and checked before any
//! device memory is allocated.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use stepscope::models::{Family, ModelConfig};
use stepscope::ops::Activation;
use stepscope::optim::Schedule;
use stepscope::{AdamW, Arena, Checkpoint, Device, Result, TrainState, Trainer};

use crate::program::settings::Settings;
use crate::program::workers::Workers;
use crate::run::cli::RunArgs;
use crate::run::memory::{RunMemory, check_batch, evaluation_batch};
use crate::run::rule::{Optimizer, Rule};
use crate::run::updates::{Trained, Updates};
use crate::run::{self, settings};
use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::Args;
use crate::train::documents::{self, Contents, DataFile};
use crate::train::model::{self, Gpt, Mode, TrainingMemory};
use crate::train::registry;
use crate::train::samples::{self, Form, Order, Sequences};
use crate::train::text::Text;
use crate::train::tokenizer::{Tokenizer, VOCABULARY_UNIT};
use crate::train::weights;

/// The most held-out samples in an evaluation, or more that have this many tokens.
const HELD_OUT: usize = 64;
const HELD_OUT_TOKENS: usize = 1 << 14;
/// The name of a tokenizer that is trained on the text.
const TRAINED: &str = "bpe";
/// The bytes from which a text is large enough to train a tokenizer on it.
const LARGE_TEXT: usize = 1_000_000;

/// The settings, data and model of a run.
pub(crate) struct Plan<'r> {
    pub(crate) args: &'r Args,
    /// Steps per update, over all ranks together.
    pub(crate) accumulate: usize,
    shards: usize,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) text: Arc<Text>,
    /// The samples that each source of the text gives to a round.
    shares: Vec<u32>,
    pub(crate) config: ModelConfig,
    pub(crate) resumed: Option<Checkpoint>,
    /// The tokens that the sample begins with.
    pub(crate) beginning: Vec<u32>,
    /// The positions of the held-out samples of an evaluation, and of the token after each.
    evaluated: Vec<Range<usize>>,
    /// The text whose tokens an evaluation predicts.
    pub(crate) held_out: Vec<u8>,
}

impl<'r> Plan<'r> {
    /// Reads everything that the arguments name, for batches cut into this many shards.
    pub(crate) fn load(args: &'r Args, shards: usize) -> Outcome<Self> {
        let accumulate = args.run.accumulate(shards)?;
        check_batch(args.batch, args.context())?;
        if args.optimizer() == Optimizer::Muon && args.run.memory != TrainingMemory::Full {
            return Err(bad("--optimizer", "muon needs --memory full"));
        }
        let given = args.weights.as_ref().map(|folder| weights::open(folder, args.context)).transpose()?;
        if let Some((folder, (files, config))) = args.weights.as_ref().zip(given.as_ref()) {
            model::check_trainable(folder, files, config)?;
        }
        let given = given.map(|(_, config)| config);
        let paths = if args.data.is_empty() { registry::sources()? } else { args.data.clone() };
        let workers = Workers::new();
        let files = documents::read(&paths, &workers)?;
        let tokenizer = match tokenizer_name(args, given.as_ref(), &files)? {
            name if name == TRAINED => Tokenizer::train(&documents::beginning(&files), args.vocabulary())?,
            name => Tokenizer::open(&name)?,
        };
        if args.documents && tokenizer.end().is_none() {
            return Err(bad(
                "--documents",
                "the tokenizer has no token that ends a document: leave out --documents, or use another --tokenizer",
            ));
        }
        let config = match (given, &args.config) {
            (Some(config), _) => {
                tokenizer.check_vocabulary(config.vocabulary)?;
                config
            }
            (None, Some(config)) => {
                let mut config = config.clone();
                config.context = new_context(args, &config, &tokenizer)?;
                config
            }
            (None, None) => {
                let vocabulary = tokenizer.vocabulary().next_multiple_of(VOCABULARY_UNIT);
                model::config(args.size, args.arch(), vocabulary, args.context())
            }
        };
        let beginning = tokenizer.encode("--sample", args.sample.as_bytes())?;
        if beginning.is_empty() {
            return Err(bad("--sample", "is empty: give the text that the sample begins with"));
        }
        let shares = shares(args)?;
        let text = Arc::new(Text::load(&files, &tokenizer, config.context, shares.len() > 1, &workers)?);
        let most = HELD_OUT.max(HELD_OUT_TOKENS / config.context);
        let evaluated = samples::evaluated(&text, config.context, most, &shares);
        let mut tokens = Vec::new();
        for Range { start, end } in &evaluated {
            text.read(start + 1..*end, &mut tokens)?;
        }
        let held_out = tokenizer.bytes(&tokens);
        let resumed = args.resume.as_deref().map(run::resumed);
        let resumed = resumed.transpose()?;
        Ok(Self { args, accumulate, shards, tokenizer, text, shares, config, resumed, beginning, evaluated, held_out })
    }

    /// Returns the shape of a sample.
    pub(crate) fn form(&self) -> Form {
        Form { context: self.config.context, end: self.args.documents.then(|| self.tokenizer.end()).flatten() }
    }

    /// Returns the order of the samples.
    ///
    /// # Errors
    /// Never, since the text is long enough.
    pub(crate) fn order(&self) -> Result<Order> {
        Order::new(&self.text, self.config.context, self.args.run.seed, &self.shares)
    }

    /// Creates the model with its initial weights, and the optimizer.
    pub(crate) fn state<S: Activation>(&self, device: &Device) -> Outcome<TrainState<Gpt<S>, Rule>> {
        let (model, spec) = Gpt::<S>::new(self.config.clone(), self.mode())?;
        let mut state = self.args.run.state(device, model, &spec, self.rule())?;
        if let Some(folder) = &self.args.weights {
            weights::load(folder, &mut state.parameters)?;
        }
        Ok(state)
    }

    /// Returns the rule of the updates.
    fn rule(&self) -> Rule {
        self.args.optimizer().rule(AdamW {
            learning_rate: self.learning_rate(),
            beta2: 0.95,
            weight_decay: 0.1,
            clip: Some(1.0),
            schedule: self.schedule(),
            ..AdamW::default()
        })
    }

    fn mode(&self) -> Mode {
        let RunArgs { recompute, memory, .. } = self.args.run;
        Mode { recompute, memory, documents: self.args.documents, ..Mode::default() }
    }

    /// Computes the memory that the run needs.
    pub(crate) fn memory<S: Activation>(&self, device: &Device) -> Result<RunMemory> {
        let [step, evaluation] =
            [self.args.batch, evaluation_batch(self.args.batch)].map(|samples| Sequences::zeros(samples, self.form()));
        let model = || Gpt::<S>::new(self.config.clone(), self.mode());
        let needs = RunMemory::of(device, model, self.args.run.precision.of_f32(), [&step, &evaluation])?;
        match self.args.optimizer() {
            Optimizer::Adamw => Ok(needs),
            Optimizer::Muon => needs.with_update::<S>(device, &model()?.1, self.rule()),
        }
    }

    /// Trains to the end. Returns none if it was stopped, after writing a checkpoint.
    pub(crate) fn train<S: Activation>(
        &self,
        trainer: &mut Trainer<'_, Gpt<S>, Rule>,
        out: &Path,
        leads: bool,
    ) -> Outcome<Option<Trained>> {
        let Args { batch, updates, .. } = *self.args;
        let bytes_per_token = self.held_out.len() as f64 / (self.evaluated.len() * self.config.context) as f64;
        let (rate, schedule) = (f64::from(self.learning_rate()), self.schedule());
        let updates = Updates {
            rate: &|number| rate * schedule.factor(number),
            keeps_rates: true,
            out,
            leads,
            notes: ["gpt.position", "gpt.settings"],
            settings: self.settings(),
            total: updates as u64,
            evaluate_every: self.args.evaluate_every(),
            patience: None,
            bytes_per_token: Some(bytes_per_token),
            exports_best: false,
            samples_per_update: batch * self.accumulate,
            tokens_per_sample: self.config.context,
            resumed: self.resumed.as_ref().zip(self.args.resume.as_deref()),
            how_to_prolong: self.how_to_prolong(),
        };
        let (form, order) = (self.form(), self.order()?);
        let held_out =
            self.evaluated.chunks(evaluation_batch(batch)).map(|windows| Sequences::of(&self.text, windows, form));
        let held_out = held_out.collect::<Result<Vec<_>>>()?;
        let batches = |behind| samples::batches(&self.text, &order, form, [batch, self.accumulate], behind);
        updates.run(trainer, batches, &held_out)
    }

    /// Returns the advice for a run whose settings differ.
    fn how_to_prolong(&self) -> String {
        let folder = self.args.resume.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
        format!(
            "To continue this run, use the checkpoint's settings. To train for more updates after the learning rate \
             has fallen, or with other settings, start a new run from the weights of a finished run: --weights {} --out DIR, with the same --tokenizer{}",
            folder.join("transformers").display(),
            if matches!(self.tokenizer, Tokenizer::Bytes) { " (bytes)" } else { "" }
        )
    }

    fn schedule(&self) -> Schedule {
        let (warmup, total) = (self.args.warmup(), self.args.updates as u64);
        let stable = self.args.decay_updates.map_or(warmup, |updates| total.saturating_sub(updates));
        Schedule { warmup, stable, total, decay: self.args.decay.shape(), floor: self.args.floor }
    }

    /// Returns the peak learning rate: the wider the model, the lower.
    fn learning_rate(&self) -> f32 {
        let by_muon = if self.args.optimizer() == Optimizer::Muon { 2.0 } else { 1.0 };
        self.args.learning_rate.unwrap_or(
            by_muon
                * match self.config.width {
                    ..=256 => 2e-3,
                    257..=768 => 6e-4,
                    769..=1024 => 3e-4,
                    1025..=1280 => 2.5e-4,
                    _ => 2e-4,
                },
        )
    }

    /// Returns all settings that decide the weights, but for the schedule of the learning rate,
    /// of which a run that resumes must have the past only.
    pub(crate) fn settings(&self) -> Settings {
        let Args { batch, documents, .. } = self.args;
        let RunArgs { precision, seed, .. } = self.args.run;
        let mut all = settings::of_model(&self.config);
        all.extend([
            ("precision", precision.to_string()),
            ("batch", batch.to_string()),
            ("accumulate", self.accumulate.to_string()),
            ("shards", self.shards.to_string()),
            ("learning-rate", format!("{:e}", self.learning_rate())),
            ("documents", documents.to_string()),
            ("seed", seed.to_string()),
            ("tokenizer", self.tokenizer.name()),
            ("text", self.text.sha256.clone()),
        ]);
        if self.shares.len() > 1 {
            all.push(("mixture", format!("{:?}", self.shares)));
        }
        all.extend(self.args.run.memory.setting());
        all.extend(self.args.optimizer().setting());
        all
    }

    /// Returns all settings that ranks must share: those that decide the weights, and the times of
    /// evaluations and checkpoints, which all ranks do together.
    pub(crate) fn settings_of_ranks(&self) -> Settings {
        let mut settings = self.settings();
        settings.push(("updates", self.args.updates.to_string()));
        settings.push(("schedule", format!("{:?}", self.schedule())));
        settings::of_ranks(settings, &self.args.run, self.args.evaluate_every(), self.resumed.is_some())
    }

    /// Creates the trainer of the run.
    pub(crate) fn trainer<'a, S: Activation>(
        &self,
        arena: &'a mut Arena,
        state: TrainState<Gpt<S>, Rule>,
    ) -> Result<Trainer<'a, Gpt<S>, Rule>> {
        self.args.run.trainer(arena, state, &Sequences::zeros(self.args.batch, self.form()))
    }
}

/// Returns the samples that each source of the text gives to a round.
fn shares(args: &Args) -> Outcome<Vec<u32>> {
    if args.mixture.is_empty() {
        return Ok(vec![1]);
    }
    if args.mixture.len() != args.data.len() {
        let reason = format!(
            "has {} shares for {} paths in --data: give one share for each path; a folder is one path",
            args.mixture.len(),
            args.data.len()
        );
        return Err(bad("--mixture", reason));
    }
    Ok(args.mixture.clone())
}

/// Returns the context of a new model of `--config`, which must have a place for each token.
fn new_context(args: &Args, config: &ModelConfig, tokenizer: &Tokenizer) -> Outcome<usize> {
    let (context, tokens) = (args.context(), tokenizer.vocabulary());
    if config.vocabulary < tokens {
        let reason = format!(
            "has a vocabulary of {}, but {} has {tokens}: give a smaller --tokenizer, or another vocab_size",
            config.vocabulary,
            tokenizer.name()
        );
        return Err(bad("--config", reason));
    }
    if context > config.context {
        return Err(bad("--config", format!("has a context of {}, got --context {context}", config.context)));
    }
    Ok(context)
}

/// Returns the requested tokenizer, or the one next to the weights, or the one that fits the data.
/// A folder's own tokenizer in another form is refused, because GPT-2's would read other tokens.
fn tokenizer_name(args: &Args, given: Option<&ModelConfig>, files: &[DataFile]) -> Outcome<String> {
    if let Some(name) = &args.tokenizer {
        return Ok(name.clone());
    }
    if let Some(folder) = &args.weights {
        let file = folder.join("tokenizer.json");
        if file.exists() {
            return Ok(file.display().to_string());
        }
        if let Some(name) = ["vocab.json", "tokenizer.model"].into_iter().find(|name| folder.join(name).exists()) {
            let reason = format!(
                "has {name}, but no tokenizer.json: write it with `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of \
                 transformers, or give --tokenizer"
            );
            return Err(bad(folder.display(), reason));
        }
    }
    let of_gpt2 = given.is_some_and(|config| config.family == Family::Gpt2);
    let is_gpt2 = of_gpt2 || files.iter().any(|file| matches!(file.contents, Contents::Tokens));
    Ok(match (is_gpt2, documents::bytes(files) >= LARGE_TEXT) {
        (true, _) => "gpt2",
        (_, true) => TRAINED,
        (_, false) => "bytes",
    }
    .into())
}
