//! Reads of shared memory by the products of a warp that run while its lanes do other work (wgmma).
//!
//! The emulator makes the reads when the products start. To race detection they are accesses of a
//! thread of their own, one for each warp. They follow what the lanes have done before, and only a
//! wait for the products follows them. A wait does not order the lanes' own accesses: only a
//! barrier does, as on the GPU.
//!
//! ```text
//! threads of the block   0 .. 383      the products of warp 0: 416, of warp 1: 448, ..
//! ```
//! Invariant: a lane that has waited follows the reads of all products that its warp has started.

use super::detector::ENGINES;
use super::lanes::meet;
use super::{Block, WARP, current};

/// Makes the running thread's reads, up to [`end`], reads of the products that its warp starts.
#[inline]
pub fn begin() {
    current(|block| block.begin_engine(engine(block)));
}

/// Ends what [`begin`] has begun.
#[inline]
pub fn end() {
    current(Block::end_engine);
}

/// Waits for the products that all lanes of the warp have started.
#[track_caller]
pub fn wait() {
    meet();
    current(|block| block.follows(engine(block)));
}

/// Returns the number among the threads of the products of the running thread's warp.
fn engine(block: &Block) -> u32 {
    block.threads.next_multiple_of(WARP) + ENGINES + block.thread_idx()[0] / WARP * WARP
}

impl Block {
    /// Makes the accesses to shared memory up to [`end_engine`](Self::end_engine) those of the
    /// engine with this number among the threads. They follow what the running thread has done.
    pub(super) fn begin_engine(&self, engine: u32) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().begin_engine(self.thread_idx()[0], engine);
        }
        self.engine.set(Some(engine));
    }

    /// Called when the engine has made its accesses.
    pub(super) fn end_engine(&self) {
        self.engine.set(None);
    }

    /// Called when the running thread has waited for the accesses of this engine.
    fn follows(&self, engine: u32) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().follows(self.thread_idx()[0], engine);
        }
    }
}
