//! Training: batches to updates, eagerly or captured, with checkpoints and an end that leaves one.
//!
//! A [`Trainer`] runs [`Learner`]s through the arena's own steps and captures; the optimiser, of any rule, has the schedule and the clipping,
//! [`Checkpoint`] the files. Invariants: the weights after an update depend on the batches alone, not on how they were run, looked
//! at or interrupted; while captured steps run, the next batch is staged before the last one's loss is waited for, and never more
//! than one ahead; an update whose loss or gradients are not finite is an error, and neither reported nor saved.

#![forbid(unsafe_code)]

mod agreement;
mod batch;
mod epoch;
mod forecast;
mod model;
#[cfg(feature = "progress")]
mod progress_bar;
mod run;
mod setup;
mod shards;
mod stage;

pub use batch::{EpochProgress, Samples, Update};
pub use epoch::{Ended, Observer};
pub use model::{Learner, Model};
#[cfg(feature = "progress")]
pub use progress_bar::ProgressBar;
pub use setup::Trainer;
pub use shards::Shards;
