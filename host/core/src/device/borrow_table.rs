//! The buffers that running steps have borrowed. The table keeps replays from changing them during
//! a step.
//!
//! A graph keeps writing the buffers that it was recorded with, whoever owns them now. A step
//! relies on its borrowed buffers: for example, its backward pass reads the weights that its
//! forward pass read.
//!
//! Invariant: while a step runs, no replay is queued that writes a buffer the step reads, or that
//! uses a buffer the step writes. A replay on another thread waits for the step's end. A replay on
//! the step's own thread is an error, because it would wait for itself.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A range of device memory, and whether its user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) bytes: Range<u64>,
    pub(super) written: bool,
}

impl Use {
    fn conflicts(&self, other: &Self) -> bool {
        (self.written || other.written) && self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }
}

/// The buffers that the steps of a device have borrowed.
#[derive(Debug, Default)]
pub(super) struct BorrowTable {
    table: Mutex<Table>,
    step_ended: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// The running steps, by the number of their arena's [`BufferBorrow`].
    steps: BTreeMap<u64, Borrower>,
}

/// A running step.
#[derive(Debug)]
struct Borrower {
    thread: ThreadId,
    uses: Vec<Use>,
}

impl BorrowTable {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a replay that uses this memory once no running step relies on it. No buffer can be
    /// borrowed meanwhile.
    pub(super) fn replay(&self, uses: &[Use], deadline: Duration, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let mut table = self.table();
        loop {
            let conflicts =
                |borrower: &&Borrower| borrower.uses.iter().any(|lent| uses.iter().any(|used| used.conflicts(lent)));
            let Some(borrower) = table.steps.values().find(conflicts) else { break };
            let expected = "no running step that has borrowed the graph's buffers";
            if borrower.thread == std::thread::current().id() {
                return Err(Error::misuse("replay", expected, "a replay inside that step: end the step first"));
            }
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::misuse(
                    "replay",
                    expected,
                    format!("a step of another thread, still running after {deadline:?}"),
                ));
            }
            table = self.step_ended.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue()
    }
}

/// The buffers that an arena's running step has borrowed.
#[derive(Debug)]
pub(crate) struct BufferBorrow {
    lends: Arc<BorrowTable>,
    number: u64,
    /// True if the table lists this step.
    listed: Cell<bool>,
}

impl BufferBorrow {
    pub(super) fn new(lends: &Arc<BorrowTable>) -> Self {
        let mut table = lends.table();
        table.next += 1;
        Self { lends: Arc::clone(lends), number: table.next, listed: Cell::new(false) }
    }

    /// Returns the number of the arena among those of its device, counted from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a borrow of `bytes` bytes at `address`. The step also writes them if `written`.
    pub(crate) fn add(&self, address: u64, bytes: usize, written: bool) {
        let lent = Use { bytes: address..address.saturating_add(bytes as u64), written };
        debug_assert!(!lent.bytes.is_empty(), "a buffer has elements");
        self.listed.set(true);
        let mut table = self.lends.table();
        let thread = std::thread::current().id();
        let Borrower { uses, .. } = table.steps.entry(self.number).or_insert(Borrower { thread, uses: Vec::new() });
        // A step borrows the same buffers repeatedly, in close succession.
        if !uses.iter().rev().take(8).any(|had| *had == lent) {
            uses.push(lent);
        }
    }

    /// Ends the step's borrows.
    pub(crate) fn end(&self) {
        if self.listed.replace(false) {
            self.lends.table().steps.remove(&self.number);
            self.lends.step_ended.notify_all();
        }
    }
}

impl Drop for BufferBorrow {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(20);

    fn used(bytes: Range<u64>, written: bool) -> Use {
        Use { bytes, written }
    }

    #[test]
    fn only_overlapping_writes_conflict() {
        let lends = Arc::default();
        let lending = BufferBorrow::new(&lends);
        lending.add(100, 10, false);
        let replay = |bytes, written| lends.replay(&[used(bytes, written)], DEADLINE, || Ok(()));
        assert!(replay(109..120, true).is_err(), "what a step reads is written");
        assert!(replay(109..120, false).is_ok(), "both read");
        assert!(replay(110..120, true).is_ok() && replay(0..100, true).is_ok(), "beside it");
        lending.add(100, 10, true);
        assert!(replay(0..101, false).is_err(), "what a step writes is read");
        lending.end();
        assert!(replay(0..200, true).is_ok(), "the step is over");
    }

    #[test]
    fn replays_wait_for_other_threads_steps() {
        let lends = Arc::default();
        let lending = BufferBorrow::new(&lends);
        lending.add(0, 8, false);
        let replay = |deadline| lends.replay(&[used(0..8, true)], deadline, || Ok(()));
        std::thread::scope(|scope| {
            let start = Instant::now();
            let error = scope.spawn(|| replay(DEADLINE)).join().unwrap().unwrap_err();
            assert!(start.elapsed() >= DEADLINE && error.to_string().contains("another thread"), "{error}");
            let waits = scope.spawn(|| replay(Duration::from_secs(20)));
            std::thread::sleep(DEADLINE);
            assert!(!waits.is_finished());
            lending.end();
            waits.join().unwrap().unwrap();
        });
    }
}
