//! How the steps of an update run, and how what they told comes back.

use super::Trainer;
use super::batch::{Part, Samples, Update};
use super::model::{Learner, Model, Told};
use crate::capture::{Captured, Output};
use crate::driver::Landing;
use crate::error::{Error, Result};

/// How the learner's steps run.
pub(super) enum Stage<M> {
    /// Launch by launch.
    Eager(Learner<M>),
    /// As one graph.
    Captured(Captured<Learner<M>, Told<Output, Output>>),
}

impl<M> Stage<M> {
    pub(super) fn learner(&self) -> &Learner<M> {
        match self {
            Self::Eager(learner) => learner,
            Self::Captured(captured) => captured.state(),
        }
    }

    pub(super) fn learner_mut(&mut self) -> &mut Learner<M> {
        match self {
            Self::Eager(learner) => learner,
            Self::Captured(captured) => captured.state_mut(),
        }
    }
}

/// An update that is queued or done.
pub(super) struct Queued {
    number: u64,
    samples: usize,
    /// Steps that it was made in.
    parts: usize,
    told: Results,
}

/// The loss of each step and, if a norm is watched, its square behind them.
enum Results {
    /// They are here.
    Known(Vec<f32>),
    /// They will be, behind the steps.
    Landing(Landing),
}

impl<M: Model> Trainer<'_, M> {
    /// Queues an update, or makes it where steps run launch by launch.
    #[track_caller]
    pub(super) fn queue<S: Samples>(&mut self, batch: &[S]) -> Result<Queued> {
        if matches!(self.stage, Stage::Eager(_)) {
            return self.queue_eager(batch, true);
        }
        let parts = self.advance(batch, true)?;
        let Stage::Captured(captured) = &mut self.stage else { unreachable!("looked at above") };
        let words = batch.len() + 1;
        let free = self.landings.pop().filter(|landing| landing.words() >= words);
        let mut landing = match free {
            Some(landing) => landing,
            None => Landing::new(self.arena.device(), words)?,
        };
        landing.clear();
        for (part, samples) in parts.iter().zip(batch) {
            let replay = captured.replay(&samples.inputs()?.variant(part.variant()))?;
            let Told { loss, watched } = replay.outputs();
            replay.land(*loss, &mut landing)?;
            watched.map_or(Ok(()), |watched| replay.land(watched, &mut landing))?;
        }
        landing.seal()?;
        Ok(self.queued(&parts, Results::Landing(landing)))
    }

    /// Makes an update, or all of it but the optimiser's part, launch by launch.
    #[track_caller]
    pub(super) fn queue_eager<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<Queued> {
        let parts = self.advance(batch, update)?;
        let learner = self.stage.learner_mut();
        let mut known = Vec::new();
        for (part, samples) in parts.iter().zip(batch) {
            let told = self.arena.step(|step| {
                let batch = step.upload_inputs(&samples.inputs()?)?;
                let Told { loss, watched } = learner.learn(step, &batch, *part)?;
                let watched = watched.map(|watched| step.read_scalar(&watched)).transpose()?;
                Ok([Some(step.read_scalar(&loss)?), watched])
            })?;
            known.extend(told.into_iter().flatten());
        }
        Ok(self.queued(&parts, Results::Known(known)))
    }

    /// Waits for what an update told.
    pub(super) fn settle(&mut self, queued: Queued) -> Result<Update> {
        let Queued { number, samples, parts, told } = queued;
        let told = match told {
            Results::Known(told) => told,
            Results::Landing(landing) => {
                let told = landing.wait(self.arena.deadline())?;
                self.landings.push(landing);
                told
            }
        };
        let (losses, watched) = told.split_at(parts);
        let loss = losses.iter().map(|&loss| f64::from(loss)).sum();
        let watched_l2 = watched.first().map(|&squared| f64::from(squared).sqrt());
        Ok(Update { number, samples, loss, watched_l2 })
    }

    /// The parts of a batch, once the optimiser is set up for its update.
    fn advance<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<Vec<Part>> {
        let samples = batch.iter().map(Samples::len).sum();
        if batch.iter().any(Samples::is_empty) || samples == 0 {
            return Err(Error::misuse(
                "update",
                "samples in each part of a batch",
                format!("{samples} in {}", batch.len()),
            ));
        }
        self.stage.learner_mut().optimizer.advance()?;
        let part = |number| {
            let last = number + 1 == batch.len();
            Part { samples, first: number == 0, last, update: last && update }
        };
        Ok((0..batch.len()).map(part).collect())
    }

    fn queued(&self, parts: &[Part], told: Results) -> Queued {
        let number = self.learner().optimizer.updates();
        Queued { number, samples: parts[0].samples, parts: parts.len(), told }
    }
}
