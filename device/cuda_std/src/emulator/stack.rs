//! Coroutine stacks that start on different cache sets.
//!
//! Stacks are page-aligned, so the hot frames of 256 coroutines would share a few cache sets, and
//! evict each other at every barrier. Each stack therefore starts a different number of bytes below
//! its top, one of 32 "colors".

use corosensei::stack::{DefaultStack, Stack, StackPointer};

/// The bytes that a coroutine may use. A kernel's frames are small: no recursion, no large arrays.
/// But without optimization they take more than 64 KiB. Pages that no frame reaches cost no memory.
pub(super) const STACK_BYTES: usize = 256 * 1024;
/// The colors: distances from the top. Their step keeps the frames of neighbors on different cache
/// lines.
const COLOURS: usize = 32;
const COLOUR_BYTES: usize = 576;
/// The start of a stack within a cache line. LLVM spills 32-byte vectors to slots aligned to 16
/// bytes. The frames of this emulator and this start keep such a slot within one line, which makes
/// a matrix multiply 10 % faster.
const START_BYTES: usize = 16;

/// A stack that starts `offset` bytes below its top.
pub(super) struct ColouredStack {
    stack: DefaultStack,
    offset: usize,
}

impl ColouredStack {
    /// Returns the `index`th stack of a block.
    pub(super) fn new(index: usize) -> std::io::Result<Self> {
        let offset = (index % COLOURS) * COLOUR_BYTES + START_BYTES;
        Ok(Self { stack: DefaultStack::new(STACK_BYTES + COLOURS * COLOUR_BYTES)?, offset })
    }
}

// SAFETY: base and limit are those of a real stack with its guard page. The base is lowered by a
// multiple of 16, which keeps its alignment, and by less than was added to the size.
unsafe impl Stack for ColouredStack {
    fn base(&self) -> StackPointer {
        StackPointer::new(self.stack.base().get() - self.offset).expect("a stack lies above address zero")
    }

    fn limit(&self) -> StackPointer {
        self.stack.limit()
    }
}
