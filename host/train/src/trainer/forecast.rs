//! Forecasts the most host memory that a run will take, after its first update.
//!
//! At that time everything that a trainer creates exists: weights, gradients, optimizer state,
//! arena, graphs, upload ring and prefetched batches. The remaining demand can be computed.
//!
//! Invariant: a run that does not fit fails before its second update, with all figures, instead of
//! being killed by the kernel halfway through.

#![forbid(unsafe_code)]

use super::setup::Trainer;
use crate::checkpoint::writing_bytes;
use crate::optim::UpdateRule;
use stepscope_core::internals::shortage_for;
use stepscope_core::{MemoryForecast, MemoryShortage, ProcessMemory, Result};

impl<M, R: UpdateRule> Trainer<'_, M, R> {
    /// Returns the reason why no update can begin. Either the host's available memory is below the
    /// arena's floor, or it will be before the run ends.
    pub(super) fn shortage(&mut self) -> Result<Option<MemoryShortage>> {
        if let Some(shortage) = self.arena.shortage() {
            return Ok(Some(shortage));
        }
        if self.updates_begun != 1 {
            return Ok(None);
        }
        self.forecast = self.forecast()?;
        let still_wanted = self.forecast.as_ref().map(MemoryForecast::still_wanted_bytes);
        Ok(still_wanted.and_then(|bytes| shortage_for(&self.arena, bytes)))
    }

    /// Returns the forecast, or none on systems that do not report the figures.
    fn forecast(&self) -> Result<Option<MemoryForecast>> {
        let Some((process, unbacked_bytes)) = ProcessMemory::read().zip(self.arena.device().unbacked_bytes()?) else {
            return Ok(None);
        };
        let spec = self.state().parameters.spec();
        let checkpoint_bytes = self.checkpoint.as_ref().map_or(0, |_| writing_bytes(spec));
        Ok(Some(MemoryForecast { process, unbacked_bytes, checkpoint_bytes }))
    }
}
