//! The race detector of one block of a watched launch: its clocks, the cells of its shared memory,
//! and the launch's arguments.
//!
//! Invariant: an access that returns `Ok` lies inside the memory that the kernel was given. It
//! reads only shared memory that the block has written, and follows every earlier conflicting
//! access.

use super::WARP;
use super::arguments::{Arguments, Span};
use super::clock::{Clock, Stamp};
use super::collective::Collective;
use super::fault::{Access, Cause, Kind, MemoryLocation};
use super::shadow::{Cell, Conflict};
use super::site::Sites;
use crate::launch::{Entry, Grid};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

/// The most mbarriers of a block to which the copy engine brings bytes.
pub(super) const ENGINES: u32 = WARP;
/// The mbarrier of engine 0, at which threads hand it their work; that of engine 1 is one byte
/// before, and so on.
const HANDED: u32 = u32::MAX;

/// The bytes of shared memory that share a cell.
const WORD: usize = 4;

/// The race detector of one block's threads.
pub(super) struct Detector {
    arguments: Arc<Arguments>,
    grid: Grid,
    clock: Clock,
    /// The cells by word.
    shared: Vec<Cell>,
    shared_bytes: usize,
    sites: Sites,
}

/// The fault of an access.
pub(super) enum Wrong {
    /// The access lies outside the memory that it belongs to.
    Outside { place: MemoryLocation, bounds: Range<i64> },
    /// The access reads shared memory that the block has not written.
    Unwritten { place: MemoryLocation },
    /// The access is not ordered after an earlier one.
    Conflict { place: MemoryLocation, conflict: Conflict },
}

impl Detector {
    /// Returns the detector of block `index` of the grid.
    pub(super) fn new(arguments: Arc<Arguments>, entry: &Entry, grid: Grid, index: u64) -> Self {
        let block = u32::try_from(index).expect("a watched launch has fewer than 2^32 blocks");
        let shared_bytes = entry.shared_bytes as usize;
        Self {
            arguments,
            grid,
            // The products of each warp have a warp of their own, because a cell of the shadow
            // memory has one time for all lanes of a warp.
            clock: Clock::new(block, 2 * entry.block.next_multiple_of(WARP) + ENGINES),
            shared: vec![Cell::default(); shared_bytes.div_ceil(WORD)],
            shared_bytes,
            sites: Sites::new(),
        }
    }

    /// Called when all participating threads have reached a collective. `thread` is one of them.
    pub(super) fn met(&mut self, collective: Collective, thread: u32) {
        match collective {
            Collective::Barrier | Collective::BarrierCount | Collective::BarrierAnd | Collective::BarrierOr => {
                self.clock.barrier();
            }
            Collective::Warp(mask) => self.clock.warp_barrier(thread / WARP, mask),
            // These exchange values. CUDA guarantees no memory order for them.
            Collective::Ballot(_) | Collective::Gather(_) | Collective::Shuffle { .. } => {}
            // `acquired` records it.
            Collective::Phase { .. } => {}
        }
    }

    /// Called when a thread arrives at an mbarrier, and `ends` its phase.
    pub(super) fn arrived(&mut self, thread: u32, byte: u32, ends: bool) {
        self.clock.arrived(thread, byte, ends);
    }

    /// Called when a thread starts accesses of the engine with this number among the threads.
    pub(super) fn begin_engine(&mut self, thread: u32, engine: u32) {
        self.clock.arrived(thread, HANDED - engine, true);
        self.clock.acquired(engine, HANDED - engine);
    }

    /// Called when a thread has waited for the accesses of this engine.
    pub(super) fn follows(&mut self, thread: u32, engine: u32) {
        self.clock.follows(thread, engine);
    }

    /// Called when a thread has waited for a phase of an mbarrier.
    pub(super) fn acquired(&mut self, thread: u32, byte: u32) {
        self.clock.acquired(thread, byte);
    }

    /// Checks an access to global memory.
    pub(super) fn global(
        &mut self,
        thread: u32,
        kind: Kind,
        span: Span,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let now = self.clock.now(thread, self.sites.of(location));
        self.arguments.touch(span, kind, &now).map_err(|wrong| wrong.cause(self.grid, kind, now.stamp))
    }

    /// Checks an access to `bytes` of the shared memory, which the kernel computes as part of
    /// `tile`.
    pub(super) fn shared(
        &mut self,
        thread: u32,
        kind: Kind,
        tile: Range<usize>,
        bytes: Range<usize>,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let now = self.clock.now(thread, self.sites.of(location));
        let wrong = |wrong: Wrong| Err(wrong.cause(self.grid, kind, now.stamp));
        if bytes.start < tile.start || bytes.end > tile.end.min(self.shared_bytes) {
            let bounds = tile.start as i64..tile.end.min(self.shared_bytes) as i64;
            return wrong(Wrong::Outside { place: MemoryLocation::Shared { byte: bytes.start as i64 }, bounds });
        }
        let first = bytes.start / WORD;
        for (at, cell) in self.shared[first..bytes.end.div_ceil(WORD)].iter_mut().enumerate() {
            let place = || MemoryLocation::Shared { byte: ((first + at) * WORD) as i64 };
            if kind == Kind::Read && !cell.is_written() {
                return wrong(Wrong::Unwritten { place: place() });
            }
            if let Err(conflict) = cell.touch(kind, &now) {
                return wrong(Wrong::Conflict { place: place(), conflict });
            }
        }
        Ok(())
    }
}

impl Wrong {
    /// Returns the fault of a thread whose access of this `kind` at `now` is wrong.
    #[cold]
    fn cause(self, grid: Grid, kind: Kind, now: Stamp) -> Cause {
        let access = |kind, stamp: Stamp| Access {
            kind,
            block: grid.place(u64::from(stamp.block)),
            thread: u32::from(stamp.thread),
            epoch: stamp.epoch.get() - 1,
            location: stamp.site.location(),
        };
        let later = access(kind, now);
        match self {
            Self::Outside { place, bounds } => Cause::OutOfBounds { place, bounds, access: later },
            Self::Unwritten { place } => Cause::Unwritten { place, access: later },
            Self::Conflict { place, conflict: (kind, stamp) } => {
                Cause::Race { place, earlier: Box::new(access(kind, stamp)), later }
            }
        }
    }
}
