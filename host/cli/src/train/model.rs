//! Language models: the layers of [`stepscope::models`], the loss, and the sizes of new models.
//!
//! The loss is `cross_entropy(hidden head^T, labels)`, or that of [`preferences`]. The head
//! computes the logits of one chunk of tokens at a time. Activations are f32 or BF16; weights,
//! their gradients and the loss are f32.

pub(crate) mod preferences;

use std::marker::PhantomData;
use std::path::Path;

use clap::ValueEnum;
use serde_json::json;
use stepscope::models::{ModelConfig, Transformer, WeightFiles};
use stepscope::ops::{Activation, LabelRules, LmHeadConfig};
use stepscope::optim::ParameterGroups;
use stepscope::parameters::{FrozenType, GradientType, MasterType, ParameterEntry, StateType};
use stepscope::tensor::{Indices, Saved};
use stepscope::{DeviceBatch, ParameterSpec, Result, Tape, Var};

use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::{Arch, Size};
use crate::train::model::preferences::Dpo;

/// Returns the configuration of a new model, as a `config.json` of transformers states it.
pub(crate) fn config(size: Size, arch: Arch, vocabulary: usize, context: usize) -> ModelConfig {
    let (layers, width, query_heads, key_heads): (usize, usize, usize, usize) = match size {
        Size::Tiny => (4, 128, 4, 2),
        Size::Small => (12, 768, 12, 4),
        Size::Medium => (24, 1024, 16, 8),
        Size::Large => (36, 1280, 20, 10),
        Size::Xl => (48, 1600, 25, 5),
    };
    let json = match arch {
        Arch::Gpt2 => json!({
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
            "vocab_size": vocabulary, "n_positions": context, "n_ctx": context, "n_embd": width, "n_layer": layers,
            "n_head": query_heads, "n_inner": 4 * width, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true,
        }),
        Arch::Llama => json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": query_heads, "num_key_value_heads": key_heads,
            // SwiGLU has three matrices and GELU two, so its hidden width is 2/3 of 4 x width.
            "intermediate_size": (8 * width / 3).next_multiple_of(64), "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
            "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
        }),
        Arch::Qwen3 => json!({
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
            "vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": query_heads, "num_key_value_heads": key_heads,
            "head_dim": width / query_heads, "intermediate_size": (8 * width / 3).next_multiple_of(64),
            "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": true, "attention_bias": false,
        }),
    };
    ModelConfig::from_json(json.to_string().as_bytes()).expect("a supported configuration")
}

/// Returns an error for weights in four bits, which train only adapters. Training the decoded
/// weights would take the memory of the whole model and export it in another type.
pub(crate) fn check_trainable(folder: &Path, files: &WeightFiles, config: &ModelConfig) -> Outcome<()> {
    let (_, spec) = Transformer::new(config.clone())?;
    if spec.iter().all(|(_, entry)| files.stored(entry) != FrozenType::Nf4) {
        return Ok(());
    }
    let reason = "has weights in NF4, which cannot be trained themselves: train adapters next to them with `stepscope \
                  finetune --lora 16`, or give the folder of the model before it was quantized";
    Err(bad(folder.display(), reason))
}

/// The memory in which a model's trained weights, moments and gradients are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainingMemory {
    /// f32, and a copy of the weights in BF16 if products read BF16.
    #[default]
    Full,
    /// Split masters, and moments in 8 bits.
    Small,
    /// Small memory, and gradients in BF16, on one GPU.
    Smallest,
    /// Small memory, and gradients that are not stored, on one GPU with one step for each update.
    Released,
}

impl TrainingMemory {
    /// Returns the spec with this memory.
    pub(crate) fn of(self, spec: ParameterSpec) -> ParameterSpec {
        match self {
            Self::Full => spec,
            Self::Small => spec.with_masters(MasterType::Split).with_state(StateType::Bits8),
            Self::Smallest => Self::Small.of(spec).with_gradients(GradientType::Bf16),
            Self::Released => Self::Small.of(spec).with_gradients(GradientType::Released),
        }
    }

    /// Returns the setting that decides the weights. Checkpoints from before this setting lack it.
    pub(crate) fn setting(self) -> Option<(&'static str, String)> {
        let name = self.to_possible_value().filter(|_| self != Self::Full)?.get_name().to_owned();
        Some(("memory", name))
    }
}

/// The way a model runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mode {
    /// True if each block keeps only its input and runs again in the backward pass. Also set for
    /// passes without backward, where nothing is recomputed.
    pub(crate) recompute: bool,
    /// The memory of weights, moments and gradients.
    pub(crate) memory: TrainingMemory,
    /// True if tokens attend only to their own document, which is input 2 of the batch.
    pub(crate) documents: bool,
    /// True if the loss is a mean over the tokens that count, in all parts of a batch together.
    /// Other labels are [`stepscope::ops::IGNORED`]. The last input, `[1]`, is then the number of
    /// samples of the batch divided by the number of its counted tokens. If the model has a loss of
    /// its routers, one more input has 1 for each token and 0 for padding.
    pub(crate) counted: bool,
    /// The preference loss, which replaces the mean over tokens. The last inputs are then those of
    /// [`preferences`].
    pub(crate) preferences: Option<Dpo>,
}

/// A language model, as handles of parameters. Activations are stored as `S`.
#[derive(Clone, Debug)]
pub(crate) struct Gpt<S = f32> {
    pub(crate) layers: Transformer,
    mode: Mode,
    stored: PhantomData<S>,
}

impl<S: Activation> Gpt<S> {
    /// Builds the model and its parameter spec.
    ///
    /// # Errors
    /// Never, since names are unique.
    pub(crate) fn new(config: ModelConfig, mode: Mode) -> Result<(Self, ParameterSpec)> {
        let (layers, spec) = Transformer::new(config)?;
        Ok((Self::of(layers, mode), mode.memory.of(spec)))
    }

    /// Makes a model of these layers.
    pub(crate) fn of(layers: Transformer, mode: Mode) -> Self {
        Self { layers: layers.recompute(mode.recompute), mode, stored: PhantomData }
    }

    /// Returns the configuration.
    pub(crate) fn config(&self) -> &ModelConfig {
        self.layers.config()
    }

    /// Applies weight decay to matrices and tables, but not to gains and biases, and not to a table
    /// of positions that samples do not reach.
    pub(crate) fn groups(&self, spec: &ParameterSpec) -> ParameterGroups {
        let ModelConfig { context, learned_positions, .. } = *self.config();
        let unreached = learned_positions.is_some_and(|rows| rows > context);
        let without = move |entry: &ParameterEntry| unreached && entry.name() == "positions.weight";
        let without = move |entry: &ParameterEntry| entry.shape().extents().len() == 1 || without(entry);
        match spec.entries().iter().any(without) {
            true => ParameterGroups::new().no_decay(without),
            false => ParameterGroups::new(),
        }
    }

    /// Returns the input of the head: `[samples, tokens, width]` for `ids: [samples, tokens]`.
    ///
    /// # Errors
    /// Returns an error if an op fails, for example because the arena is full.
    pub(crate) fn hidden<'s>(
        &self,
        tape: &Tape<'_, 's>,
        ids: Indices<'s>,
        documents: Option<Saved<'s, u32>>,
    ) -> Result<Var<'s, S>> {
        self.layers.forward(tape, ids, documents)
    }
}

/// The inputs of a batch are the ids, the labels, and optionally the documents and the share of a
/// counted token.
impl<S: Activation> stepscope::Model<S> for Gpt<S> {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, S>> {
        let documents = if self.mode.documents { Some(batch.input(2)?) } else { None };
        self.hidden(tape, batch.indices(0)?, documents)
    }

    /// Averages over all tokens, over the counted tokens of the batch, or over its pairs.
    fn loss<'s>(&self, tape: &Tape<'_, 's>, hidden: &Var<'s, S>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        if self.mode.preferences.is_some() {
            return Ok(self.loss_with_figures(tape, hidden, batch)?.0);
        }
        let (labels, form) = (batch.indices(1)?, LmHeadConfig::default().tied());
        if !self.mode.counted {
            return tape.linear_cross_entropy(hidden, self.layers.head(), labels, form);
        }
        let samples = labels.shape().extents()[0];
        let rules = LabelRules { ignore: true, ..LabelRules::default() }.weighted(1.0 / samples as f32);
        let sum = tape.linear_cross_entropy(hidden, self.layers.head(), labels, form.rules(rules))?;
        let share = batch.input::<f32>(if self.mode.documents { 3 } else { 2 })?;
        sum.mul(tape.input(share))
    }

    fn loss_with_figures<'s>(
        &self,
        tape: &Tape<'_, 's>,
        hidden: &Var<'s, S>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        match self.mode.preferences {
            Some(dpo) => dpo.loss(tape, &self.log_probabilities(tape, hidden, batch)?, batch),
            None => Ok((self.loss(tape, hidden, batch)?, Vec::new())),
        }
    }

    /// Adds the auxiliary loss of the routers, if the model has one, as transformers does.
    fn training_loss_with_figures<'s>(
        &self,
        tape: &Tape<'_, 's>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        let Mode { documents, counted, preferences, .. } = self.mode;
        let last = if preferences.is_some() { 5 } else { 3 + usize::from(documents) };
        let real = (counted && self.config().router_loss.is_some()).then(|| batch.input(last)).transpose()?;
        let documents = if documents { Some(batch.input(2)?) } else { None };
        let (hidden, of_routers) = self.layers.forward_balanced(tape, batch.indices(0)?, documents, real)?;
        let (loss, figures) = self.loss_with_figures(tape, &hidden, batch)?;
        match of_routers {
            Some(of_routers) => Ok((loss.add(of_routers.reshape(loss.shape())?)?, figures)),
            None => Ok((loss, figures)),
        }
    }
}
