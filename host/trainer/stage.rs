//! What runs an update's steps, and an update that is queued.

#![forbid(unsafe_code)]

use super::model::{Learner, StepMetrics};
use crate::capture::{Captured, Output};
use crate::driver::Landing;
use std::ops::Range;

/// How the learner's steps run.
pub(super) enum Stage<M, R> {
    /// Launch by launch.
    Eager(Learner<M, R>),
    /// As one graph.
    Captured(Captured<Learner<M, R>, StepMetrics<Output, Output>>),
}

impl<M, R> Stage<M, R> {
    pub(super) fn learner(&self) -> &Learner<M, R> {
        match self {
            Self::Eager(learner) => learner,
            Self::Captured(captured) => captured.state(),
        }
    }

    pub(super) fn learner_mut(&mut self) -> &mut Learner<M, R> {
        match self {
            Self::Eager(learner) => learner,
            Self::Captured(captured) => captured.state_mut(),
        }
    }
}

/// An update that is queued or done.
pub(super) struct Queued {
    pub(super) number: u64,
    pub(super) samples: usize,
    /// The parts of the batch that ran here, each a step.
    pub(super) parts: Range<usize>,
    /// Whether it updates the weights.
    pub(super) updates: bool,
    pub(super) metrics: Results,
}

/// The loss of each step; behind them, squared, the gradients' norm if the weights are updated, and the watched one's if there is one.
pub(super) enum Results {
    /// They are here.
    Known(Vec<f32>),
    /// They will be, behind the steps.
    Landing(Landing),
}
