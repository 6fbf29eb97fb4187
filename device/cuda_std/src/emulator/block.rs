//! One block: its index, its shared memory, and the scheduler that runs its threads from wait to
//! wait.
//!
//! ```text
//! a thread:  Fresh --begins--> runs --waits--> Waiting --all have arrived--> Ready
//!            Ready --its turn--> runs --ends--> Done
//! ```
//! Invariant: at most one thread of a block runs at a time. A thread resumes only when every thread
//! that it waits for has reached the same operation at the same source line.

use super::access::{self, Watch};
use super::arguments::{Arguments, Span};
use super::carrier::{Carrier, cause};
use super::collective::Collective;
use super::detector::Detector;
use super::fault::{Access, MemoryLocation};
use super::fault::{Cause, Fault, Kind};
use super::mbarrier::Phases;
use super::mode::Order;
use super::resolve::{State, Wait, resolve_block, resolve_lanes};
use super::shared::SharedMemory;
use super::trap::{SignalStack, Traps};
use super::{CURRENT, WARP};
use crate::launch::{Entry, Grid, Threads, Words};
use corosensei::Yielder;
use std::cell::{Cell, Ref, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

/// The state that all blocks of a launch share.
pub(super) struct Launch<'l> {
    pub(super) entry: &'l Entry,
    pub(super) grid: Grid,
    pub(super) words: &'l Words,
    pub(super) arguments: Arc<Arguments>,
    /// True if race detection is on for the launch.
    pub(super) watched: bool,
    /// The seed of the threads' order.
    pub(super) shuffle: Option<u64>,
}

impl Launch<'_> {
    pub(super) fn fault(&self, block: [u32; 3], thread: u32, cause: Cause) -> Fault {
        Fault { kernel: self.entry.name, launched_at: self.words.site(), block, thread, cause }
    }
}

/// A running block, from the point of view of its threads.
pub struct Block {
    grid: Grid,
    index: [u32; 3],
    pub(super) threads: u32,
    shared: *mut u8,
    shared_bytes: usize,
    /// The kernel's code, which runs threads that have not started.
    pub(super) code: Threads,
    is_wide: bool,
    pub(super) words: *const u64,
    /// The thread that currently runs.
    running: Cell<u32>,
    /// The number of threads that have started. Further ones may start below `start_before`.
    started: Cell<u32>,
    start_before: Cell<u32>,
    /// The threads' order, if it is not ascending.
    order: Option<RefCell<Order>>,
    pub(super) yielder: Cell<*const Yielder<(), ()>>,
    pub(super) states: RefCell<Vec<State>>,
    /// The plain barrier that the first thread has reached since the scheduler last checked.
    /// `gathered` counts the threads at that barrier.
    gathering: Cell<Option<&'static Location<'static>>>,
    pub(super) gathered: Cell<u32>,
    /// The value that each thread brought to the last resolved collective, or its result.
    pub(super) exchange: RefCell<Vec<u64>>,
    /// The block's barriers at which threads arrive.
    pub(super) phases: RefCell<Vec<Phases>>,
    /// The number of barriers that all threads have passed.
    epoch: Cell<u32>,
    /// The launch's arguments. It is a plain pointer, because the blocks' OS threads would contend
    /// for a reference count.
    arguments: *const Arguments,
    pub(super) detector: Option<RefCell<Detector>>,
    /// The engine's number among the threads while it copies or multiplies.
    pub(super) engine: Cell<Option<u32>>,
    /// True if a thread has panicked.
    pub(super) panicked: Cell<bool>,
    pub(super) traps: Rc<Traps>,
}

impl Block {
    /// Returns the running thread's index. Kernels are launched with one-dimensional blocks.
    #[inline(always)]
    pub fn thread_idx(&self) -> [u32; 3] {
        [self.running.get(), 0, 0]
    }

    /// Returns the block's index in the grid.
    #[inline(always)]
    pub fn block_idx(&self) -> [u32; 3] {
        self.index
    }

    /// Returns the threads in the block.
    #[inline(always)]
    pub fn block_dim(&self) -> [u32; 3] {
        [self.threads, 1, 1]
    }

    /// Returns the blocks in the grid.
    #[inline(always)]
    pub fn grid_dim(&self) -> [u32; 3] {
        [self.grid.x, self.grid.y, self.grid.z]
    }

    /// Returns the running thread's lane.
    #[inline(always)]
    pub fn lane(&self) -> u32 {
        self.running.get() % WARP
    }

    /// True if the code is the version for registers of 16 floats.
    #[inline(always)]
    pub(super) fn is_wide(&self) -> bool {
        self.is_wide
    }

    /// Returns the start of the shared memory.
    #[inline(always)]
    pub fn shared_start(&self) -> *mut u8 {
        self.shared
    }

    /// Returns the bytes of shared memory.
    #[inline(always)]
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Returns the lanes of the running thread's warp that have not ended.
    pub fn active_lanes(&self) -> u32 {
        let first = self.running.get() / WARP * WARP;
        let states = self.states.borrow();
        (0..WARP.min(self.threads - first)).fold(0, |mask, lane| {
            let ended = matches!(states[(first + lane) as usize], State::Done);
            mask | u32::from(!ended) << lane
        })
    }

    /// Checks the running thread's access to global memory.
    pub(super) fn touch_global(
        &self,
        kind: Kind,
        span: Span,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let thread = self.running.get();
        if let Some(detector) = &self.detector {
            return detector.borrow_mut().global(thread, kind, span, location);
        }
        self.arguments().inside(span, kind).map_err(|(place, bounds)| Cause::OutOfBounds {
            place,
            bounds,
            access: self.access(kind, location),
        })
    }

    /// Returns a description of the running thread's access.
    fn access(&self, kind: Kind, location: &'static Location<'static>) -> Access {
        Access { kind, block: self.index, thread: self.running.get(), epoch: self.epoch.get(), location }
    }

    /// Returns the fault of an access whose address is not a multiple of `align` bytes.
    pub(super) fn misaligned(
        &self,
        kind: Kind,
        address: usize,
        align: usize,
        location: &'static Location<'static>,
    ) -> Cause {
        let byte = address.wrapping_sub(self.shared as usize);
        let place =
            if byte < self.shared_bytes { MemoryLocation::Shared { byte: byte as i64 } } else { self.place(address) };
        Cause::Misaligned { place, align, access: self.access(kind, location) }
    }

    fn arguments(&self) -> &Arguments {
        // SAFETY: `Runner::run` takes the pointer from the launch, which outlives the block.
        unsafe { &*self.arguments }
    }

    /// True if a pointer is one of the launch's, or points into one of its arguments.
    pub(super) fn knows(&self, base: usize) -> bool {
        self.arguments().know(base)
    }

    /// Returns an address in terms of the kernel's arguments.
    pub(super) fn place(&self, address: usize) -> MemoryLocation {
        self.arguments().nearest(address).unwrap_or(MemoryLocation::Address(address as u64))
    }

    /// Checks the running thread's access to shared memory.
    pub(super) fn touch_shared(
        &self,
        kind: Kind,
        tile: Range<usize>,
        bytes: Range<usize>,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let Some(detector) = &self.detector else { return Ok(()) };
        let thread = self.engine.get().unwrap_or_else(|| self.running.get());
        detector.borrow_mut().shared(thread, kind, tile, bytes, location)
    }

    /// Called when the participating threads of a collective resume. `thread` is one of them.
    pub(super) fn met(&self, collective: Collective, thread: u32) {
        if collective.is_of_block() {
            self.epoch.set(self.epoch.get().wrapping_add(1));
        }
        if let Some(detector) = &self.detector {
            detector.borrow_mut().met(collective, thread);
        }
    }

    /// Suspends the running thread until its collective is resolved. It is always inlined, because
    /// the processor mispredicts a return after a stack switch. The code before the switch is not
    /// inlined: kernels wait in hundreds of places.
    #[inline(always)]
    pub(super) fn wait(&self, collective: Collective, value: u64, location: &'static Location<'static>) -> u64 {
        self.come(collective, value, location);
        let yielder = self.yielder.get();
        // SAFETY: the scheduler set the yielder of the coroutine that carries this thread. The
        // coroutine is alive, because it runs.
        unsafe { (*yielder).suspend(()) };
        match collective {
            // These have no value.
            Collective::Barrier | Collective::Phase { .. } => 0,
            Collective::Shuffle { source, .. } => self.brought(source.into()),
            _ => self.brought(self.running.get() % WARP),
        }
    }

    /// Records the running thread's arrival at its collective, and its value.
    #[inline(never)]
    fn come(&self, collective: Collective, value: u64, location: &'static Location<'static>) {
        let thread = self.running.get();
        if let Some(mask) = collective.mask() {
            let lane = thread % WARP;
            assert!(mask >> lane & 1 == 1, "lane {lane} is not in the mask {mask:#010x} of its own warp operation");
            if let Collective::Shuffle { source, .. } = collective {
                assert!(
                    mask >> source & 1 == 1,
                    "lane {source}, which is shuffled from, is not in the mask {mask:#010x}"
                );
            }
        }
        self.states.borrow_mut()[thread as usize] = State::Waiting(Wait { collective, location, value });
        if collective == Collective::Barrier {
            self.gather(location);
        }
        #[cfg(miri)]
        panic!("Miri cannot change stacks: a kernel that waits does not run under it");
    }

    /// Returns the value that `lane` of the running thread's warp brought to the last resolved
    /// collective.
    #[inline(always)]
    pub(super) fn brought(&self, lane: u32) -> u64 {
        self.exchange.borrow()[(self.running.get() / WARP * WARP + lane) as usize]
    }

    /// Returns the values that several lanes of the running thread's warp brought to the last
    /// resolved collective.
    #[inline(always)]
    pub(super) fn brought_by(&self, lanes: Range<u32>) -> Ref<'_, [u64]> {
        let first = self.running.get() / WARP * WARP;
        Ref::map(self.exchange.borrow(), |all| &all[(first + lanes.start) as usize..(first + lanes.end) as usize])
    }

    /// Counts the running thread among those that wait at one plain barrier.
    fn gather(&self, location: &'static Location<'static>) {
        let gathered = self.gathered.get();
        if gathered == 0 {
            self.gathering.set(Some(location));
        }
        if self.gathering.get().is_some_and(|first| core::ptr::eq(first, location)) {
            self.gathered.set(gathered + 1);
        }
    }

    /// Draws another order for the next round, if the threads' order is random.
    fn shuffle(&self) {
        if let Some(order) = &self.order {
            order.borrow_mut().draw();
        }
    }

    /// Returns the thread at `place` in this round, if the order is random.
    #[cold]
    #[inline(never)]
    fn drawn(&self, place: u32) -> u32 {
        self.order.as_ref().map_or(place, |order| order.borrow().at(place))
    }

    /// Returns the thread at `place` in this round.
    #[inline(always)]
    fn thread_at(&self, place: u32) -> u32 {
        if self.order.is_none() { place } else { self.drawn(place) }
    }

    /// Selects the next thread that has not started as the running thread. Returns false if all
    /// have started.
    #[inline(always)]
    pub fn begin(&self) -> bool {
        let place = self.started.get();
        if place >= self.start_before.get() {
            return false;
        }
        self.started.set(place + 1);
        self.running.set(self.thread_at(place));
        true
    }

    /// Records that the running thread has ended.
    #[inline(always)]
    pub fn end(&self) {
        // The thread may have waited since it began, so `running` may differ from the thread that
        // started last.
        self.states.borrow_mut()[self.running.get() as usize] = State::Done;
    }
}

/// A guard: while it lives, `current` returns the block.
struct Entered;

impl Entered {
    fn new(block: &Block) -> Self {
        CURRENT.set(block);
        access::watch(Watch { watched: block.detector.is_some().into(), bounds: &block.arguments().bounds });
        Self
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(core::ptr::null());
        access::watch(access::NOBODY);
    }
}

/// A runner of blocks on one OS thread. It keeps coroutines and shared memory from block to block.
pub(super) struct Runner {
    carriers: Vec<Carrier>,
    /// The indices in `carriers` of carriers without a thread.
    idle: Vec<usize>,
    /// The carrier of each waiting thread, by thread.
    carrier_of: Vec<usize>,
    shared: SharedMemory,
    states: Vec<State>,
    exchange: Vec<u64>,
    traps: Rc<Traps>,
    _signals: SignalStack,
}

impl Runner {
    pub(super) fn new() -> Self {
        Self {
            carriers: Vec::new(),
            idle: Vec::new(),
            carrier_of: Vec::new(),
            shared: SharedMemory::default(),
            states: Vec::new(),
            exchange: Vec::new(),
            traps: Rc::default(),
            _signals: SignalStack::new(),
        }
    }

    /// Runs block `index` of the grid.
    ///
    /// # Safety
    /// The launch's words are the arguments of its entry, and refer to memory that is alive.
    pub(super) unsafe fn run(&mut self, launch: &Launch<'_>, index: u64) -> Result<(), Fault> {
        let Launch { entry, grid, words, arguments, watched, shuffle } = launch;
        let mut states = std::mem::take(&mut self.states);
        let mut exchange = std::mem::take(&mut self.exchange);
        states.clear();
        states.resize(entry.block as usize, State::Fresh);
        exchange.resize(entry.block as usize, 0);
        self.carrier_of.resize(entry.block as usize, 0);
        let (code, is_wide) = entry.versions.for_processor(*watched);
        let detector = watched.then(|| Detector::new(Arc::clone(arguments), entry, *grid, index).into());
        let block = Block {
            grid: *grid,
            index: grid.place(index),
            threads: entry.block,
            shared: self.shared.fresh(entry.shared_bytes as usize),
            shared_bytes: entry.shared_bytes as usize,
            code,
            is_wide,
            words: words.as_slice().as_ptr(),
            running: Cell::new(0),
            started: Cell::new(0),
            start_before: Cell::new(0),
            order: shuffle.map(|seed| Order::new(entry.block, seed, index).into()),
            yielder: Cell::new(core::ptr::null()),
            states: RefCell::new(states),
            gathering: Cell::new(None),
            gathered: Cell::new(0),
            phases: RefCell::default(),
            exchange: RefCell::new(exchange),
            epoch: Cell::new(0),
            arguments: Arc::as_ptr(arguments),
            detector,
            engine: Cell::new(None),
            panicked: Cell::new(false),
            traps: Rc::clone(&self.traps),
        };
        let entered = Entered::new(&block);
        let outcome = self.schedule(&block).and_then(|()| {
            // SAFETY: no thread of the block is left.
            let intact = unsafe { self.shared.check_red_zones(block.shared_bytes) };
            intact.map_err(|cause| (block.running.get(), cause))
        });
        // From here on no thread of the block can access the block or wait, not even while it is
        // unwound.
        drop(entered);
        if outcome.is_err() {
            // Carriers may hold suspended threads. Dropping them unwinds those threads' frames.
            self.carriers.clear();
            self.idle.clear();
            self.traps.clear();
        }
        self.states = block.states.into_inner();
        self.exchange = block.exchange.into_inner();
        outcome.map_err(|(thread, cause)| launch.fault(block.index, thread, cause))
    }

    fn schedule(&mut self, block: &Block) -> Result<(), (u32, Cause)> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_threads(block)));
        outcome.unwrap_or_else(|panic| Err((block.running.get(), cause(panic))))
    }

    fn run_threads(&mut self, block: &Block) -> Result<(), (u32, Cause)> {
        // A warp's lanes exchange their values before the next warp runs. The fewer stacks are in
        // use at a time, the more of them stay in the cache. A shuffled block instead runs all its
        // threads in its own order.
        let group = if block.order.is_some() { block.threads } else { WARP };
        let mut waits = false;
        loop {
            for first in (0..block.threads).step_by(group as usize) {
                let threads = first..(first + group).min(block.threads);
                // If the first warp did not wait, the other threads follow it without a stop.
                block.start_before.set(if waits || first == 0 { threads.end } else { block.threads });
                waits |= self.turn(block, threads.clone());
                while waits && resolve_lanes(block, threads.clone()) {
                    block.shuffle();
                    self.turn(block, threads.clone());
                }
            }
            if !(waits && resolve_block(block)?) {
                return Ok(());
            }
            block.shuffle();
        }
    }

    /// Resumes the threads at `places`, until each waits or ends. Returns true if one waits.
    fn turn(&mut self, block: &Block, places: Range<u32>) -> bool {
        let mut waits = false;
        for place in places {
            let thread = block.thread_at(place);
            let carrier = match block.states.borrow()[thread as usize] {
                State::Fresh => self.idle.pop().unwrap_or_else(|| {
                    self.carriers.push(Carrier::new(self.carriers.len(), &self.traps));
                    self.carriers.len() - 1
                }),
                State::Ready => self.carrier_of[thread as usize],
                State::Waiting(_) | State::Done => continue,
            };
            block.running.set(thread);
            waits |= self.carry(block, carrier);
        }
        waits
    }

    /// Runs a carrier. If a thread then waits on it, keeps the carrier for that thread, otherwise
    /// for another use. Returns true if a thread waits on it.
    #[inline(always)]
    fn carry(&mut self, block: &Block, carrier: usize) -> bool {
        self.carriers[carrier].resume(block);
        let thread = block.running.get() as usize;
        let waits = matches!(block.states.borrow()[thread], State::Waiting(_));
        if waits {
            self.carrier_of[thread] = carrier;
        } else {
            self.idle.push(carrier);
        }
        waits
    }
}
