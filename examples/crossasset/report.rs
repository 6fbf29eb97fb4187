//! The report of a run: `report.json`.
//!
//! The file is written atomically: under another name, synced to disk and then renamed.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};
use stepscope::Result;
use stepscope::files::replace_file;

use stepscope_cli::program::usage::{ArenaUse, CaptureUse, MemoryUse, ModelSize};

/// Batches whose loss and gradient norm the report lists.
pub(crate) const BATCHES_KEPT: usize = 8;

/// The contents of `report.json`. A loss that is not finite is written as `null`.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// `emulated` or `cuda`.
    pub(crate) device: String,
    /// The PTX that its kernels were compiled from (architecture, SHA-256 and compiler); none on
    /// the emulator.
    pub(crate) ptx: Option<String>,
    /// The size of the model.
    pub(crate) model: ModelSize,
    /// The size of the data.
    pub(crate) data: DataSize,
    /// Every epoch of every fold, in the order of training.
    pub(crate) epochs: Vec<EpochResult>,
    /// The first [`BATCHES_KEPT`] batches of the run.
    pub(crate) batches: Vec<BatchResult>,
    /// Use of the step arena over the whole run.
    pub(crate) arena: ArenaUse,
    /// Memory of the process. On the emulator it includes the device's.
    pub(crate) memory: MemoryUse,
    /// Use of captured steps; none with `--capture off`.
    pub(crate) capture: Option<CaptureUse>,
    /// SHA-256 of the final weights (`Parameters::sha256`).
    pub(crate) weights_sha256: String,
}

/// The size of the data.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct DataSize {
    /// Bars of all assets.
    pub(crate) bars: usize,
    /// Samples kept.
    pub(crate) samples: usize,
}

/// A pass over the training part of a fold, and the validation after it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EpochResult {
    /// The number of the fold, from 0.
    pub(crate) fold: usize,
    /// The number of the epoch within its fold, from 0.
    pub(crate) epoch: usize,
    /// Mean cross-entropy over the training samples, each measured before its update.
    pub(crate) train_loss: f64,
    /// Mean cross-entropy over the validation samples after the epoch.
    pub(crate) valid_loss: f64,
    /// Share of the validation samples whose label has the largest logit.
    pub(crate) valid_accuracy: f64,
    /// Share of the validation samples with the training part's most frequent label.
    pub(crate) baseline_accuracy: f64,
    /// Training time of the epoch.
    pub(crate) seconds: f64,
    /// Training samples per second.
    pub(crate) samples_per_second: f64,
}

/// An update of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BatchResult {
    /// Mean cross-entropy.
    pub(crate) loss: f64,
    /// L2 norm of the gradient of the head's weight, before clipping.
    pub(crate) head_gradient_l2: f64,
}

impl Report {
    /// Writes `report.json` into `folder`, which must exist.
    ///
    /// # Errors
    /// When the file cannot be written. The previous file is then unchanged.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let mut json = serde_json::to_string_pretty(self).expect("plain numbers and lists have a JSON form");
        json.push('\n');
        replace_file(folder.join("report.json"), json.as_bytes())
    }
}

/// Returns a table with one row per epoch of each fold. It lists the accuracy of always predicting
/// the training part's most frequent label next to the model's.
pub(crate) fn epoch_table(epochs: &[EpochResult]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "fold",
        "epoch",
        "train loss",
        "valid loss",
        "valid accuracy",
        "baseline",
        "seconds",
        "samples/s",
    ]);
    for result in epochs {
        table.add_row([
            result.fold.to_string(),
            result.epoch.to_string(),
            format!("{:.4}", result.train_loss),
            format!("{:.4}", result.valid_loss),
            format!("{:.1} %", 100.0 * result.valid_accuracy),
            format!("{:.1} %", 100.0 * result.baseline_accuracy),
            format!("{:.1}", result.seconds),
            format!("{:.0}", result.samples_per_second),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
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
                "capacity_bytes": 0, "peak_bytes": 0, "resets": 0, "allocations": 0, "overflow_allocations": 0,
                "report": null,
            },
            "memory": { "predicted_peak_bytes": null, "peak_bytes": null },
            "capture": null,
            "weights_sha256": "",
        });
        assert_eq!(value, expected);
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["report.json"], "no temporary file stays");
    }

    #[test]
    fn table_has_one_row_per_epoch() {
        let epoch = EpochResult {
            fold: 1,
            epoch: 0,
            train_loss: 0.91,
            valid_loss: 1.0,
            valid_accuracy: 0.415,
            baseline_accuracy: 0.25,
            seconds: 12.34,
            samples_per_second: 81.4,
        };
        let text = epoch_table(&[epoch, EpochResult { train_loss: f64::NAN, ..epoch }]).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(cells(lines[2])[1..9], ["1", "0", "0.9100", "1.0000", "41.5 %", "25.0 %", "12.3", "81"]);
        assert_eq!(cells(lines[3])[3], "NaN");
    }
}
