//! What its owner has let go and the driver still has.
//!
//! A value may be dropped where no call can be made, inside a recording, or when a call fails that would tell that nothing uses
//! it any more. So dropping only retires: `Device::retire` ends a thing at once where it can, and otherwise whenever something
//! else is retired, when a recording is over, and at last with the device. Invariant: a thing is ended at most once, and not
//! while a graph can reach it.

use super::calls::{Driver, Graph, Link, Pool};
use super::pins::{PinTable, Pins};
use super::ring::Slot;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A thing of the driver's without an owner.
#[derive(Debug)]
pub(crate) enum Retired {
    /// So many bytes of [`Driver::allocate`].
    Memory { address: u64, bytes: usize },
    /// A pool whose blocks have been given back.
    Pool(Pool),
    /// A graph, and what keeps the memory alive that it names.
    Graph { graph: Graph, pins: Pins },
    /// So many page-locked bytes, and their fence.
    Slot { slot: Slot, bytes: usize },
    /// A link with other ranks.
    Link(Link),
}

/// Why a thing was not ended, and the thing itself if it can be tried again.
#[derive(Debug)]
pub(super) struct NotEnded {
    pub(super) error: Error,
    pub(super) left: Option<Retired>,
}

impl Retired {
    /// The call that ends it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "free",
            Self::Pool(_) => "destroy_pool",
            Self::Graph { .. } => "destroy_graph",
            Self::Slot { .. } => "free_pinned",
            Self::Link(_) => "leave_link",
        }
    }

    /// Whether a graph can reach it.
    pub(super) fn is_held(&self, pins: &PinTable) -> bool {
        matches!(*self, Self::Memory { address, bytes } if pins.holds(address, bytes))
    }

    /// Ends it, once the device has done what uses it.
    pub(super) fn end(self, driver: &dyn Driver, deadline: Duration) -> Result<(), Box<NotEnded>> {
        let waits = matches!(self, Self::Graph { .. } | Self::Slot { .. } | Self::Link(_));
        if waits && let Err(error) = idle(driver, self.name(), deadline) {
            return Err(Box::new(NotEnded { error, left: Some(self) }));
        }
        // SAFETY: who retired it said that nothing else uses it; it is not held, what was queued with it is done or, for memory and
        // pools, waited for by the driver, and it is gone with this call.
        let ended = unsafe {
            match self {
                Self::Memory { address, bytes } => driver.free(address, bytes),
                Self::Pool(pool) => driver.destroy_pool(pool),
                // One that is still there keeps its memory.
                Self::Graph { graph, pins } => driver.destroy_graph(graph).inspect_err(|_| std::mem::forget(pins)),
                Self::Slot { slot, bytes } => slot.end(driver, bytes),
                Self::Link(link) => driver.leave_link(link),
            }
        };
        ended.map_err(|error| Box::new(NotEnded { error, left: None }))
    }
}

/// Ends all that no graph holds, each whatever became of the others, and then the driver; whether nothing has failed or is left. A
/// driver that is stuck is left as it is.
pub(super) fn end_all(mut things: Vec<Retired>, pins: &PinTable, driver: Arc<dyn Driver>, deadline: Duration) -> bool {
    let mut all = true;
    // A graph that ends lets go of memory.
    while let Some(ready) = things.iter().position(|thing| !thing.is_held(pins)) {
        match things.remove(ready).end(&*driver, deadline) {
            Ok(()) => {}
            Err(failed) if matches!(failed.error, Error::Timeout { .. }) => {
                std::mem::forget(driver);
                return false;
            }
            Err(_) => all = false,
        }
    }
    all && things.is_empty()
}

/// Waits, on the lane, until the device has done all that was queued.
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
