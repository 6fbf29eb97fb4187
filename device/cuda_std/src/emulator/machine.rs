//! The OS threads that run one device's launches.
//!
//! Invariant: a launch that never ends holds the threads of its own machine and the thread that called. It holds nothing that others wait
//! for. Every block runs in IEEE 754's default mode, whatever the mode of the thread that launches
//! it.

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

/// Runs launches. The first launch of several blocks starts its threads. Dropping the machine waits for none of them: they end when they
/// have nothing to do.
#[derive(Debug, Default)]
pub struct Machine {
    /// None where the system gives no threads, and under Miri. Blocks then run on the caller's thread.
    pool: OnceLock<Option<ThreadPool>>,
}

impl Machine {
    /// Runs every thread of `grid`, and returns when all have ended. While a thread of a rayon pool waits for one launch, another
    /// launch may run on that thread too.
    ///
    /// `memory` tells which range around an address the device has as one allocation. Where it answers none, nothing around the
    /// argument is compared.
    ///
    /// # Safety
    /// `words` are the arguments of `entry` ([`Words::of`]). Its contract accepted them for this grid, and the memory that they name is
    /// alive. The ranges that `memory` names can be read and written, and nobody else writes there until the launch has ended.
    ///
    /// # Errors
    /// The first [`Fault`] by block order. Later blocks may not have run.
    ///
    /// # Panics
    /// When the environment asks for a [`Mode`] that does not exist; and in a kernel, which cannot launch.
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
        // SAFETY: the ranges that `memory` names can be read and written, and nobody else writes there until the check below.
        let guards = unsafe { Guards::new(entry, words, memory) };
        // SAFETY: the words are the entry's arguments, its contract accepted them for this grid, and they name memory that is alive.
        let outcome = unsafe { self.run(&launch) };
        let around = guards.check();
        outcome?;
        around.map_err(|cause| launch.fault([0; 3], 0, cause))
    }

    /// # Safety
    /// As for [`Machine::launch`].
    unsafe fn run(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        let blocks = launch.grid.blocks();
        // Threads of the pool inherit a mode, and a kernel may change it, so each block sets it.
        let run = |index: u64| {
            float_mode::in_default(|| {
                // SAFETY: the launch's words fit its entry, as `Machine::launch` asks.
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
