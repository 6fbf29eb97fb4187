//! A driver for dry runs: it hands out addresses without memory, and lists launches without running
//! them.
//!
//! Measured steps and recorded steps run on it. Invariant: it accesses neither memory nor a device,
//! so a dry run of any size costs nothing and leaves nothing allocated. Reads return zero.

use super::driver::{Description, Driver, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use super::graph::Pins;
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A future launch, whose contract has been checked.
#[derive(Clone, Debug)]
#[doc(hidden)]
#[non_exhaustive]
pub struct Launch {
    /// The kernel.
    pub entry: Entry,
    /// Its grid of blocks.
    pub grid: Grid,
    /// Its arguments.
    pub words: Words,
}

#[derive(Debug)]
pub(super) struct DryRun {
    description: Description,
    next: AtomicU64,
    listed: Option<Listed>,
}

/// The launches so far, and the pins of their memory.
#[derive(Debug)]
struct Listed {
    launches: Mutex<Vec<Launch>>,
    pins: Pins,
}

impl DryRun {
    /// Creates a driver that discards launches.
    pub(super) fn of(description: Description) -> Self {
        Self { description, next: AtomicU64::new(1 << 40), listed: None }
    }

    /// Creates a driver that lists launches and pins their memory as soon as they are listed.
    pub(super) fn listing(description: Description, pins: Pins) -> Self {
        Self { listed: Some(Listed { launches: Mutex::default(), pins }), ..Self::of(description) }
    }

    /// Takes the launches since the last call.
    pub(super) fn take_launches(&self) -> Vec<Launch> {
        let take =
            |listed: &Listed| std::mem::take(&mut *listed.launches.lock().unwrap_or_else(PoisonError::into_inner));
        self.listed.as_ref().map_or_else(Vec::new, take)
    }
}

fn never<R>(call: &'static str) -> Result<R> {
    Err(Error::Driver { call, reason: "a dry run has no device".into(), fatal: false })
}

// SAFETY: nothing is ever read or written at the addresses that it hands out. They are multiples of
// 256.
unsafe impl Driver for DryRun {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let after = |next: u64| (bytes as u64).checked_next_multiple_of(256).and_then(|bytes| next.checked_add(bytes));
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).map_err(|next| Error::DeviceMemory {
            device: "a dry run".into(),
            requested_bytes: bytes,
            free_bytes: u64::MAX - next,
            reason: "its addresses are exhausted".into(),
        })
    }

    unsafe fn free(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    fn create_pool(&self) -> Result<Pool> {
        never("create_pool")
    }

    fn pool_allocate(&self, _: Pool, _: usize) -> Result<u64> {
        never("pool_allocate")
    }

    unsafe fn pool_free(&self, _: Pool, _: u64, _: usize) -> Result<()> {
        never("pool_free")
    }

    fn trim_pool(&self, _: Pool, _: usize) -> Result<()> {
        never("trim_pool")
    }

    unsafe fn destroy_pool(&self, _: Pool) -> Result<()> {
        never("destroy_pool")
    }

    fn allocate_pinned(&self, _: usize) -> Result<u64> {
        never("allocate_pinned")
    }

    unsafe fn free_pinned(&self, _: u64, _: usize) -> Result<()> {
        never("free_pinned")
    }

    unsafe fn queue_upload(&self, _: u64, _: &[u8], _: Option<u64>) -> Result<()> {
        Ok(())
    }

    fn create_fence(&self) -> Result<Fence> {
        never("create_fence")
    }

    fn record_fence(&self, _: Fence) -> Result<()> {
        never("record_fence")
    }

    fn poll_fence(&self, _: Fence) -> Result<bool> {
        never("poll_fence")
    }

    unsafe fn destroy_fence(&self, _: Fence) -> Result<()> {
        never("destroy_fence")
    }

    unsafe fn download(&self, _: u64, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    unsafe fn queue_download(&self, _: u64, _: u64, _: usize) -> Result<()> {
        never("queue_download")
    }

    fn load(&self, _: &Entry) -> Result<()> {
        Ok(())
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        let Some(Listed { launches, pins }) = &self.listed else { return Ok(()) };
        // The address of an empty argument may be the start of another's memory.
        pins.add(words.extents().iter().filter(|extent| extent.length > 0).map(|extent| extent.address));
        let launch = Launch { entry: *entry, grid, words: words.clone() };
        launches.lock().unwrap_or_else(PoisonError::into_inner).push(launch);
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        never("begin_capture")
    }

    fn end_capture(&self) -> Result<Graph> {
        never("end_capture")
    }

    fn graph_nodes(&self, _: Graph) -> Result<Nodes> {
        never("graph_nodes")
    }

    fn instantiate(&self, _: Graph) -> Result<()> {
        never("instantiate")
    }

    unsafe fn replay(&self, _: Graph) -> Result<()> {
        never("replay")
    }

    unsafe fn destroy_graph(&self, _: Graph) -> Result<()> {
        never("destroy_graph")
    }

    fn poll(&self) -> Result<bool> {
        Ok(true)
    }

    fn name_link(&self) -> Result<Vec<u8>> {
        never("name_link")
    }

    fn join_link(&self, _: &[u8], _: usize, _: usize, _: Arc<dyn Wire>, _: Duration) -> Result<Link> {
        never("join_link")
    }

    unsafe fn exchange(&self, _: Link, _: &[Piece], _: &[Piece]) -> Result<()> {
        never("exchange")
    }

    fn follow_exchanges(&self) -> Result<()> {
        never("follow_exchanges")
    }

    unsafe fn leave_link(&self, _: Link) -> Result<()> {
        never("leave_link")
    }
}
