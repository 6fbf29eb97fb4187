//! The report of a run: `report.json`.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use stepscope::files::replace_file;
use stepscope::models::{MixtureConfig, ModelConfig};
use stepscope::ops::{self, Activation};
use stepscope::optim::UpdateRule;
use stepscope::parameters::ParameterEntry;
use stepscope::{Device, Parameters, Result, TrainState, Trainer};
use stepscope_predict::Gpu;

use crate::program::usage::{ArenaUse, CaptureUse, MemoryUse, ModelSize};
use crate::run::memory::weights_bytes;
use crate::run::updates::Trained;
use crate::train::model::Gpt;
use crate::train::model::preferences::Rewards;

/// The contents of `report.json`, with the size of the data as `D`.
#[derive(Debug, Serialize)]
pub(crate) struct Report<D> {
    /// `emulated` or `cuda`.
    pub(crate) device: String,
    /// The PTX that its kernels were compiled from; none on the emulator.
    pub(crate) ptx: Option<String>,
    pub(crate) model: ModelSize,
    pub(crate) data: D,
    #[serde(flatten)]
    pub(crate) speed: Speed,
    /// SHA-256 of the final weights (`Parameters::sha256`).
    pub(crate) weights_sha256: String,
    /// The updates that the exported weights have had: all, or those up to the best evaluation.
    pub(crate) exported_update: u64,
    /// The generated text, if one was asked for.
    pub(crate) sample: Option<String>,
    pub(crate) bytes: Bytes,
    pub(crate) arena: ArenaUse,
    /// Memory of the process. On the emulator it includes the device's.
    pub(crate) memory: MemoryUse,
    /// Use of captured steps; none with `--eager`.
    pub(crate) capture: Option<CaptureUse>,
    #[serde(flatten)]
    pub(crate) position: Position,
    /// The time from the end of one update to the end of the next, in this process, without
    /// evaluations. Between two evaluations, the first update also waits until the second is
    /// queued, and the last has already been waited for. Those two updates both get the mean of
    /// their times.
    pub(crate) seconds: Vec<f64>,
}

/// The progress of a run: the part of the report that its checkpoint stores.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The mean loss of each update, before the update.
    pub(crate) losses: Vec<f64>,
    /// The learning rate of each update.
    pub(crate) rates: Vec<f32>,
    /// Evaluations on the held-out text.
    pub(crate) evaluations: Vec<Evaluation>,
    /// The rewards of each update, if preferences are trained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) rewards: Vec<Rewards>,
}

/// An evaluation on the held-out text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    /// Updates made before it.
    pub(crate) update: u64,
    /// The mean loss per token, or per pair of answers.
    pub(crate) loss: f64,
    /// The exponential of the loss per token: the number of equally likely tokens with the same
    /// uncertainty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) perplexity: Option<f64>,
    /// The bits of the loss for each byte of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bits_per_byte: Option<f64>,
    /// The rewards, if preferences are trained.
    #[serde(flatten)]
    pub(crate) rewards: Option<Rewards>,
}

/// Device memory in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Bytes {
    /// Weights, their BF16 copy, gradients, and the optimizer's state.
    pub(crate) weights: usize,
    /// The step arena and the memory of captured steps.
    pub(crate) steps: usize,
}

impl<D: Serialize> Report<D> {
    /// Returns the report of a finished run of these ranks, of `tokens` per update, whose final
    /// weights are exported.
    pub(crate) fn of<S: Activation, R: UpdateRule>(
        device: &Device,
        trainer: &mut Trainer<'_, Gpt<S>, R>,
        data: D,
        trained: Trained,
        tokens: usize,
        ranks: usize,
        sample: Option<String>,
    ) -> Result<Self> {
        let arena = trainer.arena().report();
        let TrainState { model, parameters, precision, .. } = trainer.state();
        let config = model.layers.config();
        let spec = parameters.spec();
        let bytes = Bytes { weights: weights_bytes(parameters), steps: arena.capacity_bytes + arena.captured_bytes };
        Ok(Self {
            device: device.description().kind.to_string(),
            ptx: device.description().ptx.as_ref().map(ToString::to_string),
            model: ModelSize { tensors: spec.entries().len(), weights: spec.weights() },
            data,
            speed: Speed::of(&trained, tokens, ranks).with_peak(device, config, parameters, *precision),
            weights_sha256: parameters.sha256()?,
            exported_update: trained.position.losses.len() as u64,
            sample,
            bytes,
            arena: ArenaUse::from(arena),
            memory: MemoryUse::of(trainer.memory_forecast()),
            capture: trainer.capture_report().map(|report| CaptureUse::after(None, report)),
            position: trained.position,
            seconds: trained.seconds,
        })
    }

    /// Writes `report.json` into `folder`, which must exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The previous file is then unchanged.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let mut json = serde_json::to_string_pretty(self).expect("plain numbers and lists have a JSON form");
        json.push('\n');
        replace_file(folder.join("report.json"), json.as_bytes())
    }
}

impl Position {
    /// Returns true if the last `patience` evaluations were no better than one before them.
    pub(crate) fn worsens(&self, patience: Option<usize>) -> bool {
        let Some(patience) = patience else { return false };
        let best = self.best().unwrap_or(0);
        self.evaluations.len() > best + patience
    }

    /// Returns the number of the first evaluation with the lowest loss.
    pub(crate) fn best(&self) -> Option<usize> {
        let by_loss =
            |(_, one): &(usize, &Evaluation), (_, other): &(usize, &Evaluation)| one.loss.total_cmp(&other.loss);
        self.evaluations.iter().enumerate().min_by(by_loss).map(|(number, _)| number)
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tokens_per_second, self.real_tokens_per_second) {
            (Some(all), Some(real)) if real < all => write!(f, "{real:.0} tokens/s, {all:.0} with padding")?,
            (Some(all), _) => write!(f, "{all:.0} tokens/s")?,
            (None, _) => f.write_str("all updates had already been made")?,
        }
        let Some(share) = self.peak_share else { return Ok(()) };
        write!(f, ", {:.0} % of the peak of ", 100.0 * share)?;
        if self.ranks == 1 { f.write_str("the GPU") } else { write!(f, "{} GPUs", self.ranks) }
    }
}

/// The speed of training, without evaluations. None if this process made no update.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Speed {
    /// Tokens per update divided by the median time of an update. Padding counts.
    pub(crate) tokens_per_second: Option<f64>,
    /// Real tokens per update divided by that median. Padding does not count.
    pub(crate) real_tokens_per_second: Option<f64>,
    /// The share that the products with weights reach of the peak of the tensor cores of all
    /// ranks' GPUs, padding included. Each weight and token count six operations, or four if the
    /// weight is frozen. None on a device whose peak is not known.
    pub(crate) peak_share: Option<f64>,
    /// The ranks of the run, each of which has a GPU.
    #[serde(skip)]
    ranks: usize,
}

impl Speed {
    /// Returns the speed of updates of this many tokens each, over all ranks together.
    pub(crate) fn of(trained: &Trained, tokens: usize, ranks: usize) -> Self {
        let mut sorted = trained.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2);
        let real = trained.tokens.iter().sum::<usize>() as f64 / trained.tokens.len() as f64;
        Self {
            tokens_per_second: median.map(|seconds| tokens as f64 / seconds),
            real_tokens_per_second: median.map(|seconds| real / seconds),
            peak_share: None,
            ranks,
        }
    }

    /// Adds the share of the device's peak.
    fn with_peak(
        self,
        device: &Device,
        config: &ModelConfig,
        parameters: &Parameters,
        precision: ops::Precision,
    ) -> Self {
        // Matrices, each of which is a factor of one product per token. A token table is one only
        // if it is also the head.
        let entries: Vec<_> = parameters.spec().iter().map(|(_, entry)| entry).collect();
        let has_head = entries.iter().any(|entry| entry.name() == "head.weight");
        let is_factor = |entry: &&ParameterEntry| {
            let is_table = entry.name() == "positions.weight" || entry.name() == "tokens.weight" && has_head;
            entry.shape().extents().len() == 2 && !is_table
        };
        let operations = |entry: &ParameterEntry| if entry.frozen().is_some() { 4 } else { 6 };
        let used = |entry: &ParameterEntry| {
            let elements = operations(entry) * entry.shape().elements();
            experts_of(config, entry.name()).map_or(elements, |mixture| elements / mixture.experts * mixture.chosen)
        };
        let each_token: usize = entries.iter().copied().filter(is_factor).map(used).sum();
        let bf16 = parameters.bf16_copy().is_some();
        self.of_peak(each_token as f64, peak(&device.description().name, bf16, precision))
    }

    /// Adds the share of a GPU's peak, for this many operations per token.
    fn of_peak(self, each_token: f64, peak: Option<f64>) -> Self {
        let share = |(peak, tokens): (f64, f64)| each_token * tokens / (peak * self.ranks as f64);
        Self { peak_share: peak.zip(self.tokens_per_second).map(share), ..self }
    }
}

/// Returns the mixture to whose experts this parameter belongs, of which a token uses some.
fn experts_of<'c>(config: &'c ModelConfig, name: &str) -> Option<&'c MixtureConfig> {
    let (block, part) = name.strip_prefix("blocks.")?.split_once(".mlp.")?;
    let layer: usize = block.parse().ok()?;
    config.layers.get(layer)?.mixture.as_ref().filter(|_| !part.starts_with("router."))
}

/// Returns the tensor cores' peak in operations per second, for GPUs whose rates the forecasts
/// contain.
fn peak(device: &str, bf16: bool, precision: ops::Precision) -> Option<f64> {
    let gpu = [Gpu::H200, Gpu::GB10].into_iter().find(|gpu| device.contains(gpu.name))?;
    let per_cycle = match (bf16, precision) {
        (true, _) => gpu.bf16_per_cycle,
        (false, ops::Precision::Tf32) => gpu.bf16_per_cycle / 2.0,
        (false, _) => return None,
    };
    Some(per_cycle * f64::from(gpu.processors) * gpu.clock * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_those_of_forecasts() {
        let tera =
            |device: &str, bf16, precision| peak(device, bf16, precision).map(|peak| (peak / 1e11).round() / 10.0);
        assert_eq!(tera("NVIDIA H200", true, ops::Precision::F32), Some(618.9));
        assert_eq!(tera("NVIDIA GB10", false, ops::Precision::Tf32), Some(45.5));
        assert_eq!(tera("NVIDIA GB10", false, ops::Precision::F32), None);
        assert_eq!(tera("emulator", true, ops::Precision::F32), None);
    }

    #[test]
    fn token_uses_some_experts() {
        let json = include_bytes!("../../../../tests/models/cases/qwen3_moe/config.json");
        let config = ModelConfig::from_json(json).unwrap();
        let found = |name: &str| experts_of(&config, name).map(|mixture| (mixture.chosen, mixture.experts));
        let layer = config.layers.iter().position(|layer| layer.mixture.is_some()).unwrap();
        let mixture = config.layers[layer].mixture.unwrap();
        assert!(mixture.chosen < mixture.experts);
        assert_eq!(found(&format!("blocks.{layer}.mlp.down.weight")), Some((mixture.chosen, mixture.experts)));
        for others in ["mlp.router.weight", "attention.o_proj.weight"] {
            assert_eq!(found(&format!("blocks.{layer}.{others}")), None);
        }
    }

    /// The tokens of all ranks are compared with the peak of all GPUs.
    #[test]
    fn peak_share_counts_each_rank() {
        let trained = Trained { seconds: vec![1.0], tokens: vec![80], ..Trained::default() };
        for (ranks, expected) in [
            (1, "80 tokens/s, 100 with padding, 59 % of the peak of the GPU"),
            (2, "80 tokens/s, 100 with padding, 30 % of the peak of 2 GPUs"),
            (8, "80 tokens/s, 100 with padding, 7 % of the peak of 8 GPUs"),
        ] {
            assert_eq!(Speed::of(&trained, 100, ranks).of_peak(5.9, Some(1000.0)).to_string(), expected);
        }
    }
}
