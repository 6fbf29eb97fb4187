//! Scopes of a step: memory that is taken within a scope is freed when the scope ends, whether it
//! returned, failed or panicked.
//!
//! A nested scope (`aside`) takes its memory from the arena's other end. The tensors that it leaves
//! therefore lie with those of the outer scope, and all its other memory is freed at once. A tensor
//! that is freed within a step gives its memory to later tensors of the same size and scope.
//!
//! Invariant: at each end, memory is freed in the reverse order of its allocation. A block that is
//! freed early is handed out only to the scope that took it, never to a nested or later scope, so
//! its memory is reclaimed when its scope ends, as if it had never been freed early.

use super::checked::poison;
use super::events::{Kind, Origin};
use super::layout::{Bump, End, padded};
use super::region::ArenaInner;
use crate::error::Result;
use crate::tensor::{Memory, STALE};
use cuda_std::float_mode;
use std::cell::{Cell, RefCell};
use std::ops::Range;
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
    /// Runs a scope and then frees its memory, whether it returned, failed or panicked. All of a
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

    /// Ends a scope and frees the memory between the marks.
    fn close<R>(&self, kind: Kind, marks: [Mark; 2], outcome: thread::Result<Result<R>>) -> Result<R> {
        let reclaimed = self.reclaim(kind, marks, matches!(outcome, Ok(Ok(_))));
        match outcome {
            Ok(Ok(result)) => reclaimed.map(|()| result),
            // The scope's own error came first and is more precise.
            Ok(Err(error)) => Err(error),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Frees the memory between the marks, after checking it if the scope has succeeded.
    fn reclaim(&self, kind: Kind, marks: [Mark; 2], succeeded: bool) -> Result<()> {
        let sound = if succeeded { self.verify(marks) } else { Ok(()) };
        self.note_rewind(kind, marks);
        let given_back = self.rewind(marks);
        sound.and(given_back)
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
        let freed = until.allocations - mark.allocations;
        self.counters.borrow_mut().step_allocations -= freed;
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

/// The free blocks, and the scope that owns them.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    /// The blocks of all running scopes, with the innermost scope's last.
    blocks: RefCell<Vec<Range<usize>>>,
    scope: Cell<Option<Scope>>,
    /// The offsets of tensors that are read after the step.
    kept: RefCell<Vec<usize>>,
}

/// A running scope.
#[derive(Clone, Copy, Debug)]
struct Scope {
    /// The index of its first block.
    first: usize,
    /// The state of the arena when the scope began, and the end it takes from.
    start: Bump,
    end: End,
}

/// The scope around a running one.
#[derive(Debug)]
pub(super) struct ReuseScope {
    scope: Option<Scope>,
    blocks: usize,
}

impl Reuse {
    /// Begins a scope that takes from this end. Blocks that were freed before do not belong to it.
    pub(super) fn begin(&self, start: Bump, end: End) -> ReuseScope {
        let blocks = self.blocks.borrow().len();
        ReuseScope { scope: self.scope.replace(Some(Scope { first: blocks, start, end })), blocks }
    }

    /// Ends the scope and resumes the one around it.
    pub(super) fn resume(&self, around: ReuseScope) {
        self.scope.set(around.scope);
        self.blocks.borrow_mut().truncate(around.blocks);
    }

    /// Frees a block if it belongs to the running scope, and returns whether it did.
    pub(super) fn give(&self, now: Bump, block: Range<usize>) -> bool {
        let Some(Scope { start, end, .. }) = self.scope.get() else { return false };
        let (offset, bytes) = now.since(start)[end as usize];
        let own = !block.is_empty() && offset <= block.start && block.end <= offset + bytes;
        let own = own && !self.kept.borrow().contains(&block.start);
        if own {
            self.blocks.borrow_mut().push(block);
        }
        own
    }

    /// Keeps the tensor at this offset from ever being freed early.
    pub(super) fn keep(&self, offset: usize) {
        self.kept.borrow_mut().push(offset);
    }

    /// Returns the offset of a block for `bytes`: the one freed last among those that fit exactly.
    #[inline]
    pub(super) fn take(&self, bytes: usize) -> Option<usize> {
        let first = self.scope.get()?.first;
        let mut blocks = self.blocks.borrow_mut();
        let own = blocks.get(first..).filter(|own| !own.is_empty())?;
        let bytes = padded(bytes)?;
        let place = first + own.iter().rposition(|block| block.len() == bytes)?;
        Some(blocks.remove(place).start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a reuse in a scope at the front of an arena, and the arena with `taken` bytes taken
    /// there.
    fn scope(taken: usize) -> (Reuse, Bump) {
        let (reuse, start) = (Reuse::default(), Bump::new(1 << 20));
        reuse.begin(start, End::Front);
        (reuse, start.take(End::Front, taken).unwrap().1)
    }

    #[test]
    fn latest_block_is_reused_first() {
        let (reuse, now) = scope(4096);
        assert!([0..256, 512..768, 1024..2048].into_iter().all(|block| reuse.give(now, block)));
        assert_eq!([200, 1, 256].map(|bytes| reuse.take(bytes)), [Some(512), Some(0), None]);
        assert_eq!(
            [512, 1000, 1000].map(|bytes| reuse.take(bytes)),
            [None, Some(1024), None],
            "a block must not be split"
        );
    }

    #[test]
    fn foreign_blocks_are_not_taken() {
        let (reuse, now) = scope(1024);
        assert!(!reuse.give(now, 1024..1280), "a range beyond the taken memory must be refused");
        assert!(!reuse.give(now, 896..1280), "partly");
        assert!(!reuse.give(now, 256..256), "nothing");
        assert!(!reuse.give(now, usize::MAX - 255..usize::MAX), "overflow memory must be refused");
        reuse.keep(256);
        assert!(!reuse.give(now, 256..512), "memory that is read later must be refused");
        assert!(!Reuse::default().give(now, 0..256), "memory must be refused between steps");
    }

    #[test]
    fn inner_scopes_do_not_share_blocks() {
        let (reuse, now) = scope(1024);
        assert!(reuse.give(now, 0..256));
        let around = reuse.begin(now, End::Front);
        let inside = now.take(End::Front, 512).unwrap().1;
        assert_eq!(reuse.take(256), None);
        assert!(!reuse.give(inside, 256..512), "memory of the outer scope must be refused");
        assert!(reuse.give(inside, 1024..1280));
        reuse.resume(around);
        assert_eq!([reuse.take(256), reuse.take(256)], [Some(0), None]);
    }

    #[test]
    fn later_tensors_avoid_nested_blocks() {
        let (reuse, now) = scope(1024);
        let around = reuse.begin(now, End::Back);
        let aside = now.take(End::Back, 256).unwrap().1;
        assert!(reuse.give(aside, (1 << 20) - 256..1 << 20));
        reuse.begin(aside, End::Front);
        assert_eq!(reuse.take(256), None, "a free block must end with its scope");
        reuse.resume(around);
        assert_eq!(reuse.take(256), None);
    }
}
