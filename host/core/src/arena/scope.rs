//! Scopes of a step: memory that is taken within a scope is freed when the scope ends, whether it
//! returned, failed or panicked.
//!
//! A nested scope (`aside`) takes its memory from the arena's other end. The tensors that it leaves
//! therefore lie with those of the outer scope, and all its other memory is freed at once.
//! Invariant: at each end, memory is freed in the reverse order of its allocation.

use super::checked::poison;
use super::events::{Kind, Origin};
use super::layout::{Bump, End};
use super::region::ArenaInner;
use crate::error::Result;
use crate::tensor::{Memory, STALE};
use cuda_std::float_mode;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

/// A position in the sequence of a step's allocations.
#[derive(Clone, Copy, Debug)]
struct Mark {
    bump: Bump,
    blocks: usize,
    guards: usize,
    allocations: u64,
}

/// A nested scope, while it runs.
#[derive(Debug)]
pub(crate) struct NestedScope<'r> {
    region: &'r ArenaInner,
    home: End,
    left: Cell<Option<Mark>>,
}

impl NestedScope<'_> {
    /// Leaves the nested scope. Tensors made from now on belong to the outer scope and survive. The
    /// earlier ones stay until the nested scope ends.
    pub(crate) fn leave(&self) {
        let mark = self.region.mark();
        self.left.set(Some(mark));
        self.region.end.set(self.home);
        self.region.reuse.begin(mark.bump, self.home);
    }
}

impl ArenaInner {
    /// Runs a scope and then frees what it took, whether it returned, failed or panicked. All of a
    /// step's host arithmetic runs within one, and uses IEEE 754's default mode.
    pub(crate) fn scope<R>(&self, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let mark = self.mark();
        let around = self.reuse.begin(mark.bump, self.end.get());
        let outcome = float_mode::in_default(|| catch_unwind(AssertUnwindSafe(run)));
        self.reuse.resume(around);
        let whole_step = mark.bump.taken() == 0 && mark.blocks == 0;
        self.close(if whole_step { Kind::Reset } else { Kind::Rewind }, [mark, self.mark()], outcome)
    }

    /// Runs a nested scope at the other end. Then frees what it took until it called `leave`, or
    /// everything if it did not get that far.
    pub(crate) fn aside<R>(&self, run: impl FnOnce(&NestedScope<'_>) -> Result<R>) -> Result<R> {
        let mark = self.mark();
        let aside = NestedScope { region: self, home: self.end.get(), left: Cell::new(None) };
        self.end.set(aside.home.other());
        let around = self.reuse.begin(mark.bump, self.end.get());
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&aside)));
        self.reuse.resume(around);
        self.end.set(aside.home);
        let left = aside.left.get().filter(|_| matches!(outcome, Ok(Ok(_))));
        self.close(Kind::Rewind, [mark, left.unwrap_or_else(|| self.mark())], outcome)
    }

    /// Returns the current position of the step.
    fn mark(&self) -> Mark {
        let blocks = self.overflow.as_ref().map_or(0, |overflow| overflow.borrow().mark());
        let guards = self.checks.as_ref().map_or(0, |checks| checks.borrow().mark());
        Mark { bump: self.bump.get(), blocks, guards, allocations: self.counters.borrow().step_allocations }
    }

    /// Ends a scope and frees what was taken between the marks.
    fn close<R>(&self, kind: Kind, marks: [Mark; 2], outcome: thread::Result<Result<R>>) -> Result<R> {
        let sound = if matches!(outcome, Ok(Ok(_))) { self.verify(marks) } else { Ok(()) };
        self.note_rewind(kind, marks);
        let given_back = self.rewind(marks);
        match outcome {
            Ok(Ok(result)) => sound.and(given_back).map(|()| result),
            // The scope's own error came first and is more precise.
            Ok(Err(error)) => Err(error),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Checks the guards of an ending scope, and poisons its memory, in checked mode.
    fn verify(&self, [mark, until]: [Mark; 2]) -> Result<()> {
        let Some(checks) = &self.checks else { return Ok(()) };
        checks.borrow_mut().verify(&self.device, mark.guards..until.guards)?;
        if self.is_lent() {
            // A recorded step's results are read after it. Its next replay poisons each tensor
            // again.
            return Ok(());
        }
        until.bump.since(mark.bump).into_iter().filter(|(_, bytes)| *bytes > 0).try_for_each(|(offset, bytes)| {
            let (address, words) = (self.address + offset as u64, bytes / size_of::<u32>());
            // SAFETY: the scope is over, so no tensor is left in this part of the arena's own
            // memory.
            let memory = unsafe { Memory::<u32>::new(self.owner, address, words) };
            poison(&self.device, memory, STALE)
        })
    }

    fn rewind(&self, [mark, until]: [Mark; 2]) -> Result<()> {
        if let Some(checks) = &self.checks {
            checks.borrow_mut().forget(mark.guards..until.guards);
        }
        self.bump.set(self.bump.get().without(mark.bump, until.bump));
        let gone = until.allocations - mark.allocations;
        self.counters.borrow_mut().step_allocations -= gone;
        let Some(overflow) = &self.overflow else { return Ok(()) };
        let mut overflow = overflow.borrow_mut();
        let blocks = until.blocks - mark.blocks;
        let start = Instant::now();
        let (leaked, given_back) = overflow.give_back(&self.device, mark.blocks..until.blocks);
        self.overflowed.set(overflow.used_bytes());
        let mut counters = self.counters.borrow_mut();
        counters.waited += if blocks > 0 { start.elapsed() } else { Duration::ZERO };
        counters.overflow.live_blocks -= (blocks - leaked) as u64;
        given_back
    }

    /// Passes the end of a scope to the observers.
    fn note_rewind(&self, kind: Kind, [mark, until]: [Mark; 2]) {
        if !self.observed() {
            return;
        }
        let here = Location::caller();
        if let Some(overflow) = &self.overflow {
            for &(address, bytes) in overflow.borrow().blocks(mark.blocks..until.blocks) {
                self.note(Kind::Free, Origin::Overflow, address, bytes, here, "".into());
            }
        }
        let [front, back] = until.bump.since(mark.bump);
        let back = (back.1 > 0).then_some(back);
        // A scope that made nothing is an event too.
        let front = (front.1 > 0 || back.is_none()).then_some(front);
        for (offset, bytes) in front.into_iter().chain(back) {
            self.note(kind, Origin::Arena, self.address + offset as u64, bytes, here, "".into());
        }
    }
}
