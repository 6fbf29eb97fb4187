//! Runs kernels on the CPU, thread by thread, with the GPU's rules made errors.
//!
//! A block's threads run one after another on one coroutine, as plain calls, until one of them waits at a barrier
//! or a lane exchange; only then does the next thread get a coroutine of its own. Blocks run in parallel on rayon's
//! threads. In a [`Mode`] launches are watched for races, or run in a shuffled order; `docs/races.md` tells how.
//!
//! Invariant: a launch either runs every thread of every block to its end or returns one [`Fault`] that names kernel,
//! block and thread; which fault does not depend on timing (the lowest block wins), but for a race between blocks, which
//! the later of the two reports.

pub mod access;
mod arguments;
mod block;
mod carrier;
mod clock;
mod collective;
mod detector;
mod fault;
mod lanes;
mod mode;
mod resolve;
mod shadow;
mod site;
mod stack;

pub use block::Block;
pub use collective::{Collective, gather};
pub use fault::{Access, Cause, Fault, Kind, Place};
pub use lanes::lanes;
pub use mode::Mode;

use crate::launch::{Entry, Grid, Words};
use arguments::Arguments;
use block::{Launch, Runner};
use mode::Order;
use rayon::prelude::*;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Threads in a warp.
const WARP: u32 = 32;

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
    // SAFETY: the block outlives the call.
    ask(unsafe { current_block() })
}

/// The block of the running kernel thread; for where a closure, which may stay a call, costs too much.
///
/// # Safety
/// The kernel thread does not keep it beyond its end.
///
/// # Panics
/// As for [`current`].
#[inline(always)]
unsafe fn current_block<'b>() -> &'b Block {
    let block = CURRENT.get();
    assert!(!block.is_null(), "a device function was called outside a launch");
    // SAFETY: `Runner::run` sets the pointer for the time that its block is alive and on this OS thread, where the
    // kernel runs too; it resets it before the block goes.
    unsafe { &*block }
}

/// Whether the version of the kernel that runs was compiled for registers of 16 floats.
#[inline(always)]
pub fn is_wide() -> bool {
    current(Block::is_wide)
}

/// Runs every thread of `grid` and returns when all have ended.
///
/// # Safety
/// `words` are the arguments of `entry` ([`Words::of`]), and its contract accepted them for this grid.
///
/// # Errors
/// The first [`Fault`] by block order. Blocks that come later may not have run.
///
/// # Panics
/// When the environment asks for a [`Mode`] that there is not.
pub unsafe fn launch(entry: &Entry, grid: Grid, words: &Words) -> Result<(), Fault> {
    let blocks = grid.blocks();
    let Mode { races, shuffle } = Mode::current();
    let arguments = races.then(|| Arc::new(Arguments::new(entry, words)));
    let launch = Launch { entry, grid, words: words.as_slice(), arguments, shuffle };
    // SAFETY: the caller's promise, block by block.
    let run = |index: u64| RUNNER.with_borrow_mut(|runner| unsafe { runner.run(&launch, index) });
    if let Some(seed) = shuffle {
        let blocks = u32::try_from(blocks).expect("a shuffled launch has fewer than 2^32 blocks");
        return Order::new(blocks, seed, u64::MAX).iter().try_for_each(|index| run(u64::from(index)));
    }
    match blocks {
        0 => Ok(()),
        1 => run(0),
        _ => (0..blocks).into_par_iter().filter_map(|index| run(index).err()).find_first(|_| true).map_or(Ok(()), Err),
    }
}
