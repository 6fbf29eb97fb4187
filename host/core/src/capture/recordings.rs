//! The recordings of a captured step, one for each combination of its inputs' shapes.
//!
//! A recording holds a driver graph and, on a GPU, a second buffer for each large input, so only a
//! limited number is kept. A step whose inputs alternate between more shapes than that is recorded
//! again at nearly every replay, and a warning reports this once.
//!
//! Invariant: there is always at least one recording, and the most recently used one is last.

#![forbid(unsafe_code)]

use super::segments::Segments;
use super::slots::{HostInputs, Key, Ports};
use super::state::{Event, State};
use crate::arena::Checks;
use crate::device::Device;
use crate::error::Result;
use crate::preconditions::{ReplayPrecondition, end_all, take_all};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// The default number of recordings that a captured step keeps.
const KEPT: usize = 32;
/// The number of evicted recordings whose shapes are remembered.
const MOST_EVICTED_KEYS: usize = 256;
/// The number of shapes that a warning lists.
const LISTED: usize = 4;

/// One recording.
pub(super) struct RecordedStep<R> {
    pub(super) state: State,
    pub(super) ports: Ports,
    pub(super) result: R,
    /// The preconditions that each replay takes.
    pub(super) conditions: Vec<Arc<dyn ReplayPrecondition>>,
    pub(super) checks: Option<Checks>,
    // Dropped last: memory that waited for its pins is freed then.
    pub(super) segments: Segments,
}

impl<R> RecordedStep<R> {
    /// Queues the recording on these inputs, or on the inputs that its slots still hold. Calls
    /// `between` after each segment with the number of announcements that are complete.
    pub(super) fn replay(
        &mut self,
        device: &Device,
        inputs: Option<&HostInputs<'_>>,
        deadline: Duration,
        between: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        self.state = self.state.after(Event::Replay)?;
        inputs.map_or(Ok(()), |inputs| self.ports.check(inputs))?;
        take_all(&self.conditions)?;
        let filled = inputs.map_or(Ok(()), |inputs| self.ports.fill(device, inputs, deadline));
        let queued = filled.and_then(|()| self.segments.replay(between));
        end_all(&self.conditions, queued.is_ok());
        queued?;
        self.checks.as_ref().map_or(Ok(()), Checks::replayed)
    }
}

/// All recordings of a captured step.
pub(super) struct Recordings<R> {
    /// The most recently used recording is last.
    all: Vec<RecordedStep<R>>,
    kept: usize,
    made: u64,
    evicted: u64,
    /// The shapes of evicted recordings, each once, the latest last. A shape that is recorded again
    /// is removed.
    evicted_keys: VecDeque<Key>,
    /// True once the warning was logged.
    warned: bool,
    /// The time spent on making the recordings.
    time: Duration,
}

impl<R> Recordings<R> {
    pub(super) fn new(first: RecordedStep<R>, time: Duration) -> Self {
        Self { all: vec![first], kept: KEPT, made: 1, evicted: 0, evicted_keys: VecDeque::new(), warned: false, time }
    }

    /// Sets the number of recordings to keep, at least one, and evicts the rest.
    pub(super) fn keep(&mut self, kept: usize) {
        self.kept = kept.max(1);
        while self.all.len() > self.kept {
            self.evict();
        }
    }

    /// The numbers of recordings to keep, made and evicted, and the time spent on making them.
    pub(super) fn report(&self) -> (usize, u64, u64, Duration) {
        (self.kept, self.made, self.evicted, self.time)
    }

    /// The most recently used recording.
    pub(super) fn last(&self) -> &RecordedStep<R> {
        self.all.last().expect("a recording is always kept")
    }

    /// The most recently used recording.
    pub(super) fn last_mut(&mut self) -> &mut RecordedStep<R> {
        self.all.last_mut().expect("a recording is always kept")
    }

    /// Moves the recording for these inputs to the end. Returns true if there is one.
    pub(super) fn find(&mut self, inputs: &HostInputs<'_>) -> bool {
        let found = self.all.iter().position(|recording| recording.ports.fit(inputs));
        if let Some(found) = found {
            self.all[found..].rotate_left(1);
        }
        found.is_some()
    }

    /// Adds a recording and the time that it took, and evicts recordings beyond the limit.
    pub(super) fn add(&mut self, recording: RecordedStep<R>, time: Duration) {
        let known = self.evicted_keys.iter().position(|evicted_keys| evicted_keys == recording.ports.key());
        let again = known.and_then(|place| self.evicted_keys.remove(place)).is_some();
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

    /// Evicts the least recently used recording, unless it is the only one. Returns true if one was
    /// evicted.
    pub(super) fn evict(&mut self) -> bool {
        if self.all.len() == 1 {
            return false;
        }
        self.evicted_keys.push_back(self.all.remove(0).ports.key().clone());
        self.evicted += 1;
        if self.evicted_keys.len() > MOST_EVICTED_KEYS {
            self.evicted_keys.pop_front();
        }
        true
    }

    fn warn(&self) {
        let shapes: Vec<String> = self.evicted_keys.iter().rev().take(LISTED).map(Key::to_string).collect();
        tracing::warn!(
            recordings = self.made,
            kept = self.kept,
            evicted = self.evicted,
            shapes = self.all.len() + self.evicted_keys.len(),
            evicted_last = shapes.join(", "),
            record_seconds = self.time.as_secs_f64(),
            "a captured step is recorded again and again: its inputs have more shapes than recordings are kept; keep more \
             (`Captured::keep`, `Trainer::recordings`), or pad the inputs to fewer shapes"
        );
    }
}
