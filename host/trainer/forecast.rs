//! How much of the host's memory a run will take at most, once its first update is made.
//!
//! By then all that a trainer makes is made: weights, gradients, the optimiser's state, the arena, the graphs, the ring of uploads, the
//! batches ahead. What is still to come is known. Invariant: a run that does not fit is told so before its second update, with all figures, and
//! not by the kernel in the middle of it.

#![forbid(unsafe_code)]

use super::model::Model;
use super::setup::Trainer;
use crate::checkpoint::writing_bytes;
use crate::error::Result;
use crate::optim::UpdateRule;
use crate::shortage::{MemoryForecast, MemoryShortage, ProcessMemory};

impl<M: Model, R: UpdateRule> Trainer<'_, M, R> {
    /// Why no update can begin: the host has less than the arena's floor, or will have before the run ends.
    pub(super) fn shortage(&mut self) -> Result<Option<MemoryShortage>> {
        if let Some(shortage) = self.arena.shortage() {
            return Ok(Some(shortage));
        }
        if self.updates_begun != 1 {
            return Ok(None);
        }
        self.forecast = self.forecast()?;
        let still_wanted = self.forecast.as_ref().map(MemoryForecast::still_wanted_bytes);
        Ok(still_wanted.and_then(|bytes| self.arena.floor().shortage_for(bytes)))
    }

    /// The forecast, where the system tells what it is made of.
    fn forecast(&self) -> Result<Option<MemoryForecast>> {
        let Some((process, unbacked_bytes)) = ProcessMemory::read().zip(self.arena.device().unbacked_bytes()?) else {
            return Ok(None);
        };
        let layout = self.learner().parameters.layout();
        let checkpoint_bytes = self.checkpoint.as_ref().map_or(0, |_| writing_bytes(layout));
        Ok(Some(MemoryForecast { process, unbacked_bytes, checkpoint_bytes }))
    }
}
