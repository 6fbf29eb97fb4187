//! The CPU as a device: host memory, and the same kernels run by the emulator.
//!
//! Invariant: each call is complete when it returns, which is the strictest order that a stream
//! allows. A device's driver thread makes one call at a time, so no copy runs during a kernel. A
//! capture obeys CUDA's rules and fails with CUDA's errors.

use super::driver::{Description, DeviceKind, Driver, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use super::dry_run::Launch;
use crate::error::{Error, Result};
use crate::host_memory::MemInfo;
use cuda_std::emulator::Machine;
use cuda_std::launch::{Entry, Grid, Words};
use memmap2::MmapMut;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Emulated {
    description: Description,
    machine: Machine,
    memory: Mutex<Memory>,
    graphs: Mutex<Graphs>,
    links: Mutex<Links>,
    /// The number of fences made.
    fences: AtomicU64,
}

/// The own rank and the wire of each link, by the link's number.
type Links = BTreeMap<u64, (usize, Arc<dyn Wire>)>;

/// The capture in progress, and the captured graphs.
#[derive(Debug, Default)]
struct Graphs {
    capture: Option<Capture>,
    made: u64,
    captured: HashMap<Graph, Captured>,
}

/// A capture in progress.
#[derive(Debug)]
struct Capture {
    thread: ThreadId,
    nodes: Vec<Node>,
    /// The forbidden call that invalidated the capture.
    spoiled_by: Option<&'static str>,
}

#[derive(Clone, Debug)]
enum Node {
    Launch(Box<Launch>),
    Memory,
}

#[derive(Debug)]
struct Captured {
    nodes: Arc<[Node]>,
    instantiated: bool,
}

/// Returns an error with CUDA's code and text.
fn refused<R>(call: &'static str, code: &'static str) -> Result<R> {
    Err(Error::Driver { call, reason: code.into(), fatal: false })
}

const UNSUPPORTED: &str =
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900): operation not permitted when stream is capturing";
const INVALIDATED: &str =
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901): operation failed due to a previous error during capture";
const WRONG_THREAD: &str = "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD (908): attempt to terminate a thread-local capture \
                            sequence from another thread";
const ILLEGAL_STATE: &str = "CUDA_ERROR_ILLEGAL_STATE (401): the operation cannot be performed in the present state";
const INVALID_VALUE: &str = "CUDA_ERROR_INVALID_VALUE (1): invalid argument";

/// Anonymous mappings, which are page-aligned. The system backs only the pages that are touched.
#[derive(Debug, Default)]
struct Memory {
    used: BTreeMap<u64, MmapMut>,
    /// The blocks that were returned to each pool, by size.
    pools: HashMap<Pool, HashMap<usize, Vec<MmapMut>>>,
    pools_made: u64,
}

impl Emulated {
    /// Creates an emulator. It runs the kernels of warpgroups if `has_wgmma`.
    pub(super) fn new(has_wgmma: bool) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
        let description = Description {
            kind: DeviceKind::Emulated,
            ordinal: 0,
            name: format!("emulator on {processors} CPU threads"),
            memory_bytes: None,
            integrated: true,
            processors,
            capability: None,
            has_wgmma,
            driver: None,
            ptx: None,
            wgmma_ptx: None,
        };
        Self {
            description,
            machine: Machine::default(),
            memory: Mutex::default(),
            graphs: Mutex::default(),
            links: Mutex::default(),
            fences: AtomicU64::default(),
        }
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn graphs(&self) -> MutexGuard<'_, Graphs> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an error and invalidates the capture if this thread is capturing.
    fn outside_capture(&self, call: &'static str) -> Result<()> {
        match &mut self.graphs().capture {
            Some(capture) if capture.thread == std::thread::current().id() => {
                capture.spoiled_by.get_or_insert(call);
                refused(call, UNSUPPORTED)
            }
            _ => Ok(()),
        }
    }

    /// Adds a node if this thread is capturing, and returns whether it is.
    fn recorded(&self, node: impl FnOnce() -> Node) -> bool {
        match &mut self.graphs().capture {
            Some(capture) if capture.thread == std::thread::current().id() => {
                capture.nodes.push(node());
                true
            }
            _ => false,
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a kernel to its end.
    ///
    /// # Safety
    /// The requirements of [`Driver::launch`].
    unsafe fn run(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        let mapping = |address| self.memory().mapping_of(address);
        // SAFETY: the caller of `Driver::launch` guarantees that the contract accepted the
        // arguments. Mappings are memory of this device, on which launches and copies exclude each
        // other.
        unsafe { self.machine.launch(entry, grid, words, &mapping) }.map_err(Error::from)
    }

    fn map(&self, bytes: usize) -> Result<MmapMut> {
        MmapMut::map_anon(bytes).map_err(|reason| Error::DeviceMemory {
            device: self.description.name.clone(),
            requested_bytes: bytes,
            free_bytes: self.free_bytes().unwrap_or(0),
            reason: reason.to_string(),
        })
    }
}

impl Memory {
    fn hand_out(&mut self, mut mapping: MmapMut) -> u64 {
        let address = mapping.as_mut_ptr() as u64;
        self.used.insert(address, mapping);
        address
    }

    /// Returns the address range of the mapping that contains an address.
    fn mapping_of(&self, address: u64) -> Option<Range<u64>> {
        let (&start, mapping) = self.used.range(..=address).next_back()?;
        Some(start..start + mapping.len() as u64).filter(|mapping| mapping.contains(&address))
    }

    fn take_back(&mut self, address: u64) -> Result<MmapMut> {
        self.used.remove(&address).ok_or_else(|| Error::Driver {
            call: "free",
            reason: format!("{address:#x} is not allocated"),
            fatal: false,
        })
    }
}

// SAFETY: mappings are page-aligned and stay in `used` until `free` or `pool_free` removes them.
// Each call is complete when it returns, so the effects have the order of the calls.
unsafe impl Driver for Emulated {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        // Like GB10's driver, this counts the host's free memory and excludes reclaimable memory.
        Ok(MemInfo::read().map_or(u64::MAX, |host| host.free_bytes))
    }

    #[cfg(target_os = "linux")]
    fn unbacked_bytes(&self) -> Option<u64> {
        let memory = self.memory();
        let mappings = memory.used.iter().map(|(&start, mapping)| start..start + mapping.len() as u64);
        unbacked_bytes(mappings).ok()
    }

    #[cfg(not(target_os = "linux"))]
    fn unbacked_bytes(&self) -> Option<u64> {
        None
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.outside_capture("cuMemAlloc")?;
        let mapping = self.map(bytes)?;
        Ok(self.memory().hand_out(mapping))
    }

    unsafe fn free(&self, address: u64, _: usize) -> Result<()> {
        self.memory().take_back(address).map(drop)
    }

    fn create_pool(&self) -> Result<Pool> {
        let mut memory = self.memory();
        memory.pools_made += 1;
        let pool = Pool(memory.pools_made);
        memory.pools.insert(pool, HashMap::new());
        Ok(pool)
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.recorded(|| Node::Memory);
        let kept = self.memory().pools.get_mut(&pool).and_then(|kept| kept.get_mut(&bytes)?.pop());
        let mapping = kept.map_or_else(|| self.map(bytes), Ok)?;
        Ok(self.memory().hand_out(mapping))
    }

    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()> {
        let mut memory = self.memory();
        let mapping = memory.take_back(address)?;
        if let Some(kept) = memory.pools.get_mut(&pool) {
            kept.entry(bytes).or_default().push(mapping);
        }
        Ok(())
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        let mut memory = self.memory();
        let Some(kept) = memory.pools.get_mut(&pool) else { return Ok(()) };
        let mut left = keep_bytes;
        for (bytes, mappings) in kept.iter_mut() {
            let stay = mappings.len().min(left / bytes);
            mappings.truncate(stay);
            left -= stay * bytes;
        }
        Ok(())
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.memory().pools.remove(&pool);
        Ok(())
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64> {
        self.allocate(bytes)
    }

    unsafe fn free_pinned(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: `allocate_pinned` is `allocate`, so the requirements of `Driver::free_pinned` are
        // those of `free`.
        unsafe { self.free(address, bytes) }
    }

    unsafe fn queue_upload(&self, to: u64, from: &[u8], _: Option<u64>) -> Result<()> {
        // SAFETY: `to` is memory of `allocate` with room for `from`, which is pinned memory of
        // another mapping (`Driver::queue_upload`). No kernel runs, because the driver thread makes
        // one call at a time.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    fn create_fence(&self) -> Result<Fence> {
        Ok(Fence(self.fences.fetch_add(1, Ordering::Relaxed)))
    }

    fn record_fence(&self, _: Fence) -> Result<()> {
        Ok(())
    }

    fn poll_fence(&self, _: Fence) -> Result<bool> {
        Ok(true)
    }

    unsafe fn destroy_fence(&self, _: Fence) -> Result<()> {
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.outside_capture("cuMemcpyDtoH")?;
        // SAFETY: `from` is memory of `allocate` with as many bytes as `to`, a borrow of other
        // memory (`Driver::download`). No kernel runs, because the driver thread makes one call at
        // a time.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.outside_capture("cuMemcpyDtoHAsync")?;
        // SAFETY: both are mappings of at least `bytes` bytes, one of the device and one pinned,
        // and nothing reads the second before a fence (`Driver::queue_download`). No kernel runs,
        // because the driver thread makes one call at a time.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    fn load(&self, _: &Entry) -> Result<()> {
        Ok(())
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        if self.recorded(|| Node::Launch(Box::new(Launch { entry: *entry, grid, words: words.clone() }))) {
            return Ok(());
        }
        // SAFETY: the contract accepted these words for this grid, and their memory is mapped
        // (`Driver::launch`). No other call uses it meanwhile.
        unsafe { self.run(entry, grid, words) }
    }

    fn begin_capture(&self) -> Result<()> {
        let mut graphs = self.graphs();
        if graphs.capture.is_some() {
            return refused("cuStreamBeginCapture", ILLEGAL_STATE);
        }
        graphs.capture = Some(Capture { thread: std::thread::current().id(), nodes: Vec::new(), spoiled_by: None });
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        const CALL: &str = "cuStreamEndCapture";
        let mut graphs = self.graphs();
        let Some(capture) = graphs.capture.take() else { return refused(CALL, ILLEGAL_STATE) };
        if capture.thread != std::thread::current().id() {
            graphs.capture = Some(capture);
            return refused(CALL, WRONG_THREAD);
        }
        if capture.spoiled_by.is_some() {
            return refused(CALL, INVALIDATED);
        }
        graphs.made += 1;
        let graph = Graph(graphs.made);
        graphs.captured.insert(graph, Captured { nodes: capture.nodes.into(), instantiated: false });
        Ok(graph)
    }

    fn graph_nodes(&self, graph: Graph) -> Result<Nodes> {
        let graphs = self.graphs();
        let Some(captured) = graphs.captured.get(&graph) else { return refused("cuGraphGetNodes", INVALID_VALUE) };
        let kernels = captured.nodes.iter().filter(|node| matches!(node, Node::Launch(_))).count();
        Ok(Nodes { kernels, memory: captured.nodes.len() - kernels, other: 0 })
    }

    fn instantiate(&self, graph: Graph) -> Result<()> {
        match self.graphs().captured.get_mut(&graph) {
            Some(captured) => captured.instantiated = true,
            None => return refused("cuGraphInstantiate", INVALID_VALUE),
        }
        Ok(())
    }

    unsafe fn replay(&self, graph: Graph) -> Result<()> {
        let nodes = match self.graphs().captured.get(&graph) {
            Some(captured) if captured.instantiated => Arc::clone(&captured.nodes),
            _ => return refused("cuGraphLaunch", INVALID_VALUE),
        };
        for node in &*nodes {
            if let Node::Launch(launch) = node {
                let Launch { entry, grid, words } = &**launch;
                // SAFETY: `launch` recorded this under its own requirements, and the memory is
                // still mapped (`Driver::replay`).
                unsafe { self.run(entry, *grid, words) }?;
            }
        }
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()> {
        self.graphs().captured.remove(&graph);
        Ok(())
    }

    fn poll(&self) -> Result<bool> {
        self.outside_capture("cuStreamQuery")?;
        Ok(true)
    }

    fn name_link(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn join_link(&self, _: &[u8], rank: usize, _: usize, wire: Arc<dyn Wire>, _: Duration) -> Result<Link> {
        let mut links = self.links();
        let link = links.last_key_value().map_or(0, |(last, _)| last + 1);
        links.insert(link, (rank, wire));
        Ok(Link(link))
    }

    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        self.outside_capture("exchange")?;
        let Some((rank, wire)) = self.links().get(&link.0).cloned() else { return refused("exchange", INVALID_VALUE) };
        let is_own = |piece: &&Piece| piece.rank == rank;
        // SAFETY: a piece is memory of this device's mappings that no other call uses meanwhile
        // (`Driver::exchange`).
        let sent = |piece: &Piece| unsafe { std::slice::from_raw_parts(piece.address as *const u8, piece.bytes) };
        for piece in sends.iter().filter(|piece| piece.rank != rank) {
            wire.send(piece.rank, sent(piece))?;
        }
        let mut own = sends.iter().filter(is_own);
        for piece in receives {
            // SAFETY: as for sent pieces, and no other piece overlaps it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(piece.address as *mut u8, piece.bytes) };
            if piece.rank != rank {
                wire.receive(piece.rank, bytes)?;
                continue;
            }
            match own.next() {
                Some(from) if from.bytes == piece.bytes => bytes.copy_from_slice(sent(from)),
                _ => return refused("exchange", INVALID_VALUE),
            }
        }
        Ok(())
    }

    fn follow_exchanges(&self) -> Result<()> {
        self.outside_capture("follow_exchanges")
    }

    unsafe fn leave_link(&self, link: Link) -> Result<()> {
        self.links().remove(&link.0);
        Ok(())
    }
}

/// Returns the bytes of these mappings that have no memory yet. The mappings start on page
/// boundaries.
///
/// # Errors
/// Errors of reading `/proc/self/pagemap`, which exists on Linux.
#[cfg(target_os = "linux")]
#[expect(clippy::disallowed_methods, reason = "reads the kernel's own file, which ends")]
fn unbacked_bytes(mappings: impl IntoIterator<Item = Range<u64>>) -> std::io::Result<u64> {
    use std::os::unix::fs::FileExt;
    /// The bits of a page's word, as the kernel documents them: in memory, or swapped out.
    const BACKED: u64 = 1 << 63 | 1 << 62;
    /// The number of words read at a time.
    const AT_ONCE: usize = 1 << 16;
    // SAFETY: `sysconf` only reads a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = u64::try_from(page).map_err(std::io::Error::other)?;
    let pagemap = std::fs::File::open("/proc/self/pagemap")?;
    let mut words = vec![0; AT_ONCE * size_of::<u64>()];
    let mut unbacked = 0;
    for mapping in mappings {
        let (mut next, end) = (mapping.start / page, mapping.end.div_ceil(page));
        while next < end {
            let words = &mut words[..size_of::<u64>() * AT_ONCE.min((end - next) as usize)];
            pagemap.read_exact_at(words, next * size_of::<u64>() as u64)?;
            let is_backed = |word: &&[u8; 8]| u64::from_ne_bytes(**word) & BACKED != 0;
            let words = words.as_chunks().0;
            let backed = words.iter().filter(is_backed).count();
            unbacked += (words.len() - backed) as u64 * page;
            next += words.len() as u64;
        }
    }
    Ok(unbacked)
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_backed() {
        // More than is read at once, with pages of 4 KiB.
        let mut mapping = MmapMut::map_anon(300 << 20).unwrap();
        let start = mapping.as_ptr() as u64;
        let all = start..start + mapping.len() as u64;
        assert_eq!(unbacked_bytes([all.clone()]).unwrap(), 300 << 20);
        mapping[..7 << 20].fill(1);
        mapping[299 << 20..].fill(1);
        // The system may back more than was touched, in large pages.
        let unbacked = unbacked_bytes([all.clone()]).unwrap();
        assert!((288 << 20..=292 << 20).contains(&unbacked), "{unbacked}");
        assert_eq!(unbacked_bytes([start..start + (7 << 20), all.end - (1 << 20)..all.end]).unwrap(), 0);
        assert_eq!(unbacked_bytes([]).unwrap(), 0);
    }
}
