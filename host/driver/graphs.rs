//! From recorded launches to a graph that the device replays.
//!
//! The launches are listed before the driver hears of any (see `rehearsal`), so a capture is one short job on the worker:
//! load the kernels, begin, queue, end, look at what was captured, instantiate. Invariant: the capture is ended on the thread
//! that began it whatever fails in between; a graph that holds anything but the listed kernels is not handed out.

use super::calls::{Driver, Graph, Nodes};
use super::device::Device;
use super::lends::Use;
use super::pins::Pins;
use super::rehearsal::Launch;
use super::retired::Retired;
use crate::error::{Error, Result};
use std::collections::HashSet;

/// A graph of a device, with all memory that it names.
#[derive(Debug)]
pub(crate) struct SealedGraph {
    device: Device,
    graph: Graph,
    kernels: usize,
    /// All memory of its launches, in the order of their addresses.
    uses: Vec<Use>,
    /// Always there, until the graph ends.
    pins: Option<Pins>,
}

impl SealedGraph {
    /// Captures `launches`, whose memory `pins` holds.
    pub(crate) fn capture(device: &Device, launches: Vec<Launch>, pins: Pins) -> Result<Self> {
        let (kernels, uses) = (launches.len(), uses(&launches));
        let captured = device.call("capture", device.deadline(), move |driver| capture(driver, &launches));
        Ok(Self { device: device.clone(), graph: captured?, kernels, uses, pins: Some(pins) })
    }

    /// The graph's launches.
    pub(crate) fn kernels(&self) -> usize {
        self.kernels
    }

    /// Queues all of them, once no running step relies on what they write.
    pub(crate) fn replay(&self) -> Result<()> {
        let graph = self.graph;
        // SAFETY: `capture` instantiated the graph; the pins keep alive what its launches name.
        self.device.replay(&self.uses, move |driver| unsafe { driver.replay(graph) })
    }
}

impl Drop for SealedGraph {
    fn drop(&mut self) {
        if let Some(pins) = self.pins.take() {
            // SAFETY: the graph is this device's, and its only name goes here; replays of it are queued at most.
            unsafe { self.device.retire(Retired::Graph { graph: self.graph, pins }) };
        }
    }
}

/// The memory of launches, each stretch once.
fn uses(launches: &[Launch]) -> Vec<Use> {
    let extents = launches.iter().flat_map(|launch| launch.words.extents()).filter(|extent| extent.length > 0);
    let mut uses: Vec<Use> = extents
        .map(|extent| Use { bytes: extent.address..extent.address + extent.bytes() as u64, written: extent.written })
        .collect();
    uses.sort_by_key(|used| (used.bytes.start, used.bytes.end, used.written));
    uses.dedup();
    uses
}

/// The driver's part, on one thread from begin to end.
fn capture(driver: &dyn Driver, launches: &[Launch]) -> Result<Graph> {
    let mut loaded = HashSet::new();
    for Launch { entry, .. } in launches {
        if loaded.insert(entry.name) {
            driver.load(entry)?;
        }
    }
    driver.begin_capture()?;
    let queued = launches.iter().try_for_each(|Launch { entry, grid, words }| {
        // SAFETY: the contract accepted these arguments when they were listed; pins hold their memory.
        unsafe { driver.launch(entry, *grid, words) }
    });
    // A driver that fails to end may still be capturing: asked again, it is not.
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

/// An error unless the graph holds the listed launches and nothing else.
fn check(nodes: Nodes, launches: usize) -> Result<()> {
    if nodes == (Nodes { kernels: launches, ..Nodes::default() }) {
        return Ok(());
    }
    let got = format!("{} kernels, {} memory nodes, {} others", nodes.kernels, nodes.memory, nodes.other);
    Err(Error::misuse("capture", format!("a graph of {launches} kernels and nothing else"), got))
}

fn discard(driver: &dyn Driver, graph: Graph) {
    // SAFETY: the graph was just captured, and nobody else knows it.
    if let Err(error) = unsafe { driver.destroy_graph(graph) } {
        tracing::warn!(%error, "a graph that was not wanted stays");
    }
}
