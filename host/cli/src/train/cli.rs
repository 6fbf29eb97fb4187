//! The command line. A wrong value ends the program with exit code 2 and an explanation, before any
//! work is done.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use stepscope::files::PlainFile;
use stepscope::models::ModelConfig;
use stepscope::{ops, optim};

use crate::program::results::Claim;
use crate::run::cli::RunArgs;
use crate::run::rule::Optimizer;
use crate::train::model::TrainingMemory;

/// Trains a GPT-2 or Llama language model and prints a sample of its text. Writes log.jsonl,
/// report.json, checkpoints, and the weights in the format of Hugging Face transformers.
#[derive(Clone, Debug, Parser)]
#[command(name = "stepscope train", version, args_override_self = true)]
pub(crate) struct Args {
    /// Text files, or token files that end in .bin, in the format of llm.c and nanoGPT; JSON lines
    /// and Parquet files have a document in each `text`; a folder stands for all files in it
    /// [default: the sources of this project's locked dependencies, from cargo's registry]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,

    /// Whole numbers, one for each path in --data: its share of the samples [default: samples are
    /// taken from all paths together, so that each token is read once in a pass]
    #[arg(long, value_name = "SHARE", num_args = 1.., value_parser = RangedU64ValueParser::<u32>::new().range(1..=1000))]
    pub(crate) mixture: Vec<u32>,

    /// Tokenizer: bytes, gpt2, the path of a tokenizer.json, or bpe, which is trained on the text:
    /// 2048 tokens for tiny, else 32768, or as many as --config has [default: the one next to
    /// --weights; else gpt2 for .bin files and for GPT-2's weights; else bpe for 1 MB of text or
    /// more, else bytes]
    #[arg(long, value_name = "bytes|gpt2|bpe|FILE")]
    pub(crate) tokenizer: Option<String>,

    /// Folder for the results; created if missing
    #[arg(long, value_name = "DIR", default_value = "target/gpt")]
    pub(crate) out: PathBuf,

    /// Model size; tiny has about a million weights
    #[arg(long, value_enum, default_value_t = Size::Tiny)]
    pub(crate) size: Size,

    /// Model architecture [default: qwen3 for tiny, else gpt2]
    #[arg(long, value_enum)]
    pub(crate) arch: Option<Arch>,

    /// The config.json of a model of transformers, of which a new one is trained
    #[arg(long, value_name = "FILE", value_parser = read_config, conflicts_with_all = ["size", "arch", "weights"])]
    pub(crate) config: Option<ModelConfig>,

    /// Tokens per sample [default: 128 for tiny, else 1024; at most what --config or --weights
    /// allow]
    #[arg(long, value_name = "TOKENS", value_parser = up_to(1 << 20))]
    pub(crate) context: Option<usize>,

    /// Samples per step
    #[arg(long, value_name = "SAMPLES", default_value_t = 8, value_parser = up_to(1 << 20))]
    pub(crate) batch: usize,

    /// Number of weight updates
    #[arg(long, value_name = "N", default_value_t = 350, value_parser = up_to(u32::MAX))]
    pub(crate) updates: usize,

    /// Optimizer; muon orthogonalizes the updates of the blocks' matrices, and needs full memory
    /// [default: muon for tiny in f32 with full memory, else adamw]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<Optimizer>,

    /// Peak learning rate [default: 2e-3 for tiny, 6e-4 for 124m, 3e-4 for 350m, 2.5e-4 for 774m,
    /// 2e-4 for 1558m; by muon twice as much]
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) learning_rate: Option<f32>,

    /// Updates over which the learning rate rises to its peak [default: a tenth of all, at most
    /// 700]
    #[arg(long, value_name = "UPDATES")]
    pub(crate) warmup: Option<u64>,

    /// Fall of the learning rate at the end
    #[arg(long, value_enum, default_value_t = Decay::Cosine)]
    pub(crate) decay: Decay,

    /// Updates over which the learning rate falls; before them it is constant, so a run can be
    /// resumed from there with more updates [default: all after the warm-up]
    #[arg(long, value_name = "UPDATES")]
    pub(crate) decay_updates: Option<u64>,

    /// Share of the peak learning rate that is left at the end
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = up_to_one)]
    pub(crate) floor: f64,

    /// Let a token attend only to tokens of its own document
    #[arg(long)]
    pub(crate) documents: bool,

    /// Evaluate on held-out text every this many updates [default: a fifth of all]
    #[arg(long, value_name = "UPDATES", value_parser = up_to(u32::MAX))]
    pub(crate) evaluate_every: Option<usize>,

    /// Continue from this checkpoint, with the same settings. Another number of --updates is
    /// accepted if the learning rate of the updates made so far does not depend on it
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,

    /// Start from Hugging Face weights: a folder with config.json and model.safetensors, or with an
    /// index and shards
    #[arg(long, value_name = "DIR", conflicts_with_all = ["size", "arch"])]
    pub(crate) weights: Option<PathBuf>,

    /// Text that the sample begins with
    #[arg(long, value_name = "TEXT", default_value = "fn ")]
    pub(crate) sample: String,

    /// Tokens to generate for the sample
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(crate) sample_tokens: usize,

    /// Sampling temperature; 0 always takes the most likely token
    #[arg(long, value_name = "NUMBER", default_value_t = 0.8, value_parser = zero_or_above)]
    pub(crate) temperature: f32,

    /// Sample only from the N most likely tokens
    #[arg(long, value_name = "N", value_parser = up_to(u32::MAX))]
    pub(crate) top_k: Option<usize>,

    /// Sample only from the most likely tokens whose probabilities add up to this share
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) top_p: Option<f32>,

    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Write the first batch, its logits, its loss and all gradients to this file, then exit; for
    /// tests/oracle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ranks", "shards"])]
    pub(crate) trace: Option<PathBuf>,
}

/// The size of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Size {
    /// About a million weights.
    Tiny,
    /// GPT-2's smallest.
    #[value(name = "124m")]
    Small,
    /// GPT-2's medium.
    #[value(name = "350m")]
    Medium,
    /// GPT-2's large.
    #[value(name = "774m")]
    Large,
    /// GPT-2's XL.
    #[value(name = "1558m")]
    Xl,
}

/// The architecture of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    /// LayerNorm, learned positions, GELU, and a head tied to the token embedding.
    Gpt2,
    /// RMSNorm, rotary positions, SwiGLU, grouped-query attention, and a separate head.
    Llama,
    /// Llama's layers with normalized queries and keys, and a tied head.
    Qwen3,
}

/// The fall of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Decay {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// `1 - sqrt` of the share of the fall that is over.
    Sqrt,
    /// No fall.
    Constant,
}

impl Decay {
    /// Returns the shape of the fall.
    pub(crate) fn shape(self) -> optim::Decay {
        match self {
            Self::Cosine => optim::Decay::Cosine,
            Self::Linear => optim::Decay::Linear,
            Self::Sqrt => optim::Decay::OneMinusSqrt,
            Self::Constant => optim::Decay::Constant,
        }
    }
}

/// The numbers that a model multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    /// f32.
    F32,
    /// f32, rounded to TF32 before each multiply.
    Tf32,
    /// BF16, in which activations and a copy of the weights are stored.
    Bf16,
}

impl Precision {
    /// Returns the precision of multiplies of f32 tensors.
    pub(crate) fn of_f32(self) -> ops::Precision {
        if self == Self::Tf32 { ops::Precision::Tf32 } else { ops::Precision::F32 }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
        })
    }
}

impl Args {
    /// Returns the run's claim to its folder.
    pub(crate) fn claim(&self) -> Claim<'_> {
        let data = self.data.iter().map(|path| ("--data", &**path));
        let weights = self.weights.iter().map(|path| ("--weights", &**path));
        let tokenizer = self.tokenizer.iter().map(|path| ("--tokenizer", Path::new(path)));
        let reads = data.chain(weights).chain(tokenizer).collect();
        Claim { out: &self.out, resume: self.resume.as_deref(), overwrite: self.run.overwrite, reads }
    }

    pub(crate) fn context(&self) -> usize {
        self.context.unwrap_or_else(|| match &self.config {
            Some(config) => config.context.min(1024),
            None if self.size == Size::Tiny => 128,
            None => 1024,
        })
    }

    /// Returns true for the default model, of about a million weights.
    fn is_tiny(&self) -> bool {
        self.size == Size::Tiny && self.config.is_none() && self.weights.is_none()
    }

    pub(crate) fn arch(&self) -> Arch {
        self.arch.unwrap_or(if self.is_tiny() { Arch::Qwen3 } else { Arch::Gpt2 })
    }

    pub(crate) fn optimizer(&self) -> Optimizer {
        let RunArgs { precision, memory, .. } = self.run;
        let by_muon = self.is_tiny() && precision == Precision::F32 && memory == TrainingMemory::Full;
        self.optimizer.unwrap_or(if by_muon { Optimizer::Muon } else { Optimizer::Adamw })
    }

    /// Returns the number of tokens of a tokenizer that is trained on the text.
    pub(crate) fn vocabulary(&self) -> usize {
        self.config.as_ref().map_or(if self.is_tiny() { 1 << 11 } else { 1 << 15 }, |config| config.vocabulary)
    }

    pub(crate) fn warmup(&self) -> u64 {
        self.warmup.unwrap_or((self.updates as u64 / 10).min(700))
    }

    pub(crate) fn evaluate_every(&self) -> u64 {
        self.evaluate_every.unwrap_or(self.updates.div_ceil(5)) as u64
    }
}

/// Parses a whole number from 1 to `most`.
pub(crate) fn up_to(most: u32) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(most))
}

fn number<N: FromStr + Copy + Into<f64>>(text: &str, good: impl Fn(N) -> bool, expected: &str) -> Result<N, String> {
    text.parse()
        .ok()
        .filter(|&number: &N| number.into().is_finite() && good(number))
        .ok_or_else(|| format!("give {expected}"))
}

/// Parses a number of bytes as transformers does: units are powers of 1000.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let units = [("KB", 1), ("MB", 2), ("GB", 3), ("TB", 4), ("", 0)];
    let split = units.into_iter().find_map(|(unit, thousands)| Some((upper.strip_suffix(unit)?, thousands)));
    split
        .and_then(|(number, thousands)| number.parse::<u64>().ok()?.checked_mul(1000_u64.pow(thousands)))
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| "give a positive number of bytes, optionally with KB, MB, GB or TB, such as 5GB".to_owned())
}

pub(crate) fn above_zero(text: &str) -> Result<f32, String> {
    number(text, |number| number > 0.0, "a finite number above zero")
}

pub(crate) fn zero_or_above(text: &str) -> Result<f32, String> {
    number(text, |number| number >= 0.0, "a finite number, at least zero")
}

pub(crate) fn below_one(text: &str) -> Result<f32, String> {
    number(text, |number| (0.0..1.0).contains(&number), "a number from 0 to below 1")
}

pub(crate) fn up_to_one(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a number from 0 to 1")
}

pub(crate) fn share(text: &str) -> Result<f32, String> {
    number(text, |number| number > 0.0 && number <= 1.0, "a number above 0 and at most 1")
}

/// Reads a `config.json`.
pub(crate) fn read_config(path: &str) -> Result<ModelConfig, String> {
    let bytes = PlainFile::read_whole(path, 1 << 20).map_err(|reason| reason.to_string())?;
    ModelConfig::from_json(&bytes)
}
