//! Training: turns batches into updates, eagerly or captured, with checkpoints and a clean stop.
//!
//! A [`Trainer`] runs a [`TrainState`] through the arena's own steps and captures. The optimizer,
//! with any update rule, owns the schedule and the clipping. [`Checkpoint`] owns the files.
//!
//! Invariants:
//!
//! - The weights after an update depend only on the batches, not on how these were run, inspected
//!   or interrupted.
//! - While captured steps run, the next batch is staged before the trainer waits for the last one's
//!   loss. At most one batch is staged ahead.
//! - An update with a non-finite loss or gradient norm is an error, and is neither reported nor
//!   saved.

mod agreement;
mod batch;
mod fit;
mod forecast;
mod host_batch;
mod memory;
mod model;
#[cfg(feature = "progress")]
mod progress_bar;
mod run;
mod setup;
#[cfg(feature = "group")]
mod shards;
mod stage;
#[cfg(feature = "group")]
mod sums;
mod sync;

pub use batch::{EpochProgress, Update};
pub use fit::{Ended, Observer};
pub use host_batch::{HostArray, HostBatch, IntoBatch, Sample};
pub use memory::StepMemory;
pub use model::{MOST_FIGURES, Model, TrainState};
#[cfg(feature = "progress")]
pub use progress_bar::ProgressBar;
pub use setup::Trainer;
