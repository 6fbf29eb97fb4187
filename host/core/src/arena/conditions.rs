//! The host-side preconditions of a step's launches, which kernels cannot check: labels that are
//! valid classes, and updates that are prepared.
//!
//! Recorded launches run later, with other inputs. Invariant: every precondition that an op checks
//! on the host during recording is checked again before each replay, before any of its work is
//! queued.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use kernels::loss::IGNORED;
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

/// Labels at an address, which must be below the number of classes.
#[derive(Clone, Copy, Debug)]
pub struct Labels {
    pub(crate) address: u64,
    pub(crate) classes: usize,
    /// True if [`IGNORED`] is also allowed.
    pub(crate) ignore: bool,
}

impl Labels {
    /// Checks that each label is a class.
    ///
    /// # Errors
    /// [`Error::Label`] with the index of the first invalid label.
    pub(crate) fn check(self, labels: &[u32]) -> Result<()> {
        let Self { classes, ignore, .. } = self;
        match labels.iter().position(|&label| label as usize >= classes && !(ignore && label == IGNORED)) {
            None => Ok(()),
            Some(sample) => Err(Error::Label { sample, label: labels[sample], classes }),
        }
    }
}

/// The preconditions that a step's ops have registered so far, and the host's summary of the step's
/// uploads.
#[derive(Debug, Default)]
pub(crate) struct ReplayPreconditions {
    turns: RefCell<Vec<Arc<Turns>>>,
    labels: RefCell<Vec<Labels>>,
    /// The address of each upload of integers, its largest value, and its largest value other than
    /// [`IGNORED`].
    uploads: RefCell<Vec<(u64, [u32; 2])>>,
}

impl ReplayPreconditions {
    /// Clears the uploads when a step begins.
    pub(crate) fn clear(&self) {
        self.uploads.borrow_mut().clear();
    }

    /// Records an upload of integers.
    pub(crate) fn uploaded(&self, address: u64, values: &[u32]) {
        if let Some(&largest) = values.iter().max() {
            let other = values.iter().copied().filter(|&value| value != IGNORED).max().unwrap_or(0);
            self.uploads.borrow_mut().push((address, [largest, other]));
        }
    }

    /// Returns true if the upload at these labels' address contained an invalid class.
    pub(crate) fn doubts(&self, labels: Labels) -> bool {
        let holds = |&(address, largest): &(u64, [u32; 2])| {
            address == labels.address && largest[usize::from(labels.ignore)] as usize >= labels.classes
        };
        self.uploads.borrow().iter().any(holds)
    }

    /// Registers labels for a check before each replay.
    pub(crate) fn ask_labels(&self, labels: Labels) {
        self.labels.borrow_mut().push(labels);
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
    pub(crate) fn take(&self) -> (Vec<Arc<Turns>>, Vec<Labels>) {
        (self.turns.take(), self.labels.take())
    }
}
