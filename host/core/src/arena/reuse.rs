//! Reuse of the memory of tensors that are freed within a step, by later tensors of the same size.
//!
//! Invariant: a freed block is handed out only to the scope that took it, never to a nested or
//! later scope. Its memory is therefore reclaimed when its scope ends, as if it had never been
//! freed early.

#![forbid(unsafe_code)]

use super::layout::{Bump, End, padded};
use std::cell::{Cell, RefCell};
use std::ops::Range;

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
        assert_eq!([512, 1000, 1000].map(|bytes| reuse.take(bytes)), [None, Some(1024), None], "no block is cut");
    }

    #[test]
    fn foreign_blocks_are_not_taken() {
        let (reuse, now) = scope(1024);
        assert!(!reuse.give(now, 1024..1280), "behind what was taken");
        assert!(!reuse.give(now, 896..1280), "partly");
        assert!(!reuse.give(now, 256..256), "nothing");
        assert!(!reuse.give(now, usize::MAX - 255..usize::MAX), "of the overflow");
        reuse.keep(256);
        assert!(!reuse.give(now, 256..512), "read later");
        assert!(!Reuse::default().give(now, 0..256), "between steps");
    }

    #[test]
    fn inner_scopes_do_not_share_blocks() {
        let (reuse, now) = scope(1024);
        assert!(reuse.give(now, 0..256));
        let around = reuse.begin(now, End::Front);
        let inside = now.take(End::Front, 512).unwrap().1;
        assert_eq!(reuse.take(256), None);
        assert!(!reuse.give(inside, 256..512), "of the scope around");
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
        assert_eq!(reuse.take(256), None, "it goes with the scope");
        reuse.resume(around);
        assert_eq!(reuse.take(256), None);
    }
}
