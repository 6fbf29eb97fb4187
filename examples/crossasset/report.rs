//! What a run leaves behind: `report.json` and `loss.svg`.
//!
//! Files appear whole or not at all: each is written under another name, forced to the disk and then renamed.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stepscope::{ArenaReport, CaptureReport, Result, replace_file};

use crate::loss_svg;

/// Batches of which the report keeps loss and gradient.
pub(crate) const BATCHES_KEPT: usize = 8;

/// The whole of `report.json`. A loss that is not finite is written as `null`.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// `emulated` or `cuda`.
    pub(crate) device: String,
    /// The PTX that its kernels were compiled from: architecture, SHA-256 and compiler; none on the emulator.
    pub(crate) ptx: Option<String>,
    /// The size of the model.
    pub(crate) model: ModelSize,
    /// The size of the data.
    pub(crate) data: DataSize,
    /// Every epoch of every fold, in the order of training.
    pub(crate) epochs: Vec<EpochResult>,
    /// The first [`BATCHES_KEPT`] batches of the run.
    pub(crate) batches: Vec<BatchResult>,
    /// What the step arena did over the whole run.
    pub(crate) arena: ArenaUse,
    /// What captured steps did; none with `--capture off`.
    pub(crate) capture: Option<CaptureUse>,
    /// SHA-256 of the final weights (`Parameters::sha256`).
    pub(crate) weights_sha256: String,
}

/// The size of the model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct ModelSize {
    /// Weight tensors.
    pub(crate) tensors: usize,
    /// Numbers in all of them.
    pub(crate) weights: usize,
}

/// The size of the data.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct DataSize {
    /// Bars of all assets.
    pub(crate) bars: usize,
    /// Samples kept.
    pub(crate) samples: usize,
}

/// One pass over the training part of a fold, and what the model then made of the validation part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EpochResult {
    /// Counted from 0.
    pub(crate) fold: usize,
    /// Counted from 0 in each fold.
    pub(crate) epoch: usize,
    /// Mean cross-entropy over the training samples, each as it was trained on.
    pub(crate) train_loss: f64,
    /// Mean cross-entropy over the validation samples after the epoch.
    pub(crate) valid_loss: f64,
    /// Share of the validation samples whose label has the largest logit.
    pub(crate) valid_accuracy: f64,
    /// Share of the validation samples that have the training part's most frequent label.
    pub(crate) baseline_accuracy: f64,
    /// Time of the epoch's training.
    pub(crate) seconds: f64,
    /// Training samples per second.
    pub(crate) samples_per_second: f64,
}

/// One update of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BatchResult {
    /// Mean cross-entropy.
    pub(crate) loss: f64,
    /// L2 norm of the gradient of the head's weight, before clipping.
    pub(crate) head_gradient_l2: f64,
}

/// What the step arena did.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ArenaUse {
    /// Its size.
    pub(crate) capacity_bytes: u64,
    /// The most that one step took, the overflow's included.
    pub(crate) high_water_bytes: u64,
    /// Steps ended.
    pub(crate) resets: u64,
    /// Tensors that steps allocated.
    pub(crate) allocations: u64,
    /// Those among them that did not fit.
    pub(crate) overflow_allocations: u64,
    /// The whole of what it knows: phases, call sites, overflow, memory of device and host.
    pub(crate) report: Option<ArenaReport>,
}

/// What captured steps did over the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CaptureUse {
    /// Launches of a replay.
    pub(crate) nodes: usize,
    /// Recordings made: one for each shape of batch in each fold.
    pub(crate) recordings: u64,
    /// Time that making them took.
    pub(crate) record_seconds: f64,
    /// Steps that ran as one graph.
    pub(crate) replays: u64,
    /// Bytes of the arena that they had for themselves.
    pub(crate) bytes_owned: usize,
}

impl CaptureUse {
    /// With one more capture.
    pub(crate) fn after(before: Option<Self>, report: CaptureReport) -> Self {
        let before = before.unwrap_or_default();
        Self {
            nodes: before.nodes.max(report.nodes),
            recordings: before.recordings + report.recordings,
            record_seconds: before.record_seconds + report.record_seconds,
            replays: before.replays + report.replays,
            bytes_owned: before.bytes_owned.max(report.bytes_owned),
        }
    }
}

impl From<ArenaReport> for ArenaUse {
    fn from(report: ArenaReport) -> Self {
        Self {
            capacity_bytes: report.capacity_bytes as u64,
            high_water_bytes: report.high_water_bytes as u64,
            resets: report.resets,
            allocations: report.allocations,
            overflow_allocations: report.overflow.allocations,
            report: Some(report),
        }
    }
}

impl ArenaUse {
    /// The printed report's first line, and the overflow's where there was one.
    pub(crate) fn summary(&self) -> String {
        let text = self.report.as_ref().map(ToString::to_string).unwrap_or_default();
        let overflow = |line: &str| line.trim_start().starts_with("overflow:");
        let shown = text.lines().enumerate().filter(|(number, line)| *number == 0 || overflow(line));
        shown.map(|(_, line)| line).collect::<Vec<_>>().join("\n")
    }
}

impl Report {
    /// Writes `report.json` and `loss.svg` into `folder`, which must exist.
    ///
    /// # Errors
    /// When a file cannot be written; what stood in its place is then unchanged.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let mut json = serde_json::to_string_pretty(self).expect("plain numbers and lists have a JSON form");
        json.push('\n');
        replace_file(folder.join("loss.svg"), loss_svg::draw(&self.epochs).as_bytes())?;
        replace_file(folder.join("report.json"), json.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    fn report() -> Report {
        let epoch = EpochResult {
            fold: 0,
            epoch: 0,
            train_loss: 1.0,
            valid_loss: f64::NAN,
            valid_accuracy: 0.5,
            baseline_accuracy: 0.25,
            seconds: 2.0,
            samples_per_second: 64.0,
        };
        let batches = (0..8).map(|batch| BatchResult { loss: f64::from(batch), head_gradient_l2: 0.5 }).collect();
        Report { device: "emulated".into(), epochs: vec![epoch], batches, ..Report::default() }
    }

    #[test]
    fn the_json_has_the_documented_keys() {
        let folder = tempfile::tempdir().unwrap();
        report().write(folder.path()).unwrap();
        let text = fs::read_to_string(folder.path().join("report.json")).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let batches: Vec<Value> =
            (0..8).map(|batch| json!({ "loss": f64::from(batch), "head_gradient_l2": 0.5 })).collect();
        let expected = json!({
            "device": "emulated",
            "ptx": null,
            "model": { "tensors": 0, "weights": 0 },
            "data": { "bars": 0, "samples": 0 },
            "epochs": [{
                "fold": 0, "epoch": 0, "train_loss": 1.0, "valid_loss": null, "valid_accuracy": 0.5,
                "baseline_accuracy": 0.25, "seconds": 2.0, "samples_per_second": 64.0,
            }],
            "batches": batches,
            "arena": {
                "capacity_bytes": 0, "high_water_bytes": 0, "resets": 0, "allocations": 0, "overflow_allocations": 0,
                "report": null,
            },
            "capture": null,
            "weights_sha256": "",
        });
        assert_eq!(value, expected);
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["loss.svg", "report.json"], "no temporary file stays");
    }
}
