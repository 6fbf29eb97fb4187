//! The two ways to run the steps of an update, and a queued update.

#![forbid(unsafe_code)]

use super::model::{StepMetrics, TrainState};
use std::ops::Range;
use stepscope_core::internals::PinnedReadback;
use stepscope_core::{Captured, Output};

/// The way in which the steps run.
pub(super) enum Stage<M, R> {
    /// The steps run eagerly, launch by launch.
    Eager(TrainState<M, R>),
    /// The steps run as one graph.
    Captured(Captured<TrainState<M, R>, StepMetrics<Output, Output>>),
}

impl<M, R> Stage<M, R> {
    pub(super) fn state(&self) -> &TrainState<M, R> {
        match self {
            Self::Eager(state) => state,
            Self::Captured(captured) => captured.state(),
        }
    }

    pub(super) fn state_mut(&mut self) -> &mut TrainState<M, R> {
        match self {
            Self::Eager(state) => state,
            Self::Captured(captured) => captured.state_mut(),
        }
    }
}

/// An update that is queued or done.
pub(super) struct Queued {
    pub(super) number: u64,
    pub(super) samples: usize,
    /// The parts of the batch that ran here, one step each.
    pub(super) parts: Range<usize>,
    /// The loss of a part, and its figures.
    pub(super) values: usize,
    /// True if it updates the weights.
    pub(super) updates: bool,
    pub(super) metrics: Results,
}

/// The loss and the figures of each step, followed by squared norms: of all gradients if the
/// weights are updated, and of the monitored gradient if there is one.
pub(super) enum Results {
    /// Metrics that are already on the host.
    Known(Vec<f32>),
    /// Metrics that arrive after the steps.
    Queued(PinnedReadback),
}
