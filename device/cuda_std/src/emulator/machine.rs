//! The OS threads that run one device's launches.
//!
//! Invariant: a launch that never ends blocks only the threads of its own machine and the calling
//! thread. Every block runs in IEEE 754's default mode, independent of the launching thread's mode.

use super::arguments::Arguments;
use super::block::{Launch, Runner};
use super::guards::Guards;
use super::mode::{Mode, Order};
use super::{CURRENT, Fault, panics};
use crate::float_mode;
use crate::launch::{Entry, Grid, Words};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

thread_local! {
    static RUNNER: RefCell<Runner> = RefCell::new(Runner::new());
}

/// A pool of OS threads that runs launches. The first launch of several blocks starts the threads.
/// Dropping the machine does not wait for them: they end when they are idle.
#[derive(Debug, Default)]
pub struct Machine {
    /// The pool. None if the system cannot start threads, and under Miri. Blocks then run on the
    /// caller's thread.
    pool: OnceLock<Option<ThreadPool>>,
}

impl Machine {
    /// Runs every thread of `grid`, and returns when all have ended. While a thread of a rayon pool
    /// waits for one launch, another launch may run on that thread too.
    ///
    /// `memory` returns the device's allocation that contains an address. If it returns none,
    /// nothing around the argument is compared.
    ///
    /// # Safety
    /// `words` are the arguments of `entry` ([`Words::of`]). Its contract accepted them for this
    /// grid, and the memory that they refer to is alive. The ranges that `memory` returns can be
    /// read and written, and only the launch writes there until it has ended.
    ///
    /// # Errors
    /// Returns the first [`Fault`] by block order. Later blocks may not have run.
    ///
    /// # Panics
    /// Panics if the environment selects a [`Mode`] that does not exist, and in a kernel, which
    /// cannot launch.
    pub unsafe fn launch(
        &self,
        entry: &Entry,
        grid: Grid,
        words: &Words,
        memory: &dyn Fn(u64) -> Option<Range<u64>>,
    ) -> Result<(), Fault> {
        assert!(CURRENT.get().is_null(), "a kernel cannot launch a kernel");
        panics::keep_quiet();
        let Mode { races, shuffle } = Mode::current();
        let arguments = Arguments::new(entry, words, races).into();
        let launch = Launch { entry, grid, words, arguments, watched: races, shuffle };
        // SAFETY: the ranges that `memory` returns can be read and written, and only the launch
        // writes there until the check below.
        let guards = unsafe { Guards::new(entry, words, memory) };
        // SAFETY: the words are the entry's arguments, its contract accepted them for this grid,
        // and they refer to memory that is alive.
        let outcome = unsafe { self.run(&launch) };
        let around = guards.check();
        outcome?;
        around.map_err(|cause| launch.fault([0; 3], 0, cause))
    }

    /// # Safety
    /// The caller meets the requirements of [`Machine::launch`].
    unsafe fn run(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        let blocks = launch.grid.blocks();
        // Threads of the pool inherit a mode, and a kernel may change it, so each block sets it.
        let run = |index: u64| {
            float_mode::in_default(|| {
                // SAFETY: the caller of `Machine::launch` guarantees that the launch's words fit
                // its entry.
                RUNNER.with_borrow_mut(|runner| unsafe { runner.run(launch, index) })
            })
        };
        if let Some(seed) = launch.shuffle {
            let blocks = u32::try_from(blocks).expect("a shuffled launch has fewer than 2^32 blocks");
            return Order::new(blocks, seed, u64::MAX).iter().try_for_each(|index| run(u64::from(index)));
        }
        match self.pool().filter(|_| blocks > 1) {
            None => (0..blocks).try_for_each(run),
            Some(pool) => pool.install(|| {
                let faults = (0..blocks).into_par_iter().filter_map(|index| run(index).err());
                faults.find_first(|_| true).map_or(Ok(()), Err)
            }),
        }
    }

    fn pool(&self) -> Option<&ThreadPool> {
        let start = || ThreadPoolBuilder::new().thread_name(|at| format!("emulator {at}")).build().ok();
        self.pool.get_or_init(|| if cfg!(miri) { None } else { start() }).as_ref()
    }
}
