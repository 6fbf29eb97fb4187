//! What tensors leave to others of their size, when their owner gives them back within a step.
//!
//! Invariant: a block is handed out again to the scope that took it alone, never within a scope in that one or behind it. So it goes when its
//! scope ends, as it would if it had never been given back.

#![forbid(unsafe_code)]

use super::layout::{Bump, End, padded};
use std::cell::{Cell, RefCell};
use std::ops::Range;

/// The blocks that wait, and whose they are.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    /// Of all scopes that run, the innermost one's last.
    blocks: RefCell<Vec<Range<usize>>>,
    scope: Cell<Option<Scope>>,
    /// Where tensors lie that are read when the step is over.
    kept: RefCell<Vec<usize>>,
}

/// A scope that runs.
#[derive(Clone, Copy, Debug)]
struct Scope {
    /// Its first block.
    first: usize,
    /// Where the arena stood when it began, and where it takes from.
    start: Bump,
    end: End,
}

/// The scope around one that runs.
#[derive(Debug)]
pub(super) struct Around {
    scope: Option<Scope>,
    blocks: usize,
}

impl Reuse {
    /// A scope begins, which takes from this end. Nothing that was given back before is its own.
    pub(super) fn begin(&self, start: Bump, end: End) -> Around {
        let blocks = self.blocks.borrow().len();
        Around { scope: self.scope.replace(Some(Scope { first: blocks, start, end })), blocks }
    }

    /// The scope is over, and the one around it goes on.
    pub(super) fn resume(&self, around: Around) {
        self.scope.set(around.scope);
        self.blocks.borrow_mut().truncate(around.blocks);
    }

    /// Takes a block back, if it is one of the running scope's own.
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

    /// The tensor at this offset is never taken back.
    pub(super) fn keep(&self, offset: usize) {
        self.kept.borrow_mut().push(offset);
    }

    /// The offset of a block for `bytes`: the last that was given back of those that fit exactly.
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

    /// A reuse in a scope at the front of an arena, and the arena with so many bytes taken there.
    fn scope(taken: usize) -> (Reuse, Bump) {
        let (reuse, start) = (Reuse::default(), Bump::new(1 << 20));
        reuse.begin(start, End::Front);
        (reuse, start.take(End::Front, taken).unwrap().1)
    }

    #[test]
    fn the_last_block_of_a_size_comes_first_and_each_once() {
        let (reuse, now) = scope(4096);
        assert!([0..256, 512..768, 1024..2048].into_iter().all(|block| reuse.give(now, block)));
        assert_eq!([200, 1, 256].map(|bytes| reuse.take(bytes)), [Some(512), Some(0), None]);
        assert_eq!([512, 1000, 1000].map(|bytes| reuse.take(bytes)), [None, Some(1024), None], "no block is cut");
    }

    #[test]
    fn what_is_not_the_scopes_own_is_not_taken_back() {
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
    fn a_scope_within_takes_none_from_around_it_and_leaves_none() {
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
    fn what_is_made_behind_a_scope_aside_has_none_of_its_blocks() {
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
