//! A full arena: takes the tensor from the overflow pool, or returns an error with the cause and
//! advice.
//!
//! Invariant: a refused request changes only the counts. The cause describes the step as it is now.

#![forbid(unsafe_code)]

use super::layout::padded;
use super::overflow::NotGiven;
use super::region::ArenaInner;
use crate::error::{Error, Result};
use crate::report::{Cause, size};
use std::panic::Location;
use std::time::Instant;

impl ArenaInner {
    /// Takes memory from the pool when the arena is full, or returns an error with the cause.
    #[cold]
    pub(super) fn take_beyond(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        let padded = padded(bytes).unwrap_or(usize::MAX);
        self.device.check("allocate")?;
        let capacity = self.capacity.get();
        let cause = self.counters.borrow().cause(padded, capacity);
        let needed = self.bump.get().taken().saturating_add(self.overflowed.get()).saturating_add(padded);
        self.needed.set(self.needed.get().max(needed));
        if self.is_lent() {
            return Err(Error::CaptureNeeds { bytes: needed, available: capacity, overflow_bytes: 0 });
        }
        let Some(overflow) = &self.overflow else { return Err(self.full(padded, cause, site, None)) };
        let mut overflow = overflow.borrow_mut();
        if !self.warned.replace(true) {
            tracing::warn!(
                %cause,
                requested_bytes = padded,
                %site,
                capacity_bytes = capacity,
                advice = advice(cause, capacity, padded),
                "the arena is full: this step overflows into its pool"
            );
        }
        let start = Instant::now();
        let deadline = overflow.deadline.min(self.time_left());
        let given = overflow.take(&self.device, padded, deadline);
        let used = overflow.used_bytes();
        let cap_bytes = overflow.cap_bytes;
        drop(overflow);
        let mut counters = self.counters.borrow_mut();
        counters.waited += start.elapsed();
        match given {
            Ok(address) => {
                counters.allocated(site, padded);
                counters.overflow.allocations += 1;
                counters.overflow.bytes += padded as u64;
                counters.overflow.peak_bytes = counters.overflow.peak_bytes.max(used as u64);
                counters.overflow.live_blocks += 1;
                self.overflowed.set(used);
                self.peak.step_has(self.bump.get().taken() + used);
                Ok(address)
            }
            Err(NotGiven::Cap) => {
                counters.overflow.refusals += 1;
                drop(counters);
                Err(self.full(
                    padded,
                    cause,
                    site,
                    Some(format!("the overflow pool's cap is {cap_bytes} bytes, {used} of them in use")),
                ))
            }
            Err(NotGiven::Refused(refusal)) => {
                counters.overflow.refusals += 1;
                drop(counters);
                Err(self.full(padded, cause, site, Some(refusal.to_string())))
            }
            Err(NotGiven::Driver(error)) => {
                counters.overflow.timeouts += u64::from(matches!(error, Error::Timeout { .. }));
                drop(counters);
                Err(self.with_report(error))
            }
        }
    }

    fn full(
        &self,
        requested_bytes: usize,
        cause: Cause,
        site: &'static Location<'static>,
        overflow: Option<String>,
    ) -> Error {
        let report = self.report();
        Error::ArenaFull {
            requested_bytes,
            used_bytes: report.offset_bytes,
            capacity_bytes: self.capacity.get(),
            allocations: self.counters.borrow().step_allocations,
            site: site.to_string(),
            cause,
            advice: overflow.map_or_else(
                || advice(cause, self.capacity.get(), requested_bytes),
                |overflow| format!("{overflow}; {}", advice(cause, self.capacity.get(), requested_bytes)),
            ),
            report: Box::new(report),
        }
    }
}

/// Returns advice for a full arena of this capacity.
fn advice(cause: Cause, capacity: usize, requested: usize) -> String {
    match cause {
        Cause::RequestLargerThanArena => format!(
            "raise the capacity above {} (now {}), or split the tensor",
            size(requested),
            size(capacity)
        ),
        Cause::NeverReset { .. } => {
            "end the step after each backward pass (one `arena.step` for each micro-batch): the step's end frees its memory".into()
        }
        Cause::WorkingSetLargerThanArena => format!(
            "size the arena from `Arena::measure` or let it grow (`Growth::AtBoundary`), shorten the step (a smaller \
             micro-batch), or free temporaries early with `step.scratch`; the capacity is {}",
            size(capacity)
        ),
    }
}
