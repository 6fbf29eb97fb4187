//! What a run leaves behind besides its weights: `report.json` and `loss.svg`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stepscope::{Result, replace_file};

use crate::shared::loss_svg::{Part, Picture};
use crate::shared::usage::{ArenaUse, CaptureUse, MemoryUse, ModelSize};

/// Numbers below the axis.
const NUMBERS: usize = 5;

/// The whole of `report.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// `emulated` or `cuda`.
    pub(crate) device: String,
    /// The PTX that its kernels were compiled from; none on the emulator.
    pub(crate) ptx: Option<String>,
    pub(crate) model: ModelSize,
    pub(crate) data: DataSize,
    /// Tokens of an update by the median of `seconds`; none where all updates were made before this
    /// process.
    pub(crate) tokens_per_second: Option<f64>,
    /// SHA-256 of the final weights (`Parameters::sha256`).
    pub(crate) weights_sha256: String,
    /// What the model wrote.
    pub(crate) sample: String,
    pub(crate) bytes: Bytes,
    pub(crate) arena: ArenaUse,
    /// Memory of the process; on the emulator the device's is in it.
    pub(crate) memory: MemoryUse,
    /// What captured steps did; none with `--eager`.
    pub(crate) capture: Option<CaptureUse>,
    #[serde(flatten)]
    pub(crate) position: Position,
    /// From the end of one update to the end of the next, of this process, without looks at the
    /// held-out text. Of the updates between two looks the first also waits until the next is
    /// queued, and the last has then been waited for: each has the mean of both.
    pub(crate) seconds: Vec<f64>,
}

/// What a run has done so far: what its checkpoint keeps of the report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The mean loss of each update, before it.
    pub(crate) losses: Vec<f64>,
    /// Looks at the held-out text.
    pub(crate) evaluations: Vec<Evaluation>,
}

/// A look at the held-out text.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Evaluation {
    /// Behind so many updates.
    pub(crate) update: u64,
    /// The mean loss of a token.
    pub(crate) loss: f64,
    /// Its exponential: among how many tokens the model is undecided.
    pub(crate) perplexity: f64,
}

/// The size of the data.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DataSize {
    /// Tokens to train on.
    pub(crate) tokens: usize,
    /// Tokens held out.
    pub(crate) held_out: usize,
    /// The digest of all of them.
    pub(crate) sha256: String,
}

/// Memory of the device, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Bytes {
    /// Weights, with their BF16 copy, gradients, and what AdamW keeps.
    pub(crate) weights: usize,
    /// What steps may fill, and what captured steps own.
    pub(crate) steps: usize,
}

impl Report {
    /// Writes `report.json` and `loss.svg` into `folder`, which must exist.
    ///
    /// # Errors
    /// When a file cannot be written; what stood in its place is then unchanged.
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
