//! Driver objects that their owner has dropped and the driver still holds.
//!
//! A value may be dropped inside a recording, where no call can be made. It may also be dropped
//! after a failed call that would have reported that it is unused. Dropping therefore only hands
//! the object to `Device::retire`. That frees it at once if possible. Otherwise it is freed when
//! something else is retired, when a recording ends, or with the device.
//!
//! Invariant: an object is freed at most once, and never while a graph can reach it.

use super::driver::{Driver, Graph, Link, Pool};
use super::graph::{PinTable, Pins};
use super::staging::Slot;
use crate::error::{Error, Result};
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A driver object without an owner.
#[derive(Debug)]
pub(crate) enum DeferredFree {
    /// Memory of [`Driver::allocate`].
    Memory { address: u64, bytes: usize },
    /// A pool whose blocks have all been freed.
    Pool(Pool),
    /// A graph, and the pins that keep its memory alive.
    Graph { graph: Graph, pins: Pins },
    /// Pinned memory and its fence.
    Slot { slot: Slot, bytes: usize },
    /// A link to other ranks.
    Link(Link),
}

/// The reason why an object was not freed, and the object itself if freeing can be retried.
#[derive(Debug)]
pub(super) struct NotEnded {
    pub(super) error: Error,
    pub(super) left: Option<DeferredFree>,
}

impl DeferredFree {
    /// Returns the name of the call that frees it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "free",
            Self::Pool(_) => "destroy_pool",
            Self::Graph { .. } => "destroy_graph",
            Self::Slot { .. } => "free_pinned",
            Self::Link(_) => "leave_link",
        }
    }

    /// Returns true if a graph can reach it.
    pub(super) fn is_held(&self, pins: &PinTable) -> bool {
        matches!(*self, Self::Memory { address, bytes } if pins.holds(address, bytes))
    }

    /// Frees it after the device has finished the work that uses it.
    pub(super) fn end(self, driver: &dyn Driver, deadline: Duration) -> Result<(), Box<NotEnded>> {
        let waits = matches!(self, Self::Graph { .. } | Self::Slot { .. } | Self::Link(_));
        if waits && let Err(error) = idle(driver, self.name(), deadline) {
            return Err(Box::new(NotEnded { error, left: Some(self) }));
        }
        // SAFETY: the caller of `retire` vouched that nothing else uses it, and it is not held by a
        // graph. For memory and pools the driver waits for queued work, and for the others that
        // work is done. This call consumes it.
        let ended = unsafe {
            match self {
                Self::Memory { address, bytes } => driver.free(address, bytes),
                Self::Pool(pool) => driver.destroy_pool(pool),
                // A graph that still exists keeps its memory.
                Self::Graph { graph, pins } => driver.destroy_graph(graph).inspect_err(|_| std::mem::forget(pins)),
                Self::Slot { slot, bytes } => slot.end(driver, bytes),
                Self::Link(link) => driver.leave_link(link),
            }
        };
        ended.map_err(|error| Box::new(NotEnded { error, left: None }))
    }
}

/// Frees all objects that no graph holds, regardless of the failures of others, and then the
/// driver. Returns true if nothing failed and nothing is left. A driver that is stuck, panics, or
/// was lost while this call was queued is left as it is.
pub(super) fn end_all(
    mut things: Vec<DeferredFree>,
    pins: &PinTable,
    driver: Arc<dyn Driver>,
    lost: &OnceLock<String>,
    deadline: Duration,
) -> bool {
    let driver = ManuallyDrop::new(driver);
    if lost.get().is_some() {
        return false;
    }
    let mut all = true;
    // Freeing a graph releases its memory.
    while let Some(ready) = things.iter().position(|thing| !thing.is_held(pins)) {
        match things.remove(ready).end(&**driver, deadline) {
            Ok(()) => {}
            Err(failed) if matches!(failed.error, Error::Timeout { .. }) => return false,
            Err(_) => all = false,
        }
    }
    drop(ManuallyDrop::into_inner(driver));
    all && things.is_empty()
}

/// Waits on the driver thread until the device has finished all queued work.
fn idle(driver: &dyn Driver, call: &'static str, deadline: Duration) -> Result<()> {
    let start = Instant::now();
    while !driver.poll()? {
        let waited = start.elapsed();
        if waited >= deadline {
            return Err(Error::Timeout { call, waited, report: None });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}
