//! The command line of `finetune`.

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use stepscope::optim::Schedule;
use stepscope_chat::Date;

use crate::program::results::Claim;
use crate::run::cli::RunArgs;
use crate::train::cli::{Decay, above_zero, below_one, share, up_to, zero_or_above};
use crate::train::model::preferences::Dpo;

/// The learning rates of full fine-tuning, and of adapters.
const RATE: f32 = 2e-5;
const LORA_RATE: f32 = 2e-4;
/// Those of preferences, as TRL's script `trl/scripts/dpo.py` gives them.
const DPO_RATE: f32 = 5e-7;
const DPO_LORA_RATE: f32 = 5e-6;
/// TRL's default.
const BETA: f32 = 0.1;

/// Fine-tunes a language model of transformers on chats, prompts with completions, or texts. Writes
/// checkpoints, log.jsonl, report.json, and the model in the format of transformers.
#[derive(Clone, Debug, Parser)]
#[command(name = "stepscope finetune", version, args_override_self = true)]
pub(crate) struct Args {
    /// Folder of the model: config.json, safetensors files, tokenizer.json, and for chats a chat
    /// template, as transformers saves it
    #[arg(long, value_name = "DIR")]
    pub(crate) weights: PathBuf,

    /// The tokenizer.json, or its folder, of another tokenizer than that of --weights
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,

    /// Files with one JSON object a line: `messages`, `prompt` and `completion`, or `text`; for
    /// preferences `prompt`, `chosen` and `rejected`
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,

    /// File of the same kind, on which the model is evaluated
    #[arg(long, value_name = "FILE", conflicts_with = "eval_share")]
    pub(crate) eval: Option<PathBuf>,

    /// Evaluate on this share of the data, which is not trained on
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) eval_share: Option<f32>,

    /// Folder for the results; created if missing
    #[arg(long, value_name = "DIR", default_value = "target/finetune")]
    pub(crate) out: PathBuf,

    /// Tokens per context, into which samples are packed; longer texts become several samples, and
    /// longer chats are cut [default: 1024, or the model's if they are fewer]
    #[arg(long, value_name = "TOKENS", value_parser = up_to(1 << 20))]
    pub(crate) context: Option<usize>,

    /// Date that a chat template writes if it asks for one [default: today's in UTC, or that of the
    /// checkpoint]
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub(crate) date: Option<Date>,

    /// Contexts per step
    #[arg(long, value_name = "CONTEXTS", default_value_t = 4, value_parser = up_to(1 << 20))]
    pub(crate) batch: usize,

    /// Passes over the data
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = up_to(1 << 20))]
    pub(crate) epochs: usize,

    /// Train the preference of one answer over another, instead of the answers themselves
    #[arg(long, value_enum)]
    pub(crate) preferences: Option<Preferences>,

    /// Factor of dpo on the differences from the reference, which is the model before training and
    /// without adapters; a larger one keeps the model nearer to it [default: 0.1]
    #[arg(long, value_name = "NUMBER", value_parser = above_zero, requires = "preferences")]
    pub(crate) beta: Option<f32>,

    /// Peak learning rate of AdamW [default: 2e-5, or 2e-4 for adapters; for preferences 5e-7, or
    /// 5e-6 for adapters]
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) learning_rate: Option<f32>,

    /// Share of all updates over which the learning rate rises to its peak
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = zero_or_above)]
    pub(crate) warmup: f32,

    /// Fall of the learning rate after the warm-up, down to zero
    #[arg(long, value_enum, default_value_t = Decay::Cosine)]
    pub(crate) decay: Decay,

    /// Weight decay of AdamW; norms and biases have none
    #[arg(long, value_name = "NUMBER", default_value_t = 0.01, value_parser = zero_or_above)]
    pub(crate) weight_decay: f32,

    /// Evaluate every this many updates [default: once per epoch]
    #[arg(long, value_name = "UPDATES", value_parser = up_to(u32::MAX))]
    pub(crate) evaluate_every: Option<usize>,

    /// End when this many evaluations in a row have found no lower loss [default: never]
    #[arg(long, value_name = "EVALUATIONS", value_parser = up_to(u32::MAX))]
    pub(crate) patience: Option<usize>,

    /// Train adapters of this rank (LoRA), and freeze the model's own weights, of which
    /// BF16 matrices stay BF16 with --precision bf16
    #[arg(long, value_name = "RANK", value_parser = up_to(1 << 12), group = "adapters")]
    pub(crate) lora: Option<usize>,

    /// Folder of an adapter of PEFT or of an earlier run, whose training continues with its
    /// settings
    #[arg(long, value_name = "DIR", group = "adapters")]
    pub(crate) adapter: Option<PathBuf>,

    /// Number that is divided by the rank to scale the adapters [default: twice the rank]
    #[arg(long, value_name = "NUMBER", value_parser = above_zero, requires = "lora", conflicts_with = "adapter")]
    pub(crate) lora_alpha: Option<f32>,

    /// Linear layers that have adapters, by the ends of their names, such as q_proj,v_proj, or
    /// all-linear [default: all-linear, which is all but the head, experts and their routers]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora", conflicts_with = "adapter")]
    pub(crate) lora_targets: Vec<String>,

    /// Probability with which dropout zeroes an element of an adapter's input in training
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = below_one)]
    #[arg(requires = "lora", conflicts_with = "adapter")]
    pub(crate) lora_dropout: f32,

    /// Quantize the frozen weights of linear layers to this type (QLoRA)
    #[arg(long, value_enum, requires = "adapters")]
    pub(crate) quantize: Option<Quantize>,

    /// Export the model with its adapters merged into it, instead of the adapters
    #[arg(long, requires = "adapters")]
    pub(crate) merge: bool,

    /// Continue from this checkpoint, with the same settings; with more --epochs, the run is
    /// prolonged, and the learning rate follows the longer run
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,

    /// Message that the model answers after training
    #[arg(long, value_name = "TEXT")]
    pub(crate) sample: Option<String>,

    /// Most tokens of the answer
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = up_to(1 << 20))]
    pub(crate) sample_tokens: usize,

    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// The loss of preferences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preferences {
    /// Direct preference optimization.
    Dpo,
}

/// The type of quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantize {
    /// Four bits, in the format of bitsandbytes with double quantisation.
    Nf4,
}

impl Args {
    /// Returns the run's claim to its folder.
    pub(crate) fn claim(&self) -> Claim<'_> {
        let data = self.data.iter().map(|path| ("--data", &**path));
        let others = [("--eval", &self.eval), ("--tokenizer", &self.tokenizer), ("--adapter", &self.adapter)];
        let others = others.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?)));
        let reads = data.chain(others).chain([("--weights", &*self.weights)]).collect();
        Claim { out: &self.out, resume: self.resume.as_deref(), overwrite: self.run.overwrite, reads }
    }

    /// Returns the tokenizer's file, if it is not that of the model's folder.
    pub(crate) fn tokenizer(&self) -> Option<PathBuf> {
        let path: &Path = self.tokenizer.as_deref()?;
        Some(if path.is_dir() { path.join("tokenizer.json") } else { path.into() })
    }

    /// Returns the preference loss, if preferences are trained.
    pub(crate) fn dpo(&self) -> Option<Dpo> {
        self.preferences.map(|Preferences::Dpo| Dpo { beta: self.beta.unwrap_or(BETA) })
    }

    pub(crate) fn learning_rate(&self) -> f32 {
        let has_adapters = self.lora.is_some() || self.adapter.is_some();
        self.learning_rate.unwrap_or(match (self.preferences, has_adapters) {
            (None, false) => RATE,
            (None, true) => LORA_RATE,
            (Some(Preferences::Dpo), false) => DPO_RATE,
            (Some(Preferences::Dpo), true) => DPO_LORA_RATE,
        })
    }

    /// Returns the schedule of a run of this many updates. The rate is zero only after the last
    /// one.
    pub(crate) fn schedule(&self, total: u64) -> Schedule {
        let warmup = (f64::from(self.warmup.min(1.0)) * total as f64).ceil() as u64;
        let total = total + 1;
        Schedule { decay: self.decay.shape(), ..Schedule::cosine(warmup, total, 0.0) }
    }
}
