//! Checks that a call gave the right outcome, in time.

use super::super::program::Planned;
use super::super::rules::{Rule, Violation};
use super::{Begin, Execution, Want};
use crate::support::witness::{AT_ONCE, SLACK, Watch};
use std::time::Duration;
use stepscope::check::faults::{Call, Fault};
use stepscope::{Error, Result};

impl Execution<'_> {
    /// Marks the start of a library call.
    pub(super) fn begin(&self) -> Begin {
        Begin(Watch::start())
    }

    /// Returns the fault that a call has met, if any.
    pub(super) fn meet(&mut self) -> Option<(Call, Fault)> {
        let Planned { call, fault, .. } = self.pending.take_if(|it| self.rig.plan.count(it.call) >= it.number)?;
        self.tally.met.push((call, fault));
        let slow = matches!(fault, Fault::Delay(delay) if delay < self.deadline);
        self.lost |= fault != Fault::Fail && !slow;
        Some((call, fault))
    }

    /// Judges a completed call: it must have ended in time, with the outcome that follows from its
    /// fault. Faults in `absorbed` do not affect the outcome. A timeout carries a report if the
    /// call was an arena's own.
    pub(super) fn judge<T>(
        &mut self,
        what: &str,
        begin: Begin,
        got: &Result<T>,
        want: Want,
        of_arena: bool,
        absorbed: &[Call],
    ) -> Option<(Call, Fault)> {
        let was_lost = self.lost;
        self.late(what, begin);
        let met = self.meet();
        let full = matches!(want, Want::Full { .. });
        let effect = met.filter(|(call, _)| !absorbed.contains(call)).filter(|&(_, fault)| !self.is_slow(fault));
        let got = got.as_ref().map(drop);
        let right = match (effect, &want) {
            _ if was_lost => match got {
                Err(Error::DeviceLost { .. }) => !begin.0.exceeds(AT_ONCE),
                // A call that only frees memory succeeds by leaking it, and a full arena is full on
                // any device.
                Ok(()) => what == "drop" || what == "scratch" || what == "step",
                Err(error) => full && matches!(error, Error::ArenaFull { .. }) || matches!(error, Error::Misuse { .. }),
            },
            (Some((_, Fault::Fail)), _) => {
                matches!(got, Err(Error::Driver { fatal: false, reason, .. }) if reason.contains("planted"))
            }
            (Some((_, Fault::Spoil)), _) => {
                matches!(got, Err(Error::Driver { fatal: true, reason, .. }) if reason.contains("planted"))
            }
            (Some((call, _)), _) => match got {
                Err(Error::Timeout { call: name, waited, report }) => {
                    *name == call_name(call)
                        && begin.0.elapsed().max(self.step_elapsed()) >= self.deadline
                        && *waited <= begin.0.elapsed()
                        && (report.is_some() || !of_arena)
                }
                _ => false,
            },
            // This call may continue with a device that an absorbed fault has lost.
            (None, Want::Success) => got.is_ok() || self.lost && matches!(got, Err(Error::DeviceLost { .. })),
            (None, Want::Misuse) => matches!(got, Err(Error::Misuse { .. })),
            (None, Want::Full { padded, cause }) => match got {
                Err(Error::ArenaFull {
                    requested_bytes,
                    used_bytes,
                    capacity_bytes,
                    allocations,
                    cause: named,
                    report,
                    ..
                }) => {
                    let reference = &self.reference;
                    *requested_bytes == *padded
                        && *used_bytes == reference.offset
                        && *capacity_bytes == reference.capacity_bytes
                        && *allocations == reference.alive
                        && named == cause
                        && report.offset_bytes == reference.offset
                }
                _ => false,
            },
        };
        if !right {
            let want = match want {
                _ if was_lost => "a lost device".to_owned(),
                _ if effect.is_some() => "the fault's own error".to_owned(),
                Want::Success => "success".to_owned(),
                Want::Misuse => "misuse".to_owned(),
                Want::Full { padded, cause } => format!("{padded} bytes refused, {cause:?}, at {:?}", self.reference),
            };
            let elapsed = begin.0.elapsed();
            self.violated(Rule::Typed, format!("{what}: met {met:?}, expected {want}, got {got:?} after {elapsed:?}"));
        }
        met
    }

    pub(super) fn step_elapsed(&self) -> Duration {
        self.step.map_or(Duration::ZERO, |step| step.elapsed())
    }

    pub(super) fn is_slow(&self, fault: Fault) -> bool {
        matches!(fault, Fault::Delay(delay) if delay < self.deadline)
    }

    /// Checks that a call has not taken too long.
    pub(super) fn late(&mut self, what: &str, Begin(watch): Begin) {
        if watch.exceeds(self.deadline + SLACK) {
            let (elapsed, pauses, deadline) = (watch.elapsed(), watch.pauses(), self.deadline);
            self.violated(
                Rule::InTime,
                format!("{what}: {elapsed:?} with a deadline of {deadline:?}, pauses {pauses:?}"),
            );
        }
    }

    pub(super) fn violated(&mut self, rule: Rule, detail: String) {
        let pauses = self.watch.pauses();
        self.violation.get_or_insert(Violation { rule, detail, pauses });
    }
}

/// Returns the driver calls that an error makes for its report, which may fail.
pub(super) fn reports(want: &Want) -> &'static [Call] {
    if matches!(want, Want::Full { .. }) { &[Call::FreeBytes] } else { &[] }
}

/// True if two errors are equal, apart from the momentary memory figures in their reports.
pub(super) fn same(a: &Error, b: &Error) -> bool {
    match (a, b) {
        (Error::Timeout { call: a, waited: x, .. }, Error::Timeout { call: b, waited: y, .. }) => (a, x) == (b, y),
        (a, b) => a == b,
    }
}

/// Returns the name of a call in its timeout.
fn call_name(call: Call) -> &'static str {
    match call {
        Call::FreeBytes => "free_bytes",
        Call::Allocate => "allocate",
        Call::Free => "free",
        Call::CreatePool => "create_pool",
        Call::PoolAllocate => "pool_allocate",
        Call::PoolFree => "pool_free",
        Call::TrimPool => "trim_pool",
        Call::DestroyPool => "destroy_pool",
        Call::Upload => "upload",
        Call::Launch => "launch",
        Call::Download => "download",
        Call::Poll => "synchronize",
        other => panic!("no deadline is known for {other:?}"),
    }
}
