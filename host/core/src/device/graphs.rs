//! Builds a graph that the device replays from recorded launches.
//!
//! The launches are listed before the driver receives any (see `dry_run`), so a capture is one
//! short job on the driver thread. It loads the kernels, begins, queues, ends, checks the captured
//! nodes, and instantiates.
//!
//! Invariant: the capture is ended on the thread that began it, whatever fails in between. Only
//! graphs that contain exactly the listed kernels are returned.

use super::borrow_table::Use;
use super::calls::{Driver, Graph, Nodes};
use super::deferred_free::DeferredFree;
use super::dry_run::Launch;
use super::handle::Device;
use super::pins::Pins;
use crate::error::{Error, Result};
use std::collections::HashSet;

/// A graph of a device, with all memory that it names.
#[derive(Debug)]
pub(crate) struct SealedGraph {
    device: Device,
    graph: Graph,
    kernels: usize,
    /// All memory of its launches, in address order.
    uses: Vec<Use>,
    /// The pins of that memory, set until the graph ends.
    pins: Option<Pins>,
}

impl SealedGraph {
    /// Captures `launches`, whose memory `pins` hold.
    pub(crate) fn capture(device: &Device, launches: Vec<Launch>, pins: Pins) -> Result<Self> {
        let (kernels, uses) = (launches.len(), uses(&launches));
        let captured = device.call("capture", device.deadline(), move |driver| capture(driver, &launches));
        Ok(Self { device: device.clone(), graph: captured?, kernels, uses, pins: Some(pins) })
    }

    /// Returns the number of the graph's launches.
    pub(crate) fn kernels(&self) -> usize {
        self.kernels
    }

    /// Queues all launches once no running step relies on the memory that they write.
    pub(crate) fn replay(&self) -> Result<()> {
        let graph = self.graph;
        // SAFETY: `capture` instantiated the graph, and the pins keep the memory of its launches
        // alive.
        self.device.replay(&self.uses, move |driver| unsafe { driver.replay(graph) })
    }
}

impl Drop for SealedGraph {
    fn drop(&mut self) {
        if let Some(pins) = self.pins.take() {
            // SAFETY: the graph belongs to this device, and its only name is dropped here. At most
            // replays of it are queued.
            unsafe { self.device.retire(DeferredFree::Graph { graph: self.graph, pins }) };
        }
    }
}

/// Returns the memory of launches, each range once.
fn uses(launches: &[Launch]) -> Vec<Use> {
    let extents = launches.iter().flat_map(|launch| launch.words.extents()).filter(|extent| extent.length > 0);
    let mut uses: Vec<Use> = extents
        .map(|extent| Use { bytes: extent.address..extent.address + extent.bytes() as u64, written: extent.written })
        .collect();
    uses.sort_by_key(|used| (used.bytes.start, used.bytes.end, used.written));
    uses.dedup();
    uses
}

/// Captures on one thread from begin to end.
fn capture(driver: &dyn Driver, launches: &[Launch]) -> Result<Graph> {
    let mut loaded = HashSet::new();
    for Launch { entry, .. } in launches {
        if loaded.insert(entry.name) {
            driver.load(entry)?;
        }
    }
    driver.begin_capture()?;
    let queued = launches.iter().try_for_each(|Launch { entry, grid, words }| {
        // SAFETY: the contract accepted these arguments when they were listed, and pins hold their
        // memory.
        unsafe { driver.launch(entry, *grid, words) }
    });
    // A driver that fails to end may still be capturing. The second call ends that.
    let ended = driver.end_capture().inspect_err(|_| {
        if let Ok(graph) = driver.end_capture() {
            discard(driver, graph);
        }
    });
    let graph = match (queued, ended) {
        (Ok(()), ended) => ended?,
        (Err(error), Ok(graph)) => {
            discard(driver, graph);
            return Err(error);
        }
        (Err(error), Err(_)) => return Err(error),
    };
    let sound = driver.graph_nodes(graph).and_then(|nodes| check(nodes, launches.len()));
    if let Err(error) = sound.and_then(|()| driver.instantiate(graph)) {
        discard(driver, graph);
        return Err(error);
    }
    Ok(graph)
}

/// Returns an error unless the graph contains exactly the listed launches.
fn check(nodes: Nodes, launches: usize) -> Result<()> {
    if nodes == (Nodes { kernels: launches, ..Nodes::default() }) {
        return Ok(());
    }
    let got = format!("{} kernels, {} memory nodes, {} others", nodes.kernels, nodes.memory, nodes.other);
    Err(Error::misuse("capture", format!("a graph of {launches} kernels and nothing else"), got))
}

fn discard(driver: &dyn Driver, graph: Graph) {
    // SAFETY: the graph was just captured, and nothing else uses it.
    if let Err(error) = unsafe { driver.destroy_graph(graph) } {
        tracing::warn!(%error, "an unused graph could not be destroyed");
    }
}
