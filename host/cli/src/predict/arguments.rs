//! The command line. A wrong value ends the program with exit code 2 and an explanation.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};

use stepscope::models::ModelConfig;

use crate::finetune::cli::Quantize;
use crate::predict::step::{Adapters, Work};
use crate::train::cli::{Arch, Precision, Size, read_config};
use crate::train::model::{self, Mode, TrainingMemory};
use stepscope_predict::gpu::{self, Gpu};

/// Predicts the time of a training step on a GPU from the kernels it launches. It computes nothing
/// and needs no GPU.
#[derive(Debug, Parser)]
#[command(name = "stepscope predict")]
pub(crate) struct Args {
    /// GPU to predict
    #[arg(long, value_enum, default_value_t = gpu::Name::Gb10)]
    gpu: gpu::Name,

    /// Model to train
    #[arg(long, value_enum, default_value_t = Model::Crossasset)]
    pub(crate) model: Model,

    /// Samples per step [default: 256 for crossasset, 8 for gpt]
    #[arg(long, value_name = "SAMPLES", value_parser = up_to(1 << 20))]
    batch: Option<usize>,

    /// Numbers in matrix multiplies; tf32 rounds the operands, bf16 stores activations and a copy
    /// of the weights in BF16
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(crate) precision: Precision,

    /// Model size of gpt
    #[arg(long, value_enum, default_value_t = Size::Small)]
    size: Size,

    /// Architecture of gpt
    #[arg(long, value_enum, default_value_t = Arch::Gpt2)]
    arch: Arch,

    /// The config.json of a model of transformers, which is predicted instead
    #[arg(long, value_name = "FILE", value_parser = read_config, conflicts_with_all = ["model", "size", "arch", "vocabulary"])]
    config: Option<ModelConfig>,

    /// Tokens per sample of gpt and of --config [default: 128 for tiny, else 1024]
    #[arg(long, value_name = "TOKENS", value_parser = up_to(1 << 20))]
    context: Option<usize>,

    /// Vocabulary size of gpt
    #[arg(long, value_name = "TOKENS", default_value_t = 50_304, value_parser = up_to(1 << 24))]
    vocabulary: usize,

    /// Let gpt keep only the inputs of its blocks and recompute the rest
    #[arg(long)]
    recompute: bool,

    /// Memory of the weights and moments of gpt and of --config
    #[arg(long, value_enum, default_value_t = TrainingMemory::Full)]
    memory: TrainingMemory,

    /// Train adapters of this rank on all linear layers but the head of --config, and freeze the
    /// model's own weights
    #[arg(long, value_name = "RANK", value_parser = up_to(1 << 12), requires = "config")]
    lora: Option<usize>,

    /// Quantize the frozen weights of linear layers to this type (QLoRA)
    #[arg(long, value_enum, requires = "lora")]
    quantize: Option<Quantize>,

    /// The GPU's copy rate in GB/s, reads plus writes, such as the doctor's measurement [default:
    /// the GPU's]
    #[arg(long, value_name = "GB/S", value_parser = above_zero)]
    copy: Option<f64>,

    /// The size of the GPU's L2 cache in MB [default: the GPU's]
    #[arg(long, value_name = "MB", value_parser = up_to(1 << 24))]
    cache: Option<usize>,

    /// Also write the prediction to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Predict the steps that the step bench measured, from its samples file, and print both
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "batch", "precision", "size", "context", "recompute", "memory"])]
    pub(crate) compare: Option<PathBuf>,
}

/// The model to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Model {
    Crossasset,
    Gpt,
}

impl Args {
    pub(crate) fn batch(&self) -> usize {
        self.batch.unwrap_or(if self.model == Model::Gpt || self.config.is_some() { 8 } else { 256 })
    }

    fn mode(&self) -> Mode {
        Mode { recompute: self.recompute, memory: self.memory, ..Mode::default() }
    }

    /// Returns the work of a step.
    pub(crate) fn work(&self) -> Work {
        if let Some(config) = &self.config {
            let mut config = config.clone();
            config.context = self.context.unwrap_or(config.context.min(1024));
            let lora = self.lora.map(|rank| Adapters { rank, quantize: self.quantize });
            return Work::Gpt { config: Box::new(config), mode: self.mode(), lora };
        }
        match self.model {
            Model::Crossasset => Work::CrossAsset,
            Model::Gpt => {
                let context = self.context.unwrap_or(if self.size == Size::Tiny { 128 } else { 1024 });
                let config = model::config(self.size, self.arch, self.vocabulary, context);
                Work::Gpt { config: Box::new(config), mode: self.mode(), lora: None }
            }
        }
    }

    /// Returns the GPU, with the given overrides.
    pub(crate) fn gpu(&self) -> Gpu {
        let gpu = Gpu::of(self.gpu);
        Gpu {
            copy: self.copy.unwrap_or(gpu.copy),
            cache_bytes: self.cache.map_or(gpu.cache_bytes, |megabytes| megabytes as u64 * 1_000_000),
            ..gpu
        }
    }

    /// Returns a title for the prediction.
    pub(crate) fn title(&self) -> String {
        let batch = self.batch();
        match self.work() {
            Work::CrossAsset => format!("CrossAsset, batch {batch}, {}", self.precision),
            Work::Gpt { config, mode, lora } => {
                let adapters = lora.map_or_else(String::new, |Adapters { rank, quantize }| {
                    let weights = if quantize.is_some() { " over NF4" } else { "" };
                    format!(", LoRA of rank {rank}{weights}")
                });
                let again = if mode.recompute { ", recompute" } else { "" };
                let small = mode.memory.setting().map_or_else(String::new, |(_, memory)| format!(", {memory} memory"));
                let (family, context) = (config.family, config.context);
                let size = match self.config {
                    Some(_) => format!("of {} layers", config.layers.len()),
                    None => self.size.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned()),
                };
                format!("{family:?} {size}{adapters}, {batch} x {context}, {}{again}{small}", self.precision)
            }
        }
    }
}

/// Parses a whole number from 1 to `most`.
fn up_to(most: u32) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(most))
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "give a finite number above zero".into())
}
