//! The recordings of a captured step, one for each shape of its inputs.
//!
//! A recording takes a graph of the driver and, on a GPU, a second place for large inputs, so only
//! some are kept. A step whose inputs alternate between more shapes than that is recorded at nearly
//! every replay, which a warning reports once. Invariant: there is always a recording, and the one
//! that was used last stands last.

#![forbid(unsafe_code)]

use super::segments::Segments;
use super::slots::{Inputs, Key, Ports};
use super::state::{Event, State};
use crate::driver::Device;
use crate::error::Result;
use crate::memory::{Checks, Turns};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Recordings that a captured step keeps unless told otherwise.
const KEPT: usize = 32;
/// Shapes of evicted recordings that are remembered.
const MOST_GONE: usize = 256;
/// Shapes that a warning lists.
const LISTED: usize = 4;

/// One recording.
pub(super) struct RecordedStep<R> {
    pub(super) state: State,
    pub(super) ports: Ports,
    pub(super) result: R,
    /// Whose updates each replay makes.
    pub(super) turns: Vec<Arc<Turns>>,
    pub(super) checks: Option<Checks>,
    // Ends last: what waited for its pins is freed then.
    pub(super) segments: Segments,
}

impl<R> RecordedStep<R> {
    /// Queues it on these inputs, or on those that its slots still hold. Calls `between` after each
    /// segment with the number of announcements that are complete.
    pub(super) fn replay(
        &mut self,
        device: &Device,
        inputs: Option<&Inputs<'_>>,
        deadline: Duration,
        between: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        self.state = self.state.after(Event::Replay)?;
        inputs.map_or(Ok(()), |inputs| self.ports.check(inputs))?;
        Turns::take(&self.turns)?;
        let filled = inputs.map_or(Ok(()), |inputs| self.ports.fill(device, inputs, deadline));
        let queued = filled.and_then(|()| self.segments.replay(between));
        Turns::end(&self.turns, queued.is_ok());
        queued?;
        self.checks.as_ref().map_or(Ok(()), Checks::replayed)
    }
}

/// All recordings of a captured step.
pub(super) struct Recordings<R> {
    /// The one used last stands last.
    all: Vec<RecordedStep<R>>,
    kept: usize,
    made: u64,
    evicted: u64,
    /// The shapes of evicted recordings, each once, the latest last. None of them has a recording.
    gone: VecDeque<Key>,
    /// True once the warning was logged.
    warned: bool,
    /// The time that making them took.
    time: Duration,
}

impl<R> Recordings<R> {
    pub(super) fn new(first: RecordedStep<R>, time: Duration) -> Self {
        Self { all: vec![first], kept: KEPT, made: 1, evicted: 0, gone: VecDeque::new(), warned: false, time }
    }

    /// Keeps so many from now on, at least one.
    pub(super) fn keep(&mut self, kept: usize) {
        self.kept = kept.max(1);
        while self.all.len() > self.kept {
            self.evict();
        }
    }

    /// Recordings that are kept, made and evicted, and how long making them took.
    pub(super) fn report(&self) -> (usize, u64, u64, Duration) {
        (self.kept, self.made, self.evicted, self.time)
    }

    /// The one that was used last.
    pub(super) fn last(&self) -> &RecordedStep<R> {
        self.all.last().expect("there is always one")
    }

    /// The one that was used last.
    pub(super) fn last_mut(&mut self) -> &mut RecordedStep<R> {
        self.all.last_mut().expect("there is always one")
    }

    /// Puts the recording for these inputs last. Returns whether there is one.
    pub(super) fn find(&mut self, inputs: &Inputs<'_>) -> bool {
        let found = self.all.iter().position(|recording| recording.ports.fit(inputs));
        if let Some(found) = found {
            self.all[found..].rotate_left(1);
        }
        found.is_some()
    }

    /// Adds a recording, which took so long, and evicts those that are too many.
    pub(super) fn add(&mut self, recording: RecordedStep<R>, time: Duration) {
        let known = self.gone.iter().position(|gone| gone == recording.ports.key());
        let again = known.and_then(|place| self.gone.remove(place)).is_some();
        self.all.push(recording);
        self.made += 1;
        self.time += time;
        while self.all.len() > self.kept {
            self.evict();
        }
        if !self.warned && (again || self.evicted > self.kept as u64) {
            self.warned = true;
            self.warn();
        }
    }

    /// Evicts the recording that was unused for longest, unless it is the only one. Returns whether
    /// it did.
    pub(super) fn evict(&mut self) -> bool {
        if self.all.len() == 1 {
            return false;
        }
        self.gone.push_back(self.all.remove(0).ports.key().clone());
        self.evicted += 1;
        if self.gone.len() > MOST_GONE {
            self.gone.pop_front();
        }
        true
    }

    fn warn(&self) {
        let shapes: Vec<String> = self.gone.iter().rev().take(LISTED).map(Key::to_string).collect();
        tracing::warn!(
            recordings = self.made,
            kept = self.kept,
            evicted = self.evicted,
            shapes = self.all.len() + self.gone.len(),
            evicted_last = shapes.join(", "),
            record_seconds = self.time.as_secs_f64(),
            "a captured step is recorded again and again: its inputs have more shapes than recordings are kept; keep as many \
             (`Captured::keep`, `Trainer::recordings`), or pad the inputs to fewer shapes"
        );
    }
}
