//! The part of an update that the GPUs of a group do together.
//!
//! Invariant: a train state has exactly one [`GradientSync`]. `()` is a single GPU: it owns every
//! part of a batch, exchanges nothing and waits for nobody.

#![forbid(unsafe_code)]

use super::agreement::WeightSettings;
use crate::checkpoint::Checkpoint;
use crate::optim::{Optimizer, State, UpdateRule, UpdateTicket};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use stepscope_core::{Arena, EagerStep, Error, Gradients, MemoryShortage, Parameter, Parameters, Result, Tensor};

/// The line of the program from which all ranks are expected to call.
pub(super) type CallSite = &'static Location<'static>;

/// Consumes a metric of an update: reads it, or queues its copy to the readback.
pub(super) type Metric<'m> = dyn for<'s> FnMut(&EagerStep<'s>, &Tensor<'s>) -> Result<()> + 'm;

/// The reasons for which no update begins, or none after the next one.
#[derive(Debug)]
pub(super) struct Ending {
    /// True if the stop flag is set.
    #[cfg_attr(not(feature = "group"), expect(dead_code, reason = "one GPU stops between updates"))]
    pub(super) stop: bool,
    pub(super) short: Option<MemoryShortage>,
}

/// The parts of a batch that run on this rank.
#[derive(Debug)]
pub(super) struct OwnParts {
    /// One range of parts for each of this rank's shards, in the order of the batch.
    pub(super) shards: Vec<Range<usize>>,
    /// True if all ranks stop after the update.
    pub(super) stop: bool,
}

/// The parts of a train state that an update changes.
pub(super) struct Updated<'u, R> {
    pub(super) parameters: &'u mut Parameters,
    pub(super) gradients: &'u mut Gradients,
    pub(super) optimizer: &'u mut Optimizer<R>,
}

/// The ranks that train one model. The default functions are those of a single GPU.
pub(super) trait GradientSync<R>: fmt::Debug + Send + Sync {
    /// Returns true in a group. There, no step updates the weights, and the gradients of each shard
    /// start from zero.
    fn is_group(&self) -> bool {
        false
    }

    /// Returns the number of ranks.
    fn ranks(&self) -> usize {
        1
    }

    /// Compares everything that decides the weights on all ranks, unless that was done before.
    /// `settings` computes it for a number of shards.
    fn agree_on_settings(
        &self,
        _parameters: &Parameters,
        _optimizer: &Optimizer<R>,
        _settings: &dyn Fn(usize) -> Result<WeightSettings>,
        _site: CallSite,
    ) -> Result<()> {
        Ok(())
    }

    /// Agrees on the next update, by a batch with parts of these lengths, and returns the parts
    /// that run here.
    fn own_parts(
        &mut self,
        optimizer: &Optimizer<R>,
        lens: &[usize],
        ending: Ending,
        site: CallSite,
    ) -> Result<OwnParts>;

    /// Returns the buckets of gradients in the order in which they travel.
    fn buckets(&self) -> &[Range<usize>] {
        &[]
    }

    /// Receives the number of buckets whose gradients are complete, during the last step of the
    /// last shard.
    fn buckets_ready(&mut self, _arena: &mut Arena, _gradients: &mut Gradients, _complete: usize) -> Result<()> {
        Ok(())
    }

    /// Receives the complete gradients of the shard of this number, or of a shard that is empty.
    fn shard_ready(
        &mut self,
        _arena: &mut Arena,
        _gradients: &mut Gradients,
        _number: usize,
        _is_empty: bool,
    ) -> Result<()> {
        Ok(())
    }

    /// Sums the gradients of all shards. Every rank receives the sums of the `wanted` elements in
    /// addition to its own slices.
    fn finish(&mut self, _arena: &mut Arena, _gradients: &mut Gradients, _wanted: Option<Range<usize>>) -> Result<()> {
        Ok(())
    }

    /// Makes the update of `ticket` after all steps of a batch. `metric` receives the squared norm
    /// of all gradients, and then that of the monitored parameter if there is one.
    fn update(
        &self,
        arena: &mut Arena,
        ticket: UpdateTicket,
        of: Updated<'_, R>,
        monitored: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()>;

    /// Returns the losses of all parts of a batch, in its order. `norms` must have the same bits on
    /// all ranks.
    fn losses(&self, own: &[f32], _norms: &[f32], _site: CallSite) -> Result<Vec<f32>> {
        Ok(own.to_vec())
    }

    /// Sends an error of this rank to all ranks, which end with it. Returns the error to report: a
    /// fault of another rank came first.
    fn on_error(&self, error: Error) -> Error {
        error
    }

    /// Calls `write` with the optimizer's whole state, on one rank.
    fn save(
        &self,
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        write: &dyn Fn(&[State]) -> Result<()>,
        site: CallSite,
    ) -> Result<()>;

    /// Checks that all ranks restore the same checkpoint.
    fn restore(&mut self, _checkpoint: &Checkpoint, _site: CallSite) -> Result<()> {
        Ok(())
    }
}

impl<R: UpdateRule> GradientSync<R> for () {
    fn own_parts(&mut self, _: &Optimizer<R>, lens: &[usize], ending: Ending, _: CallSite) -> Result<OwnParts> {
        match ending.short {
            Some(shortage) => Err(Error::MemoryShortage(Box::new(shortage))),
            None => Ok(OwnParts { shards: std::iter::once(0..lens.len()).collect(), stop: false }),
        }
    }

    fn update(
        &self,
        arena: &mut Arena,
        ticket: UpdateTicket,
        Updated { parameters, gradients, optimizer }: Updated<'_, R>,
        _: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()> {
        arena.step(|step| {
            let norm = optimizer.apply_with_norm(ticket, step, parameters, gradients)?;
            metric(step, &norm)
        })
    }

    fn save(
        &self,
        _: &Parameters,
        optimizer: &Optimizer<R>,
        write: &dyn Fn(&[State]) -> Result<()>,
        _: CallSite,
    ) -> Result<()> {
        write(optimizer.whole_state()?)
    }
}
