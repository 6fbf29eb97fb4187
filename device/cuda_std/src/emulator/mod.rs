//! The emulator: it runs kernels on the CPU, thread by thread, and reports every violation of a
//! GPU's rules as an error.
//!
//! A block's threads run one after another on one coroutine, as plain calls, until one of them
//! waits at a barrier or a lane exchange. Only then does the next thread get its own coroutine.
//! Blocks run in parallel on the threads of a [`Machine`]. A [`Mode`] enables race detection, or
//! runs blocks and threads in a shuffled order; see `docs/races.md`.
//!
//! ```text
//! block of 96 threads            warp 0: threads 0..31    warp 1: 32..63         warp 2: 64..95
//!   runs until it waits or ends  0, 1, .. 31              (after warp 0)         (after warp 1)
//!   at a lane exchange           the lanes resume as soon as all have arrived
//!   at a barrier                 waits                    waits                  .. then all resume
//! coroutines in use              one for each thread that waits, and one more
//! ```
//! Invariant: a launch either runs every thread of every block to its end, or returns one [`Fault`]
//! that names kernel, block and thread. The fault is the fault of the lowest block, independent of
//! timing. The exception is a race between blocks, which the later of the two reports.

pub mod access;
mod arguments;
mod block;
mod bounds;
mod carrier;
mod clock;
mod collective;
mod detector;
mod fault;
mod guards;
mod lanes;
mod machine;
pub mod mbarrier;
mod mode;
mod panics;
pub mod products;
mod resolve;
mod shadow;
mod shared;
mod site;
mod stack;
mod tally;
mod trap;

pub use block::Block;
pub use collective::{Collective, gather};
pub use fault::{Access, Cause, Fault, Kind, MemoryLocation};
pub use lanes::{lanes, meet};
pub use machine::Machine;
pub use mode::Mode;
#[doc(hidden)]
pub use tally::{Touched, tally};

use std::cell::Cell;

/// The threads in a warp.
const WARP: u32 = 32;

thread_local! {
    static CURRENT: Cell<*const Block> = const { Cell::new(core::ptr::null()) };
}

/// Calls `ask` with the running kernel thread's block.
///
/// # Panics
/// Panics outside a launch, when host code calls a device function.
#[inline(always)]
pub fn current<R>(ask: impl FnOnce(&Block) -> R) -> R {
    // SAFETY: `ask` takes a reference of any lifetime, so it cannot keep the block.
    ask(unsafe { current_block() })
}

/// Returns the block of the running kernel thread. It serves code in which a closure, which may
/// stay a call, costs too much.
///
/// # Safety
/// The kernel thread does not keep the reference past its end.
///
/// # Panics
/// Panics like [`current`].
#[inline(always)]
unsafe fn current_block<'b>() -> &'b Block {
    // `try_with` is inlined, for the reason given in `access::thread_watch`.
    let block = CURRENT.try_with(Cell::get).unwrap_or(core::ptr::null());
    assert!(!block.is_null(), "a device function was called outside a launch");
    // SAFETY: `Runner::run` sets the pointer on this OS thread, where the kernel runs too, while
    // its block is alive. It resets the pointer before the block is dropped, and before threads
    // that still wait are unwound.
    unsafe { &*block }
}

/// True if the running version of the kernel was compiled for registers of 16 floats.
#[inline(always)]
pub fn is_wide() -> bool {
    current(Block::is_wide)
}
