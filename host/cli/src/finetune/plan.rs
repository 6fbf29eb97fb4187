//! The plan of a run: the arguments and everything that they name, read and checked before any
//! device memory is allocated.

use std::path::Path;

use serde_json::json;
use sha2::{Digest, Sha256};
use stepscope::models::{Lora, ModelConfig, Targets, Transformer, WeightFiles};
use stepscope::ops::Activation;
use stepscope::parameters::{FrozenType, ParameterEntry};
use stepscope::tensor::Element;
use stepscope::{AdamW, Arena, Checkpoint, Device, ParameterSpec, Parameters, Result, TrainState, Trainer, bf16};
use stepscope_chat::{ChatTemplate, Encoder, Packed};
use stepscope_core::internals::hex;

use crate::finetune::cli::{Args, Quantize};
use crate::finetune::data::{Contexts, Data, Form, Sources};
use crate::finetune::references::References;
use crate::program::settings::Settings;
use crate::run::cli::RunArgs;
use crate::run::folder::ModelFolder;
use crate::run::memory::{RunMemory, check_batch, evaluation_batch};
use crate::run::rule::Rule;
use crate::run::updates::{Trained, Updates};
use crate::run::{self, settings};
use crate::train::bad_input::{Outcome, bad, for_users};
use crate::train::model::{self, Gpt, Mode};
use crate::train::tokenizer::Tokenizer;
use crate::train::weights;

/// The names of a checkpoint's notes: the position of the run, and its settings.
pub(crate) const NOTES: [&str; 2] = ["finetune.position", "finetune.settings"];
/// The name of the setting that `is_narrow` is, and its value if that is true.
const FROZEN: &str = "frozen";
const NARROW: &str = "as stored";

/// The settings, data and model of a run.
pub(crate) struct Plan<'r> {
    pub(crate) args: &'r Args,
    /// Steps per update, over all ranks together.
    pub(crate) accumulate: usize,
    shards: usize,
    pub(crate) folder: ModelFolder,
    pub(crate) data: Data,
    pub(crate) config: ModelConfig,
    /// The adapters that are trained instead of the model's weights.
    pub(crate) lora: Option<Lora>,
    /// True if the frozen matrices of blocks keep the type of the file although kernels compute in
    /// f32. A run keeps the choice with which it began, because the digest of frozen weights covers
    /// their types.
    is_narrow: bool,
    files: WeightFiles,
    resumed: Option<Checkpoint>,
    /// The tokens that the sample begins with.
    pub(crate) beginning: Option<Vec<u32>>,
}

impl<'r> Plan<'r> {
    /// Reads everything that the arguments name, for batches cut into this many shards.
    pub(crate) fn load(args: &'r Args, shards: usize) -> Outcome<Self> {
        let RunArgs { seed, .. } = args.run;
        let accumulate = args.run.accumulate(shards)?;
        let (files, config) = weights::open(&args.weights, args.context)?;
        let lora = lora(args, &config)?;
        match &lora {
            Some(lora) if args.quantize.is_some() => {
                let built = Transformer::with_lora(config.clone(), lora, |entry| files.quantized(entry));
                built.map_err(|error| bad("--quantize", for_users(&error)))?;
            }
            Some(_) => {}
            None => model::check_trainable(&args.weights, &files, &config)?,
        }
        check_batch(args.batch, config.context)?;
        if args.preferences.is_some() && !args.batch.is_multiple_of(2) {
            let reason = format!(
                "{} contexts cannot be divided into twos, of chosen and of rejected answers: give an even number",
                args.batch
            );
            return Err(bad("--batch", reason));
        }
        let resumed = args.resume.as_deref().map(run::resumed).transpose()?;
        let mut folder = match args.tokenizer() {
            Some(file) => ModelFolder::with_tokenizer(&args.weights, tokenizer(&file)?)?,
            None => ModelFolder::open(&args.weights)?,
        };
        let stored = resumed.as_ref().and_then(|checkpoint| of_checkpoint(checkpoint, "date"));
        if let Some(date) = args.date.or(stored.and_then(|date| date.parse().ok())) {
            folder.template = folder.template.map(|template| template.at(date));
        }
        folder.tokenizer.check_vocabulary(config.vocabulary)?;
        let Tokenizer::File(tokenizer, _) = &folder.tokenizer else { unreachable!("it was read from a file") };
        let encoder =
            Encoder { tokenizer, template: folder.template.as_ref(), end: folder.end(), context: config.context };
        let sources = Sources {
            tokenizer: &folder.tokenizer,
            training: &args.data,
            held_out: args.eval.as_deref(),
            share: args.eval_share,
            seed,
        };
        let form = Form {
            context: config.context,
            packs: config.learned_positions.is_none(),
            has_pairs: args.preferences.is_some(),
            marks_padding: config.router_loss.is_some(),
        };
        let data = Data::load(&sources, &encoder, form)?;
        if args.patience.is_some() && data.held_out.is_empty() {
            return Err(bad("--patience", "needs evaluations: add --eval or --eval-share"));
        }
        let beginning = args.sample.as_ref().map(|text| match folder.template {
            Some(_) => folder.chat("--sample", &[json!({"role": "user", "content": text})]),
            None => folder.tokenizer.encode_beginning("--sample", text),
        });
        let beginning = beginning.transpose()?;
        let is_narrow = match &resumed {
            Some(checkpoint) => of_checkpoint(checkpoint, FROZEN).as_deref() == Some(NARROW),
            None => lora.is_some() && args.run.recompute,
        };
        Ok(Self { args, accumulate, shards, folder, data, config, lora, is_narrow, files, resumed, beginning })
    }

    /// Returns the contexts of an update.
    pub(crate) fn contexts_per_update(&self) -> usize {
        self.args.batch * self.accumulate
    }

    /// Returns the updates of the run.
    pub(crate) fn total(&self) -> u64 {
        self.args.epochs as u64 * self.data.updates_per_epoch(self.contexts_per_update())
    }

    fn evaluate_every(&self) -> u64 {
        let each_epoch = self.data.updates_per_epoch(self.contexts_per_update());
        self.args.evaluate_every.map_or(each_epoch, |every| every as u64)
    }

    /// Returns the way in which the model runs.
    pub(crate) fn mode(&self) -> Mode {
        let RunArgs { recompute, memory, .. } = self.args.run;
        Mode { recompute, memory, documents: true, counted: true, preferences: self.args.dpo() }
    }

    /// Builds the model. If it has adapters, its own weights are frozen, in the type of the file,
    /// or in f32 where steps would otherwise widen them to f32 and hold both.
    pub(crate) fn model<S: Activation>(&self) -> Result<(Gpt<S>, ParameterSpec)> {
        let config = self.config.clone();
        let (layers, spec) = match &self.lora {
            Some(lora) => Transformer::with_lora(config, lora, |entry| self.frozen_type::<S>(entry))?,
            None => Transformer::new(config)?,
        };
        let spec = spec.with_loaded(|entry| self.files.has(entry));
        Ok((Gpt::of(layers, self.mode()), self.args.run.memory.of(spec)))
    }

    /// Returns the type in which a weight is frozen: NF4 if it is quantized. Kernels that compute
    /// in f32 read matrices that were widened to f32 in step memory. With recompute, those of one
    /// block exist at a time.
    fn frozen_type<S: Activation>(&self, entry: &ParameterEntry) -> FrozenType {
        let is_narrow = <S as Element>::NAME == bf16::NAME;
        let is_brief = self.is_narrow && entry.name().starts_with("blocks.");
        let stored = match self.args.quantize {
            Some(Quantize::Nf4) => self.files.quantized(entry),
            None => self.files.stored(entry),
        };
        if is_narrow || is_brief || entry.shape().extents().len() < 2 || stored == FrozenType::Nf4 {
            return stored;
        }
        FrozenType::F32
    }

    /// Loads the model's own weights, trained or frozen, and those of the adapter that continues.
    pub(crate) fn load_weights(&self, parameters: &mut Parameters) -> Outcome<()> {
        weights::load(&self.args.weights, parameters)?;
        self.load_adapter(parameters)
    }

    /// Loads the adapter that continues, if there is one.
    fn load_adapter(&self, parameters: &mut Parameters) -> Outcome<()> {
        match self.lora.as_ref().zip(self.args.adapter.as_ref()) {
            Some((lora, folder)) => lora.load(folder, &self.config, parameters).map_err(weights::refused),
            None => Ok(()),
        }
    }

    /// Creates the model with the weights of its folder, and the optimizer. New adapters change
    /// nothing: their second matrices are zero.
    pub(crate) fn state<S: Activation>(&self, device: &Device) -> Outcome<TrainState<Gpt<S>, Rule>> {
        let (model, spec) = self.model::<S>()?;
        let config = AdamW {
            learning_rate: self.args.learning_rate(),
            weight_decay: self.args.weight_decay,
            clip: Some(1.0),
            schedule: self.args.schedule(self.total()),
            ..AdamW::default()
        };
        let mut state = self.args.run.state(device, model, &spec, Rule::AdamW(config))?;
        weights::load(&self.args.weights, &mut state.parameters)?;
        match &self.lora {
            Some(lora) if lora.dropout > 0.0 => Ok(state.with_dropout(self.args.run.seed)?),
            _ => Ok(state),
        }
    }

    /// Completes a new state: returns the references of pairs, which the model computes without its
    /// adapter, and loads the adapter that continues.
    pub(crate) fn start<S: Activation>(
        &self,
        arena: &mut Arena,
        state: &mut TrainState<Gpt<S>, Rule>,
        leads: bool,
    ) -> Outcome<References> {
        let references = self.references(arena, state, leads)?;
        self.load_adapter(&mut state.parameters)?;
        Ok(references)
    }

    /// Returns the contexts of an evaluation step. References are computed in the shapes of a
    /// training step.
    fn evaluation_batch(&self) -> usize {
        if self.args.preferences.is_some() { self.args.batch } else { evaluation_batch(self.args.batch) }
    }

    /// Computes the memory that the run needs.
    pub(crate) fn memory<S: Activation>(&self, device: &Device) -> Result<RunMemory> {
        let [step, evaluation] = [self.args.batch, self.evaluation_batch()].map(|samples| self.blank(samples));
        RunMemory::of(device, || self.model::<S>(), self.args.run.precision.of_f32(), [&step, &evaluation])
    }

    /// Returns contexts without tokens, for measurements that ignore the values.
    pub(crate) fn blank(&self, count: usize) -> Contexts {
        self.data.blank(self.config.context, count)
    }

    /// Trains to the end. Returns none if it was stopped, after writing a checkpoint.
    pub(crate) fn train<S: Activation>(
        &self,
        trainer: &mut Trainer<'_, Gpt<S>, Rule>,
        references: References,
        leads: bool,
    ) -> Outcome<Option<Trained>> {
        let Args { batch, ref out, patience, ref resume, .. } = *self.args;
        let context = self.config.context;
        let (rate, schedule) = (f64::from(self.args.learning_rate()), self.args.schedule(self.total()));
        let updates = Updates {
            rate: &|number| rate * schedule.factor(number),
            keeps_rates: false,
            out,
            leads,
            notes: NOTES,
            settings: self.settings(),
            total: self.total(),
            evaluate_every: self.evaluate_every(),
            patience,
            bytes_per_token: None,
            exports_best: true,
            samples_per_update: self.contexts_per_update(),
            tokens_per_sample: context,
            resumed: self.resumed.as_ref().zip(resume.as_deref()),
            how_to_prolong:
                "To continue this run, use the checkpoint's settings; only --epochs, --patience and --eval \
                             may differ. To train with other settings, start a new run from the model of a finished run"
                    .into(),
        };
        let References { training, held_out } = references;
        let sizes = [batch, self.accumulate];
        let batches = |behind| self.data.batches(context, sizes, self.args.run.seed, behind, training);
        let held_out = self.data.in_order(&self.data.held_out, context, self.evaluation_batch(), &held_out);
        updates.run(trainer, batches, &held_out)
    }

    /// Returns all settings that decide the weights after an update, except the number of updates:
    /// a run can be prolonged.
    pub(crate) fn settings(&self) -> Settings {
        let Args { batch, warmup, decay, weight_decay, .. } = *self.args;
        let learning_rate = self.args.learning_rate();
        let RunArgs { precision, seed, .. } = self.args.run;
        let mut all = settings::of_model(&self.config);
        all.extend([
            ("precision", precision.to_string()),
            ("batch", batch.to_string()),
            ("accumulate", self.accumulate.to_string()),
            ("shards", self.shards.to_string()),
            ("learning-rate", format!("{learning_rate:e}")),
            ("warmup", warmup.to_string()),
            ("decay", format!("{decay:?}")),
            ("weight-decay", weight_decay.to_string()),
            ("lora", self.lora.as_ref().map_or("none".into(), described)),
            (FROZEN, if self.is_narrow { NARROW } else { "as computed" }.into()),
            ("quantize", format!("{:?}", self.args.quantize)),
            ("seed", seed.to_string()),
            ("tokenizer", self.folder.tokenizer.name()),
            ("data", self.data.size.sha256.clone()),
        ]);
        all.extend(self.args.run.memory.setting());
        all.extend(self.args.dpo().map(|dpo| ("preferences", format!("{dpo:?}"))));
        let date = self.folder.template.as_ref().and_then(ChatTemplate::date);
        all.extend(date.map(|date| ("date", date.to_string())));
        all
    }

    /// Returns all settings that ranks must share.
    pub(crate) fn settings_of_ranks(&self) -> Settings {
        let mut settings = self.settings();
        settings.push(("epochs", self.args.epochs.to_string()));
        settings.push(("patience", format!("{:?}", self.args.patience)));
        settings.push(("eval", digest(&self.data.held_out)));
        settings::of_ranks(settings, &self.args.run, self.evaluate_every(), self.resumed.is_some())
    }

    /// Creates the trainer of the run.
    pub(crate) fn trainer<'a, S: Activation>(
        &self,
        arena: &'a mut Arena,
        state: TrainState<Gpt<S>, Rule>,
    ) -> Result<Trainer<'a, Gpt<S>, Rule>> {
        self.args.run.trainer(arena, state, &self.blank(self.args.batch))
    }

    /// Returns the folder of the exported model, or of its adapters.
    pub(crate) fn export(&self) -> std::path::PathBuf {
        let adapters = self.lora.is_some() && !self.args.merge;
        Path::new(&self.args.out).join(if adapters { "adapter" } else { "transformers" })
    }
}

/// Opens a tokenizer's file.
fn tokenizer(file: &Path) -> Outcome<Tokenizer> {
    if !file.exists() && [Path::new("bytes"), Path::new("gpt2")].contains(&file) {
        let reason = "expected a file: a model of --weights has a tokenizer.json of its own, so leave --tokenizer out";
        return Err(bad(format!("--tokenizer {}", file.display()), reason));
    }
    Tokenizer::open(&file.display().to_string())
}

/// Returns a setting of the run that wrote a checkpoint.
fn of_checkpoint(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    let settings: Vec<(String, String)> = serde_json::from_str(checkpoint.note(NOTES[1]).ok()?).ok()?;
    settings.into_iter().find(|(own, _)| own == name).map(|(_, value)| value)
}

/// Describes the adapters without the path of their model, which is the same model under any path.
fn described(lora: &Lora) -> String {
    format!("{:?}", Lora { base_model: None, ..lora.clone() })
}

/// Returns the digest of contexts.
pub(crate) fn digest(contexts: &[Packed]) -> String {
    let mut digest = Sha256::new();
    for packed in contexts {
        for numbers in [&packed.ids, &packed.labels, &packed.documents] {
            digest.update(bytemuck::cast_slice::<u32, u8>(numbers));
        }
    }
    hex(&digest.finalize())
}

/// Returns the adapters that the arguments ask for.
fn lora(args: &Args, config: &ModelConfig) -> Outcome<Option<Lora>> {
    let base_model = Some(args.weights.display().to_string());
    if let Some(folder) = &args.adapter {
        let lora = weights::adapter(folder, config)?;
        lora.check_trainable(config).map_err(|error| bad(folder.display(), for_users(&error)))?;
        return Ok(Some(Lora { base_model, ..lora }));
    }
    let Some(rank) = args.lora else { return Ok(None) };
    let alpha = args.lora_alpha.map_or(2.0 * rank as f64, f64::from);
    let lora = Lora { base_model, dropout: args.lora_dropout, ..Lora::new(rank, alpha) };
    let targets = match &args.lora_targets[..] {
        [] => Targets::AllLinear,
        [all] if all == "all-linear" => Targets::AllLinear,
        names => Targets::Names(names.to_vec()),
    };
    // Each name, because a file may have names that its model lacks.
    for name in &args.lora_targets {
        let one = if name == "all-linear" { Targets::AllLinear } else { Targets::Names(vec![name.clone()]) };
        let one = Lora { targets: one, ..lora.clone() };
        one.check_trainable(config).map_err(|error| bad("--lora-targets", for_users(&error)))?;
    }
    Ok(Some(Lora { targets, ..lora }))
}
