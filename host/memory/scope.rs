//! Scopes of a step: what is taken within one goes back when it ends, whether it returned, failed or panicked.
//!
//! A scope aside takes its memory from the arena's other end. So what it leaves behind lies with the tensors of the scope around it, and all
//! else goes back at once. Invariant: from each end, what was taken last is given back first.

use super::checked::poison;
use super::layout::{Bump, End};
use super::region::Region;
use super::snapshot::{Kind, Origin};
use crate::error::Result;
use crate::tensor::{Memory, STALE};
use cuda_std::float_mode;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

/// A place in what a step takes, one behind the other.
#[derive(Clone, Copy, Debug)]
struct Mark {
    bump: Bump,
    blocks: usize,
    guards: usize,
    allocations: u64,
}

/// A scope aside, while it runs.
#[derive(Debug)]
pub(crate) struct Aside<'r> {
    region: &'r Region,
    home: End,
    left: Cell<Option<Mark>>,
}

impl Aside<'_> {
    /// What is made from now on is of the scope around this one and stays when this one ends. What was made so far is still there.
    pub(crate) fn leave(&self) {
        let mark = self.region.mark();
        self.left.set(Some(mark));
        self.region.end.set(self.home);
        self.region.reuse.begin(mark.bump, self.home);
    }
}

impl Region {
    /// Runs a scope and then gives back what it took, whether it returned, failed or panicked. All
    /// of a step's arithmetic on the host is within one, and computes in IEEE 754's default mode.
    pub(crate) fn scope<R>(&self, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let mark = self.mark();
        let around = self.reuse.begin(mark.bump, self.end.get());
        let outcome = float_mode::in_default(|| catch_unwind(AssertUnwindSafe(run)));
        self.reuse.resume(around);
        let whole_step = mark.bump.taken() == 0 && mark.blocks == 0;
        self.close(if whole_step { Kind::Reset } else { Kind::Rewind }, [mark, self.mark()], outcome)
    }

    /// Runs a scope at the other end and then gives back what it took until it left, or all that it took if it did not come so far.
    pub(crate) fn aside<R>(&self, run: impl FnOnce(&Aside<'_>) -> Result<R>) -> Result<R> {
        let mark = self.mark();
        let aside = Aside { region: self, home: self.end.get(), left: Cell::new(None) };
        self.end.set(aside.home.other());
        let around = self.reuse.begin(mark.bump, self.end.get());
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&aside)));
        self.reuse.resume(around);
        self.end.set(aside.home);
        let left = aside.left.get().filter(|_| matches!(outcome, Ok(Ok(_))));
        self.close(Kind::Rewind, [mark, left.unwrap_or_else(|| self.mark())], outcome)
    }

    /// Where the step stands.
    fn mark(&self) -> Mark {
        let blocks = self.overflow.as_ref().map_or(0, |overflow| overflow.borrow().mark());
        let guards = self.checks.as_ref().map_or(0, |checks| checks.borrow().mark());
        Mark { bump: self.bump.get(), blocks, guards, allocations: self.counters.borrow().step_allocations }
    }

    /// Ends a scope: what was taken between the marks goes back.
    fn close<R>(&self, kind: Kind, marks: [Mark; 2], outcome: thread::Result<Result<R>>) -> Result<R> {
        let sound = if matches!(outcome, Ok(Ok(_))) { self.verify(marks) } else { Ok(()) };
        self.note_rewind(kind, marks);
        let given_back = self.rewind(marks);
        match outcome {
            Ok(Ok(result)) => sound.and(given_back).map(|()| result),
            // The scope's own error came first and says more.
            Ok(Err(error)) => Err(error),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// In checked mode: looks at the guards of a scope that ends, and poisons its memory.
    fn verify(&self, [mark, until]: [Mark; 2]) -> Result<()> {
        let Some(checks) = &self.checks else { return Ok(()) };
        checks.borrow_mut().verify(&self.device, mark.guards..until.guards)?;
        if self.is_lent() {
            // A recorded step's results are read after it; its next replay poisons each tensor again.
            return Ok(());
        }
        until.bump.since(mark.bump).into_iter().filter(|(_, bytes)| *bytes > 0).try_for_each(|(offset, bytes)| {
            let (address, words) = (self.address + offset as u64, bytes / size_of::<u32>());
            // SAFETY: the scope is over, and with it every tensor in this part of the arena's own memory.
            let memory = unsafe { Memory::<u32>::new(self.owner, address, words) };
            poison(&self.device, memory, STALE)
        })
    }

    fn rewind(&self, [mark, until]: [Mark; 2]) -> Result<()> {
        if let Some(checks) = &self.checks {
            checks.borrow_mut().forget(mark.guards..until.guards);
        }
        for (offset, bytes) in until.bump.since(mark.bump) {
            self.tell_gone(offset..offset + bytes);
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

    /// Records the end of a scope.
    fn note_rewind(&self, kind: Kind, [mark, until]: [Mark; 2]) {
        if self.recording.is_none() {
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
        // A scope that made nothing is noted too.
        let front = (front.1 > 0 || back.is_none()).then_some(front);
        for (offset, bytes) in front.into_iter().chain(back) {
            self.note(kind, Origin::Arena, self.address + offset as u64, bytes, here, "".into());
        }
    }
}
