//! Captured graphs, the pins that keep their memory alive, and the buffers that replays must not
//! change.
//!
//! A graph is built from recorded launches. They are listed before the driver receives any (see
//! `dry_run`), so a capture is one short job on the driver thread. It loads the kernels, begins,
//! queues, ends, checks the captured nodes, and instantiates.
//!
//! A graph contains bare addresses. Its recorder pins the addresses of every launch before the
//! borrow that made them valid can end. Memory that contains a pinned address is not freed (see
//! `memory`) until the last such pin is gone.
//!
//! A graph keeps writing the buffers that it was recorded with, whoever owns them now. A step
//! relies on its borrowed buffers: for example, its backward pass reads the weights that its
//! forward pass read. The borrow table lists the buffers of running steps.
//!
//! Invariants:
//!
//! - The capture is ended on the thread that began it, whatever fails in between. Only graphs that
//!   contain exactly the listed kernels are returned.
//! - A pin exists from the listing of a launch until its graph has ended.
//! - While a step runs, no replay is queued that writes a buffer the step reads, or that uses a
//!   buffer the step writes. A replay on another thread waits for the step's end. A replay on the
//!   step's own thread is an error, because it would wait for itself.

use super::Device;
use super::driver::{Driver, Graph, Nodes};
use super::dry_run::Launch;
use super::memory::DeferredFree;
use crate::error::{Error, Result};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

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
    let Nodes { kernels, memory, other } = nodes;
    let reason = format!(
        "the graph has {kernels} kernels, {memory} memory nodes, {other} others, instead of {launches} kernels and nothing else"
    );
    Err(Error::Driver { call: "capture", reason, fatal: false })
}

fn discard(driver: &dyn Driver, graph: Graph) {
    // SAFETY: the graph was just captured, and nothing else uses it.
    if let Err(error) = unsafe { driver.destroy_graph(graph) } {
        tracing::warn!(%error, "an unused graph could not be destroyed");
    }
}

/// All pins of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct PinTable {
    sets: Arc<Mutex<PinSets>>,
}

#[derive(Debug, Default)]
struct PinSets {
    next: u64,
    /// The addresses of each live set.
    sets: BTreeMap<u64, BTreeSet<u64>>,
}

impl PinTable {
    fn sets(&self) -> MutexGuard<'_, PinSets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an empty set of pins.
    pub(super) fn pins(&self) -> Pins {
        let mut sets = self.sets();
        sets.next += 1;
        let identity = sets.next;
        sets.sets.insert(identity, BTreeSet::new());
        Pins { set: Arc::new(PinSet { table: self.clone(), identity }) }
    }

    /// Returns true if a live graph uses this memory.
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        let range = address..address.saturating_add(bytes as u64);
        self.sets().sets.values().any(|addresses| addresses.range(range.clone()).next().is_some())
    }
}

/// The pins of one graph, or of one being recorded, until the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    set: Arc<PinSet>,
}

#[derive(Debug)]
struct PinSet {
    table: PinTable,
    identity: u64,
}

impl Pins {
    /// Pins the memory that contains these addresses.
    pub(crate) fn add(&self, addresses: impl IntoIterator<Item = u64>) {
        if let Some(set) = self.set.table.sets().sets.get_mut(&self.set.identity) {
            set.extend(addresses);
        }
    }
}

impl Drop for PinSet {
    fn drop(&mut self) {
        self.table.sets().sets.remove(&self.identity);
    }
}

/// A range of device memory, and whether its user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) bytes: Range<u64>,
    pub(super) written: bool,
}

impl Use {
    fn conflicts(&self, other: &Self) -> bool {
        (self.written || other.written) && self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }
}

/// The buffers that the steps of a device have borrowed.
#[derive(Debug, Default)]
pub(super) struct BorrowTable {
    borrowers: Mutex<Borrowers>,
    step_ended: Condvar,
}

#[derive(Debug, Default)]
struct Borrowers {
    next: u64,
    /// The running steps, by the number of their arena's [`BufferBorrow`].
    steps: BTreeMap<u64, Borrower>,
}

/// A running step.
#[derive(Debug)]
struct Borrower {
    thread: ThreadId,
    uses: Vec<Use>,
}

impl BorrowTable {
    fn borrowers(&self) -> MutexGuard<'_, Borrowers> {
        self.borrowers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a replay that uses this memory once no running step relies on it. No buffer can be
    /// borrowed meanwhile.
    pub(super) fn replay(&self, uses: &[Use], deadline: Duration, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let mut running = self.borrowers();
        loop {
            let conflicts = |borrower: &&Borrower| {
                borrower.uses.iter().any(|borrowed| uses.iter().any(|used| used.conflicts(borrowed)))
            };
            let Some(borrower) = running.steps.values().find(conflicts) else { break };
            let expected = "no running step that has borrowed the graph's buffers";
            if borrower.thread == std::thread::current().id() {
                return Err(Error::misuse("replay", expected, "a replay inside that step: end the step first"));
            }
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::misuse(
                    "replay",
                    expected,
                    format!("a step of another thread, still running after {deadline:?}"),
                ));
            }
            running = self.step_ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue()
    }
}

/// The buffers that an arena's running step has borrowed.
#[derive(Debug)]
pub(crate) struct BufferBorrow {
    table: Arc<BorrowTable>,
    number: u64,
    /// True if the table lists this step.
    listed: Cell<bool>,
}

impl BufferBorrow {
    pub(super) fn new(table: &Arc<BorrowTable>) -> Self {
        let mut borrowers = table.borrowers();
        borrowers.next += 1;
        Self { table: Arc::clone(table), number: borrowers.next, listed: Cell::new(false) }
    }

    /// Returns the number of the arena among those of its device, counted from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a borrow of `bytes` bytes at `address`. The step also writes them if `written`.
    pub(crate) fn add(&self, address: u64, bytes: usize, written: bool) {
        let borrowed = Use { bytes: address..address.saturating_add(bytes as u64), written };
        debug_assert!(!borrowed.bytes.is_empty(), "a buffer has elements");
        self.listed.set(true);
        let mut running = self.table.borrowers();
        let thread = std::thread::current().id();
        let Borrower { uses, .. } = running.steps.entry(self.number).or_insert(Borrower { thread, uses: Vec::new() });
        // A step borrows the same buffers repeatedly, in close succession.
        if !uses.iter().rev().take(8).any(|had| *had == borrowed) {
            uses.push(borrowed);
        }
    }

    /// Ends the step's borrows.
    pub(crate) fn end(&self) {
        if self.listed.replace(false) {
            self.table.borrowers().steps.remove(&self.number);
            self.table.step_ended.notify_all();
        }
    }
}

impl Drop for BufferBorrow {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_last_as_long_as_sets() {
        let table = PinTable::default();
        let (first, second) = (table.pins(), table.pins());
        first.add([0x1000, 7]);
        second.add([0x1010]);
        assert!(table.holds(0x1000, 0x100));
        assert!(!table.holds(0x2000, 0x100), "the range must not be held");
        assert!(!table.holds(0x0f00, 0x100), "the end must not be inside");
        drop(first);
        assert!(table.holds(0x1000, 0x100), "the second set must still hold the range");
        drop(second);
        assert!(!table.holds(0x1000, 0x100));
    }

    const DEADLINE: Duration = Duration::from_millis(20);

    fn used(bytes: Range<u64>, written: bool) -> Use {
        Use { bytes, written }
    }

    #[test]
    fn only_overlapping_writes_conflict() {
        let table = Arc::default();
        let borrow = BufferBorrow::new(&table);
        borrow.add(100, 10, false);
        let replay = |bytes, written| table.replay(&[used(bytes, written)], DEADLINE, || Ok(()));
        assert!(replay(109..120, true).is_err(), "a replay must not write what a step reads");
        assert!(replay(109..120, false).is_ok(), "a replay and a step may read the same range");
        assert!(replay(110..120, true).is_ok() && replay(0..100, true).is_ok(), "a replay may use neighbouring ranges");
        borrow.add(100, 10, true);
        assert!(replay(0..101, false).is_err(), "a replay must not read what a step writes");
        borrow.end();
        assert!(replay(0..200, true).is_ok(), "after the step, a replay may use the range");
    }

    #[test]
    fn replays_wait_for_other_threads_steps() {
        let table = Arc::default();
        let borrow = BufferBorrow::new(&table);
        borrow.add(0, 8, false);
        let replay = |deadline| table.replay(&[used(0..8, true)], deadline, || Ok(()));
        std::thread::scope(|scope| {
            let start = Instant::now();
            let error = scope.spawn(|| replay(DEADLINE)).join().unwrap().unwrap_err();
            assert!(start.elapsed() >= DEADLINE && error.to_string().contains("another thread"), "{error}");
            let waits = scope.spawn(|| replay(Duration::from_secs(20)));
            std::thread::sleep(DEADLINE);
            assert!(!waits.is_finished());
            borrow.end();
            waits.join().unwrap().unwrap();
        });
    }
}
