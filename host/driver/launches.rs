//! The launches of one step, which the step does not wait for one by one.
//!
//! ```text
//! step    prepare 1 | prepare 2 | prepare 3 | ..                 | end: waits for the last
//! lane              | launch 1  | launch 2  | launch 3 | ..
//! ```
//! A driver whose launch only queues a kernel has nothing to say but that it failed. So a launch is handed over to the lane, and
//! every [`AHEAD`]th is waited for: a lane that is stuck costs one deadline, and what waits on it is bounded. Invariant: behind a launch that
//! failed none of the same step runs, and [`Launches::settle`] tells of it.

#![forbid(unsafe_code)]

use super::device::Device;
use super::patience;
use crate::error::{Error, Result};
use std::cell::{Cell, RefCell};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Launches that are handed over before one is waited for.
const AHEAD: u32 = 16;

/// What a step knows of its launches.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    /// The first failure, once the lane has met one.
    failure: RefCell<Arc<OnceLock<Error>>>,
    /// Launches since the last that was waited for.
    unheard: Cell<u32>,
}

impl Launches {
    /// Another step begins. What the one before left on the lane, when it panicked, tells nobody.
    pub(crate) fn begin(&self) {
        *self.failure.borrow_mut() = Arc::default();
        self.unheard.set(0);
    }

    /// Makes one more launch, `call`.
    pub(super) fn push(
        &self,
        device: &Device,
        deadline: Duration,
        call: impl FnOnce(&dyn super::Driver) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let failure = Arc::clone(&self.failure.borrow());
        let unless_failed = move |driver: &dyn super::Driver| {
            failure.get().cloned().map_or(Ok(()), Err)?;
            call(driver).inspect_err(|error| drop(failure.set(error.clone())))
        };
        let handed_over = device.launch_only_queues() && !patience::is_limited();
        if handed_over && self.unheard.get() < AHEAD {
            self.unheard.set(self.unheard.get() + 1);
            return device.post("launch", unless_failed);
        }
        self.unheard.set(0);
        device.call("launch", deadline, unless_failed)
    }

    /// Waits until the driver has taken all launches.
    ///
    /// # Errors
    /// That of the first that failed.
    pub(crate) fn settle(&self, device: &Device, deadline: Duration) -> Result<()> {
        if self.unheard.replace(0) > 0 {
            device.call("launch", deadline, |_| Ok(()))?;
        }
        self.failure()
    }

    /// The first failure of those that have been waited for.
    ///
    /// # Errors
    /// It.
    pub(crate) fn failure(&self) -> Result<()> {
        self.failure.borrow().get().cloned().map_or(Ok(()), Err)
    }
}
