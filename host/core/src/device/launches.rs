//! The launches of one step. The step does not wait for each of them.
//!
//! ```text
//! step              | prepare 1 | prepare 2 | prepare 3 | ..      | end: waits for the last
//! driver thread     |           | launch 1  | launch 2  | launch 3 | ..
//! ```
//! A driver whose launch only queues a kernel reports nothing but failures. Such a launch is posted
//! to the driver thread, and the step continues. For any other driver the step waits.
//!
//! Invariant: after a posted launch that failed, no later launch of the same step runs, and
//! [`Launches::settle`] returns the error. At most [`AHEAD`] launches are queued on the driver
//! thread, so a stuck thread costs one deadline.

use super::calls::Driver;
use super::driver_thread;
use super::handle::Device;
use super::patience;
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Extent, Grid, Words};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The largest number of launches that are queued ahead. It covers the step's work between two of
/// them.
const AHEAD: u64 = 8;
/// The time that the step polls for the driver thread before it sleeps, which is about the driver's
/// time for this many launches.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// The state of a step's launches.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    posted: Cell<u64>,
    made: RefCell<Arc<Made>>,
    /// The memory that launches use, while it is being watched.
    watched: RefCell<Option<Vec<Extent>>>,
}

/// The progress of the driver thread.
#[derive(Debug, Default)]
struct Made {
    /// The number of finished launches.
    count: AtomicU64,
    /// The first failure.
    failure: OnceLock<Error>,
}

impl Device {
    /// Makes a launch. It is posted if it belongs to a step, and waited for otherwise.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid. Their memory belongs to this
    /// device or a parent, and is alive until the next call.
    pub(crate) unsafe fn launch(
        &self,
        of_step: Option<&Launches>,
        (entry, grid, words): (Entry, Grid, Words),
        deadline: Duration,
    ) -> Result<()> {
        if let Some(launches) = of_step
            && let Some(watched) = &mut *launches.watched.borrow_mut()
        {
            watched.extend(words.extents());
        }
        let deadline = patience::of_launch(deadline);
        // SAFETY: this function's requirements are those of the driver. The driver thread makes the
        // call before any later one. Recorded memory is pinned by the dry run.
        let launch = move |driver: &dyn Driver| unsafe { driver.launch(&entry, grid, &words) };
        let launch = move |driver: &dyn Driver| launch(driver).map_err(|error| error.of_kernel(entry.name));
        match of_step {
            Some(launches) => launches.push(self, deadline, launch),
            None => self.call("launch", deadline, launch),
        }
    }
}

impl Made {
    /// Returns the first launch error, if a launch has failed.
    fn failure(&self) -> Result<()> {
        self.failure.get().cloned().map_or(Ok(()), Err)
    }

    /// Records the result of a launch.
    fn done(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            // Launches after the first failure have the same error.
            let _ = self.failure.set(error);
        }
        self.count.fetch_add(1, Ordering::Release);
    }
}

impl Launches {
    /// Runs `make`, and also returns the memory that its launches use.
    pub(crate) fn watch<R>(&self, make: impl FnOnce() -> R) -> (R, Vec<Extent>) {
        self.watched.replace(Some(Vec::new()));
        let made = make();
        (made, self.watched.take().unwrap_or_default())
    }

    /// Begins another step. Pending launches of an earlier step that panicked no longer report to
    /// anyone.
    pub(crate) fn begin(&self) {
        self.watched.take();
        if self.posted.replace(0) > 0 {
            *self.made.borrow_mut() = Arc::default();
        }
    }

    /// Makes one more launch.
    pub(super) fn push(
        &self,
        device: &Device,
        deadline: Duration,
        launch: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if !device.launch_only_queues() || patience::is_limited() {
            // The caller gets the error at once.
            return device.call("launch", deadline, launch);
        }
        self.wait(device, AHEAD - 1, deadline)?;
        let made = self.made.borrow();
        made.failure()?;
        let (before, after) = (Arc::clone(&made), Arc::clone(&made));
        let unless_failed = move |driver: &dyn Driver| before.failure().and_then(|()| launch(driver));
        device.post("launch", unless_failed, move |outcome| after.done(outcome))?;
        self.posted.set(self.posted.get() + 1);
        Ok(())
    }

    /// Waits until at most `left` launches are pending.
    fn wait(&self, device: &Device, left: u64, deadline: Duration) -> Result<()> {
        let made = self.made.borrow();
        let caught_up = || (self.posted.get() - made.count.load(Ordering::Acquire) <= left).then_some(());
        // If polling is not enough, a call after all of them waits.
        driver_thread::watch(SPIN_TIME, caught_up).map_or_else(|| device.call("launch", deadline, |_| Ok(())), Ok)
    }

    /// Returns the result of a part of the step after the driver has taken all its launches.
    ///
    /// # Errors
    /// The error of the first launch that failed. Otherwise the part's own error, which came before
    /// that of this wait.
    pub(crate) fn settle<R>(&self, device: &Device, deadline: Duration, part: Result<R>) -> Result<R> {
        // A step without launches costs nothing here.
        if self.posted.get() == 0 {
            return part;
        }
        let waited = self.wait(device, 0, deadline);
        self.made.borrow().failure()?;
        let part = part?;
        waited.map(|()| part)
    }
}
