//! A side stream that runs concurrently with the main one, and the waits between them.
//!
//! Invariant: work queued on the side stream after a fork runs after the main stream's work at the
//! time of the fork. Work queued on the main stream after a join runs after all work queued on the
//! side stream. The GPU makes both waits, and no call here waits.

use super::staging_copy::{create_event, destroy};
use super::status::{check, is_idle};
use crate::error::Result;
use cust::stream::Stream;
use cust::sys::{self, CUevent, CUstream};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The stream, and the newest events of both directions.
pub(super) struct SideStream {
    stream: Stream,
    events: Mutex<Events>,
}

struct Events {
    /// The event that is recorded on the main stream.
    begun: CUevent,
    /// The event that is recorded on this stream.
    done: CUevent,
}

// SAFETY: these are plain handles within their context, and the mutex around them serializes calls
// on them.
unsafe impl Send for Events {}

impl SideStream {
    /// Creates the side stream. The context must be current.
    pub(super) fn new(stream: Stream) -> Result<Self> {
        let begun = create_event()?;
        let done = create_event().inspect_err(|_| destroy(begun))?;
        Ok(Self { stream, events: Mutex::new(Events { begun, done }) })
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stream, after making it wait for all work that `main` has so far.
    pub(super) fn fork(&self, main: CUstream) -> Result<CUstream> {
        let (events, stream) = (self.events(), self.stream.as_inner());
        // SAFETY: the event is alive as long as `self`, and both streams as long as the driver.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.begun, main))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(stream, events.begun, 0))?;
        }
        Ok(stream)
    }

    /// Makes `main` wait for all work that the stream has so far.
    pub(super) fn join(&self, main: CUstream) -> Result<()> {
        let events = self.events();
        // SAFETY: as for `fork`.
        unsafe {
            check("cuEventRecord", sys::cuEventRecord(events.done, self.stream.as_inner()))?;
            check("cuStreamWaitEvent", sys::cuStreamWaitEvent(main, events.done, 0))
        }
    }

    /// Returns true if all work queued on the stream is done. The context must be current.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as `self`, and its driver has made its context current.
        unsafe { is_idle(self.stream.as_inner()) }
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        destroy(events.begun);
        destroy(events.done);
    }
}
