//! The report of a run: `report.json` and `loss.svg`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stepscope::{Result, replace_file};

use crate::program::loss_svg::{Part, Picture};
use crate::program::usage::{ArenaUse, CaptureUse, MemoryUse, ModelSize};

/// Labels below the axis.
const NUMBERS: usize = 5;

/// The contents of `report.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// `emulated` or `cuda`.
    pub(crate) device: String,
    /// The PTX that its kernels were compiled from; none on the emulator.
    pub(crate) ptx: Option<String>,
    pub(crate) model: ModelSize,
    pub(crate) data: DataSize,
    /// Tokens per update divided by the median of `seconds`; none if this process made no update.
    pub(crate) tokens_per_second: Option<f64>,
    /// SHA-256 of the final weights (`Parameters::sha256`).
    pub(crate) weights_sha256: String,
    /// The generated text.
    pub(crate) sample: String,
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
    /// Evaluations on the held-out text.
    pub(crate) evaluations: Vec<Evaluation>,
}

/// An evaluation on the held-out text.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    /// Updates made before it.
    pub(crate) update: u64,
    /// The mean loss per token.
    pub(crate) loss: f64,
    /// The exponential of the loss: the number of equally likely tokens with the same uncertainty.
    pub(crate) perplexity: f64,
}

/// The size of the data.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DataSize {
    /// Tokens to train on.
    pub(crate) tokens: usize,
    /// Tokens held out.
    pub(crate) held_out: usize,
    /// The digest of all tokens.
    pub(crate) sha256: String,
}

/// Device memory in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Bytes {
    /// Weights, their BF16 copy, gradients, and AdamW's state.
    pub(crate) weights: usize,
    /// The step arena and the memory of captured steps.
    pub(crate) steps: usize,
}

impl Report {
    /// Writes `report.json` and `loss.svg` into `folder`, which must exist.
    ///
    /// # Errors
    /// When a file cannot be written. The previous file is then unchanged.
    pub(crate) fn write(&self, folder: &Path, vocabulary: usize) -> Result<()> {
        let mut json = serde_json::to_string_pretty(self).expect("plain numbers and lists have a JSON form");
        json.push('\n');
        replace_file(folder.join("loss.svg"), self.position.picture(vocabulary).draw().as_bytes())?;
        replace_file(folder.join("report.json"), json.as_bytes())
    }
}

impl Position {
    fn picture(&self, vocabulary: usize) -> Picture {
        let updates = self.losses.len();
        let step = updates.div_ceil(NUMBERS).max(1);
        let part = Part {
            name: String::new(),
            range: 0.0..updates as f64 + 1.0,
            ticks: (0..=updates).step_by(step).map(|update| (update as f64, update.to_string())).collect(),
            curves: [
                (1u32..).map(f64::from).zip(self.losses.iter().copied()).collect(),
                self.evaluations.iter().map(|look| (look.update as f64, look.loss)).collect(),
            ],
        };
        Picture { caption: "Loss by update", x_label: "update", classes: vocabulary, parts: vec![part] }
    }
}
