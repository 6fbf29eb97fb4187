//! The launches of one step, which the step does not wait for one by one.
//!
//! ```text
//! step    prepare 1 | prepare 2 | prepare 3 | ..                 | end: waits for the last
//! lane              | launch 1  | launch 2  | launch 3 | ..
//! ```
//! A driver whose launch only queues a kernel has nothing to say but that it failed. So a launch is posted to the lane, and the step goes
//! on; of any other driver it is waited for. Invariant: behind a posted launch that failed none of the same step runs, and
//! [`Launches::settle`] tells of it; at most [`AHEAD`] stand on the lane, so that a lane that is stuck costs one deadline.

use super::calls::Driver;
use super::device::Device;
use super::lane;
use super::patience;
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Extent, Grid, Words};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Launches that the step may be ahead of the lane: enough for what it does between two of them.
const AHEAD: u64 = 8;
/// How long the step looks for the lane before it sleeps: as long as a driver takes for so many launches.
const AWAKE: Duration = Duration::from_micros(50);

/// What a step knows of its launches.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    posted: Cell<u64>,
    made: RefCell<Arc<Made>>,
    /// The memory that launches use, while somebody watches.
    watched: RefCell<Option<Vec<Extent>>>,
}

/// What the lane has made of them.
#[derive(Debug, Default)]
struct Made {
    /// How many it is done with.
    count: AtomicU64,
    /// The first failure.
    failure: OnceLock<Error>,
}

impl Device {
    /// Makes a launch: one of a step's, or else waits for it.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid; their memory is of this device or a parent's, and alive until what is
    /// called next.
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
        // SAFETY: what this function asks for is what the driver asks for: the lane makes the call before any that is made next. Recorded
        // memory is pinned by the rehearsal.
        let launch = move |driver: &dyn Driver| unsafe { driver.launch(&entry, grid, &words) };
        let launch = move |driver: &dyn Driver| launch(driver).map_err(|error| error.of_kernel(entry.name));
        match of_step {
            Some(launches) => launches.push(self, deadline, launch),
            None => self.call("launch", deadline, launch),
        }
    }
}

impl Made {
    /// An error if a launch has failed: it.
    fn failure(&self) -> Result<()> {
        self.failure.get().cloned().map_or(Ok(()), Err)
    }

    /// One more is made, or is not.
    fn done(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            // Of those behind the first it is the same.
            let _ = self.failure.set(error);
        }
        self.count.fetch_add(1, Ordering::Release);
    }
}

impl Launches {
    /// Runs what makes launches, and returns the memory that these use, too.
    pub(crate) fn watch<R>(&self, make: impl FnOnce() -> R) -> (R, Vec<Extent>) {
        self.watched.replace(Some(Vec::new()));
        let made = make();
        (made, self.watched.take().unwrap_or_default())
    }

    /// Another step begins. What the one before left on the lane, when it panicked, tells nobody.
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
            // Its caller hears of it at once.
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

    /// Waits until the lane is done with all but so many.
    fn wait(&self, device: &Device, left: u64, deadline: Duration) -> Result<()> {
        let made = self.made.borrow();
        let caught_up = || (self.posted.get() - made.count.load(Ordering::Acquire) <= left).then_some(());
        // Else a call of its own tells, behind all of them.
        lane::watch(AWAKE, caught_up).map_or_else(|| device.call("launch", deadline, |_| Ok(())), Ok)
    }

    /// What has become of a part of the step, once the driver has taken all launches.
    ///
    /// # Errors
    /// That of the first launch that failed; else the part's own, which came before that of this wait.
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
