//! The host-side preconditions of a step's launches, which kernels cannot check: indices within
//! their bounds, and updates that are prepared.
//!
//! Recorded launches run later, with other inputs. Invariant: every precondition that an op checks
//! on the host during recording is checked again before each replay, before any of its work is
//! queued.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::indices::IndexBound;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The updates of one optimizer. Each is prepared and then made once.
#[derive(Debug)]
pub struct Turns {
    /// The optimizer's name.
    op: &'static str,
    set_up: AtomicBool,
    made: AtomicU64,
}

impl Turns {
    /// Creates the state before the first update.
    pub fn new(op: &'static str) -> Self {
        Self { op, set_up: AtomicBool::default(), made: AtomicU64::default() }
    }

    /// Returns the number of updates made.
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Sets the number of updates made, with the next one not prepared.
    pub fn reset(&self, made: u64) {
        self.made.store(made, Ordering::Relaxed);
        self.set_up.store(false, Ordering::Relaxed);
    }

    /// Prepares the next update.
    pub fn set_up(&self) {
        self.set_up.store(true, Ordering::Relaxed);
    }

    /// Takes the next update of each optimizer. [`Turns::end`] must follow.
    ///
    /// # Errors
    /// [`Error::Misuse`] if an update is not prepared. None is taken then.
    pub fn take(all: &[Arc<Self>]) -> Result<()> {
        let Some(missing) = all.iter().position(|turns| !turns.set_up.swap(false, Ordering::Relaxed)) else {
            return Ok(());
        };
        Self::end(&all[..missing], false);
        let got = format!("none since update {} was made", all[missing].made());
        Err(Error::misuse(all[missing].op, "an `advance` before each `apply` or its replay", got))
    }

    /// Counts the updates that were taken or, if they were not made, prepares them again.
    pub fn end(all: &[Arc<Self>], made: bool) {
        for turns in all {
            if made {
                turns.made.fetch_add(1, Ordering::Relaxed);
            } else {
                turns.set_up();
            }
        }
    }
}

/// The preconditions that a recorded step's ops have registered so far.
#[derive(Debug, Default)]
pub(crate) struct ReplayPreconditions {
    turns: RefCell<Vec<Arc<Turns>>>,
    /// The bounds of the step's indices, each with the number of the input that has them.
    bounds: RefCell<Vec<(usize, IndexBound)>>,
}

impl ReplayPreconditions {
    /// Registers the bound of an input's indices for a check before each replay.
    pub(crate) fn bound(&self, input: usize, bound: IndexBound) {
        let mut bounds = self.bounds.borrow_mut();
        if !bounds.contains(&(input, bound)) {
            bounds.push((input, bound));
        }
    }

    /// Registers an update that must be prepared before each replay.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is registered twice, because one replay makes one update.
    pub(crate) fn ask_turn(&self, turns: &Arc<Turns>) -> Result<()> {
        let mut asked = self.turns.borrow_mut();
        if asked.iter().any(|other| Arc::ptr_eq(other, turns)) {
            return Err(Error::misuse(turns.op, "one `apply` of an optimizer in a recorded step", "a second one"));
        }
        asked.push(Arc::clone(turns));
        Ok(())
    }

    /// Takes everything that each replay must check.
    pub(crate) fn take(&self) -> (Vec<Arc<Turns>>, Vec<(usize, IndexBound)>) {
        (self.turns.take(), self.bounds.take())
    }
}
