//! Runs kernels on the CPU, thread by thread, with the GPU's rules made errors.
//!
//! A block's threads run one after another on one coroutine, as plain calls, until one of them waits at a barrier
//! or a lane exchange; only then does the next thread get a coroutine of its own. Blocks run in parallel on rayon's
//! threads. Invariant: a launch either runs every thread of every block to its end or returns one [`Fault`] that
//! names kernel, block and thread; which fault does not depend on timing (the lowest block wins).

mod block;
mod collective;
mod fault;
mod stack;

pub use collective::Collective;
pub use fault::{Cause, Fault};

use crate::launch::{Entry, Grid};
use block::{Block, Runner};
use rayon::prelude::*;
use std::cell::{Cell, RefCell};

thread_local! {
    static CURRENT: Cell<*const Block> = const { Cell::new(core::ptr::null()) };
    static RUNNER: RefCell<Runner> = RefCell::new(Runner::default());
}

/// What the running kernel thread asks of its block.
///
/// # Panics
/// Outside a launch: a device function was called by host code.
#[inline(always)]
pub fn current<R>(ask: impl FnOnce(&Block) -> R) -> R {
    let block = CURRENT.get();
    assert!(!block.is_null(), "a device function was called outside a launch");
    // SAFETY: `Runner::run` sets the pointer for the time that its block is alive and on this OS thread, where the
    // kernel runs too; it resets it before the block goes.
    ask(unsafe { &*block })
}

/// Runs every thread of `grid` and returns when all have ended.
///
/// # Safety
/// `words` are the arguments of `entry` ([`crate::launch::Words::of`]), and its contract accepted them for this grid.
///
/// # Errors
/// The first [`Fault`] by block order. Blocks of a higher number may not have run.
pub unsafe fn launch(entry: &Entry, grid: Grid, words: &[u64]) -> Result<(), Fault> {
    let blocks = grid.blocks();
    // SAFETY: the caller's promise, block by block.
    let run = |index: u64| RUNNER.with_borrow_mut(|runner| unsafe { runner.run(entry, grid, index, words) });
    match blocks {
        0 => Ok(()),
        1 => run(0),
        _ => (0..blocks).into_par_iter().filter_map(|index| run(index).err()).find_first(|_| true).map_or(Ok(()), Err),
    }
}
