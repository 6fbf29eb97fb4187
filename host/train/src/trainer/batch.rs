//! The parts of a batch, which are one step each, and the metrics of an update.

use super::host_batch::HostBatch;
use crate::checkpoint::Checkpoint;
use cuda_std::float_mode;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use stepscope_core::internals::short;
use stepscope_core::{Error, Result};

/// The name of the checkpoint note that stores [`EpochProgress`].
pub(super) const PROGRESS: &str = "stepscope.epoch";

/// The name of the checkpoint note that stores the seed of
/// [`TrainState::with_dropout`](super::TrainState::with_dropout).
pub(super) const DROPOUT_SEED: &str = "stepscope.dropout_seed";

/// Returns the dropout seed of a checkpoint.
pub(super) fn dropout_seed(checkpoint: &Checkpoint) -> Result<u64> {
    let note = checkpoint.note(DROPOUT_SEED)?;
    note.parse().map_err(|_| {
        Error::misuse("restore", format!("a number in the note `{DROPOUT_SEED}`"), format!("`{}`", short(note)))
    })
}

/// The name of the checkpoint note that stores ten times the compute capability of the run, if that
/// decides bits.
pub(super) const CAPABILITY: &str = "stepscope.compute_capability";

/// Logs a warning if the run that wrote the checkpoint had another compute capability than `ours`.
/// The sums of the continued run may then differ from those of the first run in their last bits.
pub(super) fn compare_capabilities(checkpoint: &Checkpoint, ours: Option<u32>) {
    if let Some((theirs, ours)) = different(checkpoint.note(CAPABILITY).ok(), ours) {
        tracing::warn!(%theirs, %ours, "the checkpoint was made on another compute capability; its sums may round differently");
    }
}

/// Returns both capabilities if they decide bits in both runs, and differ.
fn different(theirs: Option<&str>, ours: Option<u32>) -> Option<(String, u32)> {
    let (theirs, ours) = (theirs?, ours?);
    (theirs != ours.to_string()).then(|| (short(theirs).to_string(), ours))
}

/// The place of a micro-batch in its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MicroBatch {
    /// The number of samples.
    pub(super) samples: usize,
    /// The number of samples of the whole batch.
    pub(super) batch: usize,
    /// True if the gradients start from zero.
    pub(super) first: bool,
    /// True if the gradients are complete after this micro-batch.
    pub(super) last: bool,
    /// True if the weights are updated at the end.
    pub(super) update: bool,
}

impl MicroBatch {
    /// The largest batch that a variant can encode, in samples.
    pub(super) const MOST: usize = (1 << 30) - 1;

    /// Encodes everything except the shapes that decides what is recorded. Core keys its recordings
    /// by a number, because it does not know the types of the step's owner.
    pub(super) fn variant(self) -> u64 {
        let Self { samples, batch, first, last, update } = self;
        let flags = u64::from(first) << 2 | u64::from(last) << 1 | u64::from(update);
        (batch as u64) << 33 | (samples as u64) << 3 | flags
    }

    /// Decodes a variant.
    pub(super) fn of(variant: u64) -> Self {
        let bit = |place: u32| (variant >> place) & 1 == 1;
        let [samples, batch] = [3, 33].map(|place| (variant >> place) as usize & Self::MOST);
        Self { samples, batch, first: bit(2), last: bit(1), update: bit(0) }
    }
}

/// The metrics of one update of the weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Update {
    /// The number of the update, counted from 1 over the optimizer's life.
    pub number: u64,
    /// The number of samples in the batch.
    pub samples: usize,
    /// The mean loss of the batch, before the update.
    pub loss: f64,
    /// The means of the figures of
    /// [`Model::training_loss_with_figures`](super::Model::training_loss_with_figures).
    pub figures: Vec<f64>,
    /// The L2 norm of all gradients, before clipping. None if the weights were not updated.
    pub gradient_l2: Option<f64>,
    /// The L2 norm of the monitored parameter's gradient, before clipping.
    pub monitored_l2: Option<f64>,
}

/// The progress of an epoch, which a checkpoint stores so that training can resume.
///
/// Its text form contains the updates, the samples, and the bits of the sum of losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EpochProgress {
    /// The number of updates so far, one per batch.
    pub updates: u64,
    /// The number of samples in these batches.
    pub samples: u64,
    /// The sum of the samples' losses, each as computed when its batch was trained on.
    pub loss_sum: f64,
}

impl EpochProgress {
    /// Reads the progress from a trainer's checkpoint.
    ///
    /// # Errors
    /// [`Error::File`] if no trainer wrote the checkpoint.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.note(PROGRESS)?.parse()
    }

    /// Returns the mean loss of the samples so far.
    pub fn mean_loss(&self) -> f64 {
        float_mode::in_default(|| self.loss_sum / self.samples as f64)
    }

    /// Counts an update.
    pub fn add(&mut self, update: &Update) {
        self.updates += 1;
        self.samples += update.samples as u64;
        float_mode::in_default(|| self.loss_sum += update.loss * update.samples as f64);
    }
}

impl fmt::Display for EpochProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:016x}", self.updates, self.samples, self.loss_sum.to_bits())
    }
}

impl FromStr for EpochProgress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let mut words = text.split(' ');
            let (updates, samples, bits) = (words.next()?, words.next()?, words.next()?);
            let loss_sum = f64::from_bits(u64::from_str_radix(bits, 16).ok()?);
            let (updates, samples) = (updates.parse().ok()?, samples.parse().ok()?);
            // Each update has at least one sample, and further counting cannot overflow.
            let sound = words.next().is_none() && updates <= samples && samples <= u64::MAX >> 1;
            sound.then_some(Self { updates, samples, loss_sum })
        };
        parse().ok_or_else(|| {
            Error::misuse("progress", "updates, samples and the bits of a sum", format!("`{}`", short(text)))
        })
    }
}

/// Returns the first non-finite input of these parts of a batch.
pub(super) fn first_input<B: HostBatch>(batch: &[B], parts: Range<usize>) -> Result<Option<String>> {
    for at in parts {
        let inputs = batch[at].inputs()?;
        if let Some((input, row)) = inputs.first_not_finite() {
            let named = inputs.name(input).map_or_else(|| input.to_string(), |name| format!("`{name}`"));
            return Ok(Some(format!("input {named} of the batch, sample {}", place(&batch[..at], row))));
        }
    }
    Ok(None)
}

/// Returns a sample's index in the whole batch.
pub(super) fn place<B: HostBatch>(before: &[B], sample: usize) -> usize {
    before.iter().fold(sample, |place, part| place.saturating_add(part.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_capability_is_noticed() {
        assert_eq!(different(Some("90"), Some(121)), Some(("90".into(), 121)));
        for (theirs, ours) in [(Some("90"), Some(90)), (Some("90"), None), (None, Some(90)), (None, None)] {
            assert_eq!(different(theirs, ours), None);
        }
    }

    #[test]
    fn a_part_is_its_variant() {
        for bits in 0..8 {
            let part = MicroBatch::of(300 << 3 | bits);
            assert_eq!((part.samples, part.variant()), (300, 300 << 3 | bits));
        }
        assert!(MicroBatch::of(0b100).first && MicroBatch::of(0b010).last && MicroBatch::of(0b001).update);
    }

    #[test]
    fn progress_survives_as_text() {
        let mut progress = EpochProgress::default();
        progress.add(&Update { number: 9, samples: 3, loss: 0.1, ..Update::default() });
        progress.add(&Update { number: 10, samples: 2, loss: f64::NAN, ..Update::default() });
        let back: EpochProgress = progress.to_string().parse().unwrap();
        assert_eq!((back.updates, back.samples, back.loss_sum.to_bits()), (2, 5, progress.loss_sum.to_bits()));
        let most = u64::MAX;
        for wrong in
            ["", "1 2", "1 2 3 4", "1 -2 3", "1 2 x", "2 1 0", &format!("1 {most} 0"), &format!("{most} {most} 0")]
        {
            assert!(wrong.parse::<EpochProgress>().unwrap_err().to_string().contains(&format!("`{wrong}`")), "{wrong}");
        }
    }
}
