//! One block: its place, its shared memory, and the scheduler that carries its threads from wait to wait.
//!
//! Invariant: at most one thread of a block runs at a time, and a thread goes on only when every thread that it
//! waits for has come to the same operation at the same source line.

use super::arguments::{Arguments, Span};
use super::collective::Collective;
use super::detector::Detector;
use super::fault::{Cause, Fault, Kind};
use super::mode::Order;
use super::stack::ColouredStack;
use super::{CURRENT, WARP, access, current};
use crate::launch::{Entry, Grid};
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

/// Bytes before and after the shared memory that must stay as they were.
const RED_ZONE_BYTES: usize = 256;
const RED_ZONE: u8 = 0xa5;
/// Fresh shared memory reads as NaN.
const POISON: u8 = 0xff;

/// What a thread waits at, and what it brought.
#[derive(Clone, Copy)]
struct Wait {
    collective: Collective,
    location: &'static Location<'static>,
    value: u64,
}

#[derive(Clone, Copy)]
enum State {
    Fresh,
    /// Goes on when the scheduler comes by; its coroutine stands in `carriers`.
    Ready,
    Waiting(Wait),
    Done,
}

/// What the blocks of a launch share.
pub(super) struct Launch<'l> {
    pub(super) entry: &'l Entry,
    pub(super) grid: Grid,
    pub(super) words: &'l [u64],
    /// Where the launch is watched for races.
    pub(super) arguments: Option<Arc<Arguments>>,
    /// The seed of the threads' order.
    pub(super) shuffle: Option<u64>,
}

/// A block in flight, as its threads see it.
pub struct Block {
    grid: Grid,
    index: [u32; 3],
    threads: u32,
    shared: *mut u8,
    shared_bytes: usize,
    thread: unsafe fn(*const u64),
    words: *const u64,
    /// The thread that runs now.
    running: Cell<u32>,
    /// Threads that have started.
    started: Cell<u32>,
    /// The threads' order, where it is not the ascending one.
    order: Option<RefCell<Order>>,
    yielder: Cell<*const Yielder<(), ()>>,
    states: RefCell<Vec<State>>,
    /// What each thread brought to the collective that was resolved last, or its result.
    exchange: RefCell<Vec<u64>>,
    detector: Option<RefCell<Detector>>,
}

impl Block {
    /// The running thread's place. Kernels are launched with one-dimensional blocks.
    #[inline(always)]
    pub fn thread_idx(&self) -> [u32; 3] {
        [self.running.get(), 0, 0]
    }

    /// The block's place in the grid.
    #[inline(always)]
    pub fn block_idx(&self) -> [u32; 3] {
        self.index
    }

    /// Threads in the block.
    #[inline(always)]
    pub fn block_dim(&self) -> [u32; 3] {
        [self.threads, 1, 1]
    }

    /// Blocks in the grid.
    #[inline(always)]
    pub fn grid_dim(&self) -> [u32; 3] {
        [self.grid.x, self.grid.y, self.grid.z]
    }

    /// The running thread's lane.
    #[inline(always)]
    pub fn lane(&self) -> u32 {
        self.running.get() % WARP
    }

    /// The start of the shared memory.
    #[inline(always)]
    pub fn shared_start(&self) -> *mut u8 {
        self.shared
    }

    /// Bytes of shared memory.
    #[inline(always)]
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// The lanes of the running thread's warp that have not ended.
    pub fn active_lanes(&self) -> u32 {
        let first = self.running.get() / WARP * WARP;
        let states = self.states.borrow();
        (0..WARP.min(self.threads - first)).fold(0, |mask, lane| {
            let ended = matches!(states[(first + lane) as usize], State::Done);
            mask | u32::from(!ended) << lane
        })
    }

    /// Judges what the running thread is about to do in global memory.
    pub(super) fn touch_global(
        &self,
        kind: Kind,
        span: Span,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let Some(detector) = &self.detector else { return Ok(()) };
        detector.borrow_mut().global(self.running.get(), kind, span, location)
    }

    /// Judges what the running thread is about to do in shared memory.
    pub(super) fn touch_shared(
        &self,
        kind: Kind,
        tile: Range<usize>,
        bytes: Range<usize>,
        location: &'static Location<'static>,
    ) -> Result<(), Cause> {
        let Some(detector) = &self.detector else { return Ok(()) };
        detector.borrow_mut().shared(self.running.get(), kind, tile, bytes, location)
    }

    /// The threads that take part in a collective, `thread` among them, go on.
    fn met(&self, collective: Collective, thread: u32) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().met(collective, thread);
        }
    }

    /// Suspends the running thread until its collective is resolved.
    pub(super) fn wait(&self, collective: Collective, value: u64, location: &'static Location<'static>) -> u64 {
        let thread = self.running.get();
        if let Some(mask) = collective.mask() {
            let lane = thread % WARP;
            assert!(mask >> lane & 1 == 1, "lane {lane} is not in the mask {mask:#010x} of its own warp operation");
        }
        self.states.borrow_mut()[thread as usize] = State::Waiting(Wait { collective, location, value });
        let yielder = self.yielder.get();
        // SAFETY: the scheduler set the yielder of the coroutine that carries this thread, which is alive: it runs.
        unsafe { (*yielder).suspend(()) };
        let exchange = self.exchange.borrow();
        match collective {
            Collective::Shuffle { source, .. } => exchange[(thread / WARP * WARP + source) as usize],
            _ => exchange[thread as usize],
        }
    }

    /// What each lane of the running thread's warp brought to their shuffle, which this thread has just ended.
    pub(super) fn brought(&self) -> [u64; WARP as usize] {
        let first = (self.running.get() / WARP * WARP) as usize;
        let exchange = self.exchange.borrow();
        core::array::from_fn(|lane| exchange[first + lane])
    }

    /// The thread that comes at `place` in this round.
    fn thread_at(&self, place: u32) -> u32 {
        self.order.as_ref().map_or(place, |order| order.borrow().at(place))
    }

    /// Runs threads that have not started, one after another, until none is left.
    fn carry(&self) {
        while self.started.get() < self.threads {
            let place = self.started.replace(self.started.get() + 1);
            self.running.set(self.thread_at(place));
            // SAFETY: `launch`'s caller promised that the words are this kernel's arguments.
            unsafe { (self.thread)(self.words) };
            // The thread may have waited meanwhile and others may have run.
            self.states.borrow_mut()[self.running.get() as usize] = State::Done;
        }
    }
}

/// A coroutine that runs threads of whatever block is current, block after block.
struct Carrier {
    coroutine: Coroutine<(), (), (), ColouredStack>,
    yielder: *const Yielder<(), ()>,
}

impl Carrier {
    fn new(index: usize) -> Self {
        let stack = ColouredStack::new(index).expect("no memory for a coroutine stack of 64 KiB");
        let mut carrier = Self {
            coroutine: Coroutine::with_stack(stack, |yielder: &Yielder<(), ()>, ()| {
                loop {
                    current(|block| block.yielder.set(yielder));
                    yielder.suspend(());
                    current(Block::carry);
                }
            }),
            yielder: core::ptr::null(),
        };
        carrier.coroutine.resume(());
        carrier.yielder = current(|block| block.yielder.get());
        carrier
    }

    /// Runs until the thread that it carries waits, or no fresh thread is left.
    fn resume(&mut self, block: &Block) -> Result<(), Cause> {
        block.yielder.set(self.yielder);
        match catch_unwind(AssertUnwindSafe(|| self.coroutine.resume(()))) {
            Ok(CoroutineResult::Yield(())) => Ok(()),
            Ok(CoroutineResult::Return(())) => unreachable!("a carrier loops for ever"),
            Err(panic) => Err(panic.downcast::<Cause>().map_or_else(
                |panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                    Cause::Panic { message: text.unwrap_or_else(|| "a panic without a message".into()) }
                },
                |cause| *cause,
            )),
        }
    }
}

/// The time in which `current` answers.
struct Entered;

impl Entered {
    fn new(block: &Block) -> Self {
        CURRENT.set(block);
        access::watch(block.detector.is_some());
        Self
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(core::ptr::null());
        access::watch(false);
    }
}

/// Runs blocks on one OS thread; keeps coroutines and shared memory from block to block.
#[derive(Default)]
pub(super) struct Runner {
    idle: Vec<Carrier>,
    made: usize,
    shared: Vec<u128>,
    states: Vec<State>,
    exchange: Vec<u64>,
}

impl Runner {
    /// Runs block `index` of the grid.
    ///
    /// # Safety
    /// As for [`super::launch`].
    pub(super) unsafe fn run(&mut self, launch: &Launch<'_>, index: u64) -> Result<(), Fault> {
        let Launch { entry, grid, words, arguments, shuffle } = launch;
        let mut states = std::mem::take(&mut self.states);
        let mut exchange = std::mem::take(&mut self.exchange);
        states.clear();
        states.resize(entry.block as usize, State::Fresh);
        exchange.resize(entry.block as usize, 0);
        let detector = arguments.clone().map(|arguments| Detector::new(arguments, entry, *grid, index).into());
        let block = Block {
            grid: *grid,
            index: grid.place(index),
            threads: entry.block,
            shared: self.shared_memory(entry.shared_bytes as usize),
            shared_bytes: entry.shared_bytes as usize,
            thread: match &detector {
                _ if !has_fused() => entry.thread.portable,
                None => entry.thread.fused,
                Some(_) => entry.thread.watched,
            },
            words: words.as_ptr(),
            running: Cell::new(0),
            started: Cell::new(0),
            order: shuffle.map(|seed| Order::new(entry.block, seed, index).into()),
            yielder: Cell::new(core::ptr::null()),
            states: RefCell::new(states),
            exchange: RefCell::new(exchange),
            detector,
        };
        let entered = Entered::new(&block);
        let outcome = self.schedule(&block).and_then(|()| self.check_red_zones(&block));
        drop(entered);
        self.states = block.states.into_inner();
        self.exchange = block.exchange.into_inner();
        outcome.map_err(|(thread, cause)| Fault { kernel: entry.name, block: block.index, thread, cause })
    }

    fn schedule(&mut self, block: &Block) -> Result<(), (u32, Cause)> {
        // The carrier of each thread that waits, by thread.
        let mut carriers: Vec<Option<Carrier>> = Vec::new();
        let outcome = self.run_threads(block, &mut carriers);
        // After a fault these still hold suspended threads; dropping them unwinds their frames.
        debug_assert!(outcome.is_err() || carriers.iter().all(Option::is_none));
        outcome
    }

    fn run_threads(&mut self, block: &Block, carriers: &mut Vec<Option<Carrier>>) -> Result<(), (u32, Cause)> {
        let fault = |cause| (block.running.get(), cause);
        while block.started.get() < block.threads {
            let mut carrier = self.idle.pop().unwrap_or_else(|| {
                self.made += 1;
                Carrier::new(self.made)
            });
            carrier.resume(block).map_err(fault)?;
            self.park(block, carrier, carriers);
        }
        // No thread waits: the whole block ran on one coroutine.
        if carriers.is_empty() {
            return Ok(());
        }
        loop {
            if !resolve(block)? {
                return Ok(());
            }
            if let Some(order) = &block.order {
                order.borrow_mut().draw();
            }
            for place in 0..block.threads {
                let thread = block.thread_at(place);
                if !matches!(block.states.borrow()[thread as usize], State::Ready) {
                    continue;
                }
                let mut carrier = carriers[thread as usize].take().expect("a ready thread has a carrier");
                block.running.set(thread);
                carrier.resume(block).map_err(fault)?;
                self.park(block, carrier, carriers);
            }
        }
    }

    /// Keeps a carrier with the thread that waits on it, or for another use.
    fn park(&mut self, block: &Block, carrier: Carrier, carriers: &mut Vec<Option<Carrier>>) {
        let thread = block.running.get() as usize;
        if matches!(block.states.borrow()[thread], State::Waiting(_)) {
            if carriers.is_empty() {
                carriers.resize_with(block.threads as usize, || None);
            }
            carriers[thread] = Some(carrier);
        } else {
            self.idle.push(carrier);
        }
    }

    /// Poisoned shared memory of `bytes` between two red zones.
    fn shared_memory(&mut self, bytes: usize) -> *mut u8 {
        let total = bytes.next_multiple_of(16) + 2 * RED_ZONE_BYTES;
        self.shared.resize(self.shared.len().max(total / 16), 0);
        let start = self.shared.as_mut_ptr().cast::<u8>();
        // SAFETY: the vector holds `total` bytes.
        unsafe {
            start.write_bytes(RED_ZONE, RED_ZONE_BYTES);
            start.add(RED_ZONE_BYTES).write_bytes(POISON, bytes);
            start.add(RED_ZONE_BYTES + bytes).write_bytes(RED_ZONE, total - RED_ZONE_BYTES - bytes);
            start.add(RED_ZONE_BYTES)
        }
    }

    fn check_red_zones(&self, block: &Block) -> Result<(), (u32, Cause)> {
        let bytes = block.shared_bytes;
        let total = bytes.next_multiple_of(16) + 2 * RED_ZONE_BYTES;
        // SAFETY: the vector holds `total` initialised bytes, and no thread of the block is left.
        let memory = unsafe { std::slice::from_raw_parts(self.shared.as_ptr().cast::<u8>(), total) };
        let zones = (0..RED_ZONE_BYTES).chain(RED_ZONE_BYTES + bytes..total);
        for at in zones {
            if memory[at] != RED_ZONE {
                let offset = at as i64 - RED_ZONE_BYTES as i64;
                return Err((block.running.get(), Cause::SharedOverrun { offset, size: bytes }));
            }
        }
        Ok(())
    }
}

/// Makes ready what can go on. False: every thread has ended.
fn resolve(block: &Block) -> Result<bool, (u32, Cause)> {
    let mut states = block.states.borrow_mut();
    let mut exchange = block.exchange.borrow_mut();
    let mut progress = false;
    let mut waiting = None;
    for warp in (0..block.threads).step_by(WARP as usize) {
        for thread in warp..(warp + WARP).min(block.threads) {
            let State::Waiting(wait) = states[thread as usize] else { continue };
            waiting.get_or_insert((thread, wait));
            let Some(mask) = wait.collective.mask() else { continue };
            let lanes = (0..WARP).filter(|lane| mask >> lane & 1 == 1).map(|lane| warp + lane);
            if missing(&states, wait, lanes.clone()).is_some() {
                continue;
            }
            complete(&mut states, &mut exchange, wait.collective, lanes);
            block.met(wait.collective, thread);
            progress = true;
        }
    }
    let Some((thread, wait)) = waiting else { return Ok(false) };
    if progress {
        return Ok(true);
    }
    // Nothing moved within a warp: the block must stand at one barrier, or it never goes on.
    let lanes: Vec<u32> = match wait.collective.mask() {
        None => (0..block.threads).collect(),
        Some(mask) => (0..WARP).filter(|lane| mask >> lane & 1 == 1).map(|lane| thread / WARP * WARP + lane).collect(),
    };
    if let Some(missing) = missing(&states, wait, lanes.iter().copied()) {
        let found = match states.get(missing as usize) {
            Some(State::Waiting(other)) => format!("waits at {} ({:?})", other.location, other.collective),
            Some(_) => "has ended".into(),
            None => "does not exist".into(),
        };
        let waits_at = format!("{} ({:?})", wait.location, wait.collective);
        return Err((thread, Cause::Divergence { waits_at, missing, found }));
    }
    complete(&mut states, &mut exchange, wait.collective, lanes.iter().copied());
    block.met(wait.collective, thread);
    Ok(true)
}

/// The first of `threads` that does not stand at `wait`.
fn missing(states: &[State], wait: Wait, mut threads: impl Iterator<Item = u32>) -> Option<u32> {
    threads.find(|&thread| match states.get(thread as usize) {
        Some(State::Waiting(other)) => {
            !other.collective.same(wait.collective)
                || (!core::ptr::eq(other.location, wait.location) && *other.location != *wait.location)
        }
        _ => true,
    })
}

/// Hands out the results and lets `threads` go on.
fn complete(
    states: &mut [State],
    exchange: &mut [u64],
    collective: Collective,
    threads: impl Iterator<Item = u32> + Clone,
) {
    let (mut count, mut total, mut ballot) = (0u64, 0u64, 0u64);
    for thread in threads.clone() {
        if let State::Waiting(wait) = states[thread as usize] {
            exchange[thread as usize] = wait.value;
            count += u64::from(wait.value != 0);
            total += 1;
            ballot |= u64::from(wait.value != 0) << (thread % WARP);
        }
    }
    let result = match collective {
        Collective::Barrier | Collective::Warp(_) => Some(0),
        Collective::BarrierCount => Some(count),
        Collective::BarrierAnd => Some(u64::from(count == total)),
        Collective::BarrierOr => Some(u64::from(count != 0)),
        Collective::Ballot(_) => Some(ballot),
        Collective::Shuffle { .. } => None,
    };
    for thread in threads {
        if let Some(result) = result {
            exchange[thread as usize] = result;
        }
        states[thread as usize] = State::Ready;
    }
}

fn has_fused() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    true
}
