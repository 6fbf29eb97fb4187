//! Batches: on the host, in parts that are a step each, and the metrics of an update.

use crate::capture::Inputs;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result, short};
use cuda_std::float_mode;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The checkpoint's note with [`EpochProgress`].
pub(super) const PROGRESS: &str = "stepscope.epoch";

/// The checkpoint's note with the seed of [`Learner::with_dropout`](super::Learner::with_dropout).
pub(super) const DROPOUT_SEED: &str = "stepscope.dropout_seed";

/// The seed in a checkpoint.
pub(super) fn dropout_seed(checkpoint: &Checkpoint) -> Result<u64> {
    let note = checkpoint.note(DROPOUT_SEED)?;
    note.parse().map_err(|_| {
        Error::misuse("restore", format!("a number as the note `{DROPOUT_SEED}`"), format!("`{}`", short(note)))
    })
}

/// Samples on the host: a batch, or a part of one.
pub trait Samples {
    /// Their number, above zero.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their values, in the order in which the model asks for them.
    ///
    /// # Errors
    /// [`Error::Misuse`] when a shape has another number of elements than there are values.
    fn inputs(&self) -> Result<Inputs<'_>>;
}

/// A micro-batch's place in its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MicroBatch {
    /// Samples of the whole batch, by which the loss is divided.
    pub(super) samples: usize,
    /// The gradients start from zero.
    pub(super) first: bool,
    /// The gradients are complete.
    pub(super) last: bool,
    /// The weights are updated at the end.
    pub(super) update: bool,
}

impl MicroBatch {
    /// The most samples of a batch that a variant can name.
    pub(super) const MOST: usize = usize::MAX >> 3;

    /// All that decides what is recorded besides the shapes.
    pub(super) fn variant(self) -> u64 {
        (self.samples as u64) << 3 | u64::from(self.first) << 2 | u64::from(self.last) << 1 | u64::from(self.update)
    }

    pub(super) fn of(variant: u64) -> Self {
        let bit = |place: u32| (variant >> place) & 1 == 1;
        Self { samples: (variant >> 3) as usize, first: bit(2), last: bit(1), update: bit(0) }
    }
}

/// The metrics of one update of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Counted from 1 over the optimiser's life.
    pub number: u64,
    /// Samples of the batch.
    pub samples: usize,
    /// The mean loss of the batch, before the update.
    pub loss: f64,
    /// The L2 norm of the watched parameter's gradient, before clipping.
    pub watched_l2: Option<f64>,
}

/// How far an epoch is: what a checkpoint keeps of it, so that training goes on behind it.
///
/// As text: updates, samples, and the bits of the sum of losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EpochProgress {
    /// Updates made, one a batch.
    pub updates: u64,
    /// Samples of these batches.
    pub samples: u64,
    /// The sum of their losses, each as it was trained on.
    pub loss_sum: f64,
}

impl EpochProgress {
    /// What a trainer's checkpoint keeps.
    ///
    /// # Errors
    /// [`Error::File`] when the checkpoint is not a trainer's.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.note(PROGRESS)?.parse()
    }

    /// The mean loss of the samples so far.
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
            // Each update has a sample, and counting on from there cannot overflow.
            let sound = words.next().is_none() && updates <= samples && samples <= u64::MAX >> 1;
            sound.then_some(Self { updates, samples, loss_sum })
        };
        parse().ok_or_else(|| {
            Error::misuse("progress", "updates, samples and the bits of a sum", format!("`{}`", short(text)))
        })
    }
}

/// The first input of these parts of a batch that is not finite.
pub(super) fn first_input<S: Samples>(batch: &[S], parts: Range<usize>) -> Result<Option<String>> {
    for at in parts {
        if let Some((input, row)) = batch[at].inputs()?.first_not_finite() {
            return Ok(Some(format!("input {input} of the batch, sample {}", place(&batch[..at], row))));
        }
    }
    Ok(None)
}

/// A sample's place in the whole batch.
pub(super) fn place<S: Samples>(before: &[S], sample: usize) -> usize {
    before.iter().fold(sample, |place, part| place.saturating_add(part.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        progress.add(&Update { number: 9, samples: 3, loss: 0.1, watched_l2: None });
        progress.add(&Update { number: 10, samples: 2, loss: f64::NAN, watched_l2: None });
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
