//! The host-side preconditions of a step's launches, which kernels cannot check: indices within
//! their bounds, and what the crates above register.
//!
//! Recorded launches run later, with other inputs. Invariant: every precondition that an op checks
//! on the host during recording is checked again before each replay, before any of its work is
//! queued.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use kernels::loss::IGNORED;
use std::cell::RefCell;
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// A precondition of each replay of a recorded step. An op that checks it eagerly registers it with
/// [`require_each_replay`](crate::internals::require_each_replay) when it is recorded. Each
/// replay takes all preconditions of its step before any of its work is queued.
pub trait ReplayPrecondition: fmt::Debug + Send + Sync {
    /// Takes what one replay uses up. [`ReplayPrecondition::end`] follows.
    ///
    /// # Errors
    /// An error if there is nothing to take. The replay then queues nothing and returns it.
    fn take(&self) -> Result<()>;

    /// Ends what [`ReplayPrecondition::take`] began. If the replay was not `queued`, the
    /// implementation puts back what was taken.
    fn end(&self, queued: bool);
}

/// Takes all preconditions of a replay, or none. [`end_all`] must follow.
///
/// # Errors
/// The error of the first precondition that does not hold.
pub(crate) fn take_all(all: &[Arc<dyn ReplayPrecondition>]) -> Result<()> {
    for (place, condition) in all.iter().enumerate() {
        condition.take().inspect_err(|_| end_all(&all[..place], false))?;
    }
    Ok(())
}

/// Ends preconditions that were taken.
pub(crate) fn end_all(all: &[Arc<dyn ReplayPrecondition>], queued: bool) {
    all.iter().for_each(|condition| condition.end(queued));
}

/// The preconditions that a recorded step's ops have registered so far.
#[derive(Debug, Default)]
pub(crate) struct ReplayPreconditions {
    each: RefCell<Vec<Arc<dyn ReplayPrecondition>>>,
    bounds: RefCell<Vec<InputBound>>,
}

/// The bound of an op's indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexBound {
    pub(crate) classes: usize,
    /// True if [`IGNORED`] is also allowed.
    pub(crate) ignored: bool,
}

impl IndexBound {
    /// Requires that all indices are below `classes`.
    pub fn below(classes: usize) -> Self {
        Self { classes, ignored: false }
    }

    /// Allows [`IGNORED`], too.
    #[must_use]
    pub fn or_ignored(self) -> Self {
        Self { ignored: true, ..self }
    }

    /// Checks indices on the host.
    ///
    /// # Errors
    /// [`Error::Label`] with the place of the first invalid index.
    pub(crate) fn check(self, indices: &[u32]) -> Result<()> {
        let Self { classes, ignored } = self;
        match indices.iter().position(|&label| label as usize >= classes && !(ignored && label == IGNORED)) {
            None => Ok(()),
            Some(sample) => Err(Error::Label { sample, label: indices[sample], classes }),
        }
    }
}

/// The bound of indices, and the number of the input that has them.
pub(crate) type InputBound = (usize, IndexBound);

impl ReplayPreconditions {
    /// Registers the bound of an input's indices for a check before each replay.
    pub(crate) fn bound(&self, input: usize, bound: IndexBound) {
        let mut bounds = self.bounds.borrow_mut();
        if !bounds.contains(&(input, bound)) {
            bounds.push((input, bound));
        }
    }

    /// Registers a precondition of each replay. Returns false if the step has registered it before.
    pub(crate) fn require(&self, condition: Arc<dyn ReplayPrecondition>) -> bool {
        let mut each = self.each.borrow_mut();
        let is_known = each.iter().any(|known| ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(&condition)));
        if !is_known {
            each.push(condition);
        }
        !is_known
    }

    /// Takes everything that each replay must check.
    pub(crate) fn take(&self) -> (Vec<Arc<dyn ReplayPrecondition>>, Vec<InputBound>) {
        (self.each.take(), self.bounds.take())
    }
}
