//! What must hold whenever a step's launches run, and a kernel cannot tell: labels within their classes, updates that are set up.
//!
//! Launches that are recorded run later, and on other inputs. Invariant: what an op asks of the host when it is recorded is asked again
//! before each replay, before anything of it is queued.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use kernels::loss::IGNORED;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Updates of one optimiser: each is set up, and made once.
#[derive(Debug)]
pub(crate) struct Turns {
    /// The optimiser's name.
    op: &'static str,
    set_up: AtomicBool,
    made: AtomicU64,
}

impl Turns {
    /// None is made or set up.
    pub(crate) fn new(op: &'static str) -> Self {
        Self { op, set_up: AtomicBool::default(), made: AtomicU64::default() }
    }

    /// Updates made.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// So many are made, and the next is not set up.
    pub(crate) fn reset(&self, made: u64) {
        self.made.store(made, Ordering::Relaxed);
        self.set_up.store(false, Ordering::Relaxed);
    }

    /// The next update may be made.
    pub(crate) fn set_up(&self) {
        self.set_up.store(true, Ordering::Relaxed);
    }

    /// Takes the next update of each, which [`Turns::end`] must follow.
    ///
    /// # Errors
    /// [`Error::Misuse`] when one is not set up; none is taken then.
    pub(crate) fn take(all: &[Arc<Self>]) -> Result<()> {
        let Some(missing) = all.iter().position(|turns| !turns.set_up.swap(false, Ordering::Relaxed)) else {
            return Ok(());
        };
        Self::end(&all[..missing], false);
        let got = format!("none since update {} was made", all[missing].made());
        Err(Error::misuse(all[missing].op, "an `advance` before each `apply`, or replay of one", got))
    }

    /// Counts the updates that were taken or, if they were not made, sets them up again.
    pub(crate) fn end(all: &[Arc<Self>], made: bool) {
        for turns in all {
            if made {
                turns.made.fetch_add(1, Ordering::Relaxed);
            } else {
                turns.set_up();
            }
        }
    }
}

/// Labels at an address that must be below the number of classes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Labels {
    pub(crate) address: u64,
    pub(crate) classes: usize,
    /// Whether [`IGNORED`] is allowed too.
    pub(crate) ignore: bool,
}

impl Labels {
    /// The first that is no class.
    ///
    /// # Errors
    /// [`Error::Label`] with its place.
    pub(crate) fn check(self, labels: &[u32]) -> Result<()> {
        let Self { classes, ignore, .. } = self;
        match labels.iter().position(|&label| label as usize >= classes && !(ignore && label == IGNORED)) {
            None => Ok(()),
            Some(sample) => Err(Error::Label { sample, label: labels[sample], classes }),
        }
    }
}

/// What a step's ops have asked of the host so far, and what the host knows of the step's uploads.
#[derive(Debug, Default)]
pub(crate) struct Conditions {
    turns: RefCell<Vec<Arc<Turns>>>,
    labels: RefCell<Vec<Labels>>,
    /// The address of each upload of integers, the largest, and the largest but [`IGNORED`].
    uploads: RefCell<Vec<(u64, [u32; 2])>>,
}

impl Conditions {
    /// A step begins.
    pub(crate) fn clear(&self) {
        self.uploads.borrow_mut().clear();
    }

    /// Integers were uploaded.
    pub(crate) fn uploaded(&self, address: u64, values: &[u32]) {
        if let Some(&largest) = values.iter().max() {
            let other = values.iter().copied().filter(|&value| value != IGNORED).max().unwrap_or(0);
            self.uploads.borrow_mut().push((address, [largest, other]));
        }
    }

    /// Whether what was uploaded to these labels' address had one that is no class.
    pub(crate) fn doubts(&self, labels: Labels) -> bool {
        let holds = |&(address, largest): &(u64, [u32; 2])| {
            address == labels.address && largest[usize::from(labels.ignore)] as usize >= labels.classes
        };
        self.uploads.borrow().iter().any(holds)
    }

    /// Asks it of each replay.
    pub(crate) fn ask_labels(&self, labels: Labels) {
        self.labels.borrow_mut().push(labels);
    }

    /// Asks of each replay that an update is set up.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is asked twice: one replay makes one update.
    pub(crate) fn ask_turn(&self, turns: &Arc<Turns>) -> Result<()> {
        let mut asked = self.turns.borrow_mut();
        if asked.iter().any(|other| Arc::ptr_eq(other, turns)) {
            return Err(Error::misuse(turns.op, "one `apply` of an optimiser in a recorded step", "a second one"));
        }
        asked.push(Arc::clone(turns));
        Ok(())
    }

    /// What each replay must ask.
    pub(crate) fn take(&self) -> (Vec<Arc<Turns>>, Vec<Labels>) {
        (self.turns.take(), self.labels.take())
    }
}
