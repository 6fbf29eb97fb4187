//! Tickets for the updates of an optimizer.
//!
//! Invariant: each update is prepared once and applied once. A ticket is the right to apply the
//! update that was prepared last. It is not `Clone`, and using it consumes it.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use stepscope_core::internals::{ReplayPrecondition, is_dry_run, is_recorded, require_each_replay};
use stepscope_core::{CaptureInputs, Error, Result, Step};

/// The right to apply one update of an optimizer.
///
/// [`Optimizer::advance`](crate::Optimizer::advance) prepares an update and returns its ticket.
/// [`Optimizer::apply`](crate::Optimizer::apply) consumes the ticket, so that no update is applied
/// unprepared or twice:
///
/// ```
/// # use stepscope::parameters::Initializer;
/// # use stepscope::prelude::*;
/// # fn main() -> Result<()> {
/// # let device = Device::open(DeviceKind::Emulated)?;
/// # let mut spec = ParameterSpec::builder();
/// # spec.add("w", [3], Initializer::ONE);
/// # let mut weights = Parameters::new(&device, &spec.build()?, 7)?;
/// # let gradients = Gradients::zeros(&weights)?;
/// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// # let mut optimizer = Optimizer::new(&weights, AdamW::default())?;
/// let ticket = optimizer.advance()?;
/// arena.step(|step| optimizer.apply(ticket, step, &mut weights, &gradients))?;
/// # Ok(())
/// # }
/// ```
///
/// A captured step records `apply` once, with [`UpdateTicket::each_replay`]. Each replay then needs
/// the ticket of one update: `optimizer.advance()?.leave_to_replay()`.
#[derive(Debug)]
#[must_use = "pass it to `Optimizer::apply`, or call `leave_to_replay` before the replay of a captured step"]
pub struct UpdateTicket(Right);

/// The update that a ticket is for.
#[derive(Debug)]
enum Right {
    /// The update of this number, prepared by the advance of this serial number.
    Once { updates: Arc<Updates>, serial: u64, number: u64 },
    /// The update that is left to each replay.
    EachReplay,
}

impl UpdateTicket {
    /// Returns the ticket for an `apply` that is being recorded. Each replay makes the update whose
    /// ticket was left to it with [`UpdateTicket::leave_to_replay`], and fails without one.
    pub fn each_replay(_recording: &CaptureInputs<'_>) -> Self {
        Self(Right::EachReplay)
    }

    /// Leaves the update to the next replay of a captured step that applies it. A later
    /// [`Optimizer::advance`](crate::Optimizer::advance) takes it back.
    pub fn leave_to_replay(self) {
        if let Right::Once { updates, serial, .. } = self.0 {
            updates.left.store(serial, Ordering::Relaxed);
        }
    }

    /// The number of the update, counted from 1. `None` for [`UpdateTicket::each_replay`].
    pub fn number(&self) -> Option<u64> {
        match self.0 {
            Right::Once { number, .. } => Some(number),
            Right::EachReplay => None,
        }
    }
}

/// The updates of one optimizer.
#[derive(Debug)]
pub(super) struct Updates {
    /// The optimizer's name.
    op: &'static str,
    /// The number of updates made.
    made: AtomicU64,
    /// The number of times that an update was prepared or withdrawn. Only a ticket with this serial
    /// number is valid.
    serial: AtomicU64,
    /// The serial number of the ticket that was left to a replay, or 0.
    left: AtomicU64,
    /// True once the optimizer has new parameter groups and with them new `Updates`.
    retired: AtomicBool,
}

impl Updates {
    /// Creates the state after `made` updates, with none prepared.
    pub(super) fn new(op: &'static str, made: u64) -> Self {
        let [made, serial, left] = [made, 1, 0].map(AtomicU64::new);
        Self { op, made, serial, left, retired: AtomicBool::default() }
    }

    /// Returns the number of updates made.
    pub(super) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Withdraws all tickets, and sets the number of updates made.
    pub(super) fn reset(&self, made: u64) {
        self.made.store(made, Ordering::Relaxed);
        self.serial.fetch_add(1, Ordering::Relaxed);
    }

    /// Withdraws all tickets, and ends the issue of tickets.
    pub(super) fn retire(&self) {
        self.reset(self.made());
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Issues the ticket of the next update, which is prepared. All others are withdrawn.
    pub(super) fn issue(self: &Arc<Self>, number: u64) -> UpdateTicket {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed) + 1;
        UpdateTicket(Right::Once { updates: Arc::clone(self), serial, number })
    }

    /// Accepts a ticket for the update that is about to be queued. [`Updates::count`] must follow.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the ticket is of another optimizer, was withdrawn, or does not fit a
    /// recorded step.
    pub(super) fn accept(self: &Arc<Self>, ticket: UpdateTicket, step: &Step<'_>) -> Result<()> {
        let refuse = |expected: &str, got: String| Err(Error::misuse(self.op, expected, got));
        match ticket.0 {
            Right::EachReplay if !is_recorded(step) => {
                return refuse(
                    "the ticket of an `advance` in a step that is not captured",
                    "`UpdateTicket::each_replay`".into(),
                );
            }
            Right::EachReplay => {
                if !require_each_replay(step, Arc::<Self>::clone(self)) {
                    return refuse("one `apply` of an optimizer in a recorded step", "a second `apply`".into());
                }
            }
            Right::Once { number, .. } if is_recorded(step) => {
                let expected =
                    "`UpdateTicket::each_replay` in a captured step, because each replay makes another update";
                return refuse(expected, format!("the ticket of update {number}"));
            }
            Right::Once { updates, serial, number } => {
                let is_own = Arc::ptr_eq(&updates, self);
                if !is_own || serial != self.serial.load(Ordering::Relaxed) {
                    let origin = match updates.retired.load(Ordering::Relaxed) {
                        true => "from before `with_parameter_groups`",
                        false if is_own => "from before another `advance` or a restored checkpoint",
                        false => "of another optimizer",
                    };
                    return refuse(
                        "the ticket of this optimizer's last `advance`",
                        format!("the ticket of update {number}, {origin}"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Counts the accepted update if it was queued and will run. Returns what queuing it gave.
    pub(super) fn count<Q>(&self, step: &Step<'_>, queued: Result<Q>) -> Result<Q> {
        let queued = step.launched(queued)?;
        if !is_dry_run(step) {
            self.made.fetch_add(1, Ordering::Relaxed);
        }
        Ok(queued)
    }
}

impl ReplayPrecondition for Updates {
    fn take(&self) -> Result<()> {
        if self.left.swap(0, Ordering::Relaxed) == self.serial.load(Ordering::Relaxed) {
            return Ok(());
        }
        let expected = "`advance()?.leave_to_replay()` before each replay of a captured `apply`";
        Err(Error::misuse(self.op, expected, format!("no such call since update {} was made", self.made())))
    }

    fn end(&self, queued: bool) {
        if queued {
            self.made.fetch_add(1, Ordering::Relaxed);
        } else {
            self.left.store(self.serial.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
