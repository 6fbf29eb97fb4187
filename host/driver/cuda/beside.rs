//! A stream beside the main one, and how they wait for each other.
//!
//! Invariant: what is queued on it runs behind what the main stream had when it was asked for; what the main stream gets behind a join runs
//! behind all that is queued on it. Both waits are the GPU's; no call here waits.

use super::status::{check, is_idle};
use super::transit::{create_event, destroy};
use crate::error::Result;
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUstream};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The stream, and the newest events of both directions.
pub(super) struct Beside {
    stream: Stream,
    events: Mutex<Events>,
}

struct Events {
    /// Recorded on the main stream.
    begun: CUevent,
    /// Recorded on this one.
    done: CUevent,
}

// SAFETY: plain names within their context; calls on them are serialised by the mutex around them.
unsafe impl Send for Events {}

impl Beside {
    /// The context is current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let begun = create_event()?;
        let done = create_event().inspect_err(|_| destroy(begun))?;
        Ok(Self { stream, events: Mutex::new(Events { begun, done }) })
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream, which waits for all that `main` has so far.
    pub(super) fn fork(&self, main: CUstream) -> Result<CUstream> {
        let (events, stream) = (self.events(), self.stream.as_inner());
        // SAFETY: the event is alive as long as `self`, and both streams as long as the driver.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.begun, main))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(stream, events.begun, 0))?;
        }
        Ok(stream)
    }

    /// Makes `main` wait for all that the stream has so far.
    pub(super) fn join(&self, main: CUstream) -> Result<()> {
        let events = self.events();
        // SAFETY: as for `fork`.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.done, self.stream.as_inner()))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(main, events.done, 0))
        }
    }

    /// Whether all that was queued on the stream is done. The context is current.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as `self`, whose driver has entered its context.
        unsafe { is_idle(self.stream.as_inner()) }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.begun);
        destroy(events.done);
    }
}
