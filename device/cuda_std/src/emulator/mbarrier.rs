//! Barriers in shared memory at which some threads of a block arrive and others wait (mbarrier).
//!
//! A barrier counts arrivals. When the last of a phase has arrived, the next phase begins. A wait
//! names the parity of the phase that it waits for: 0 for the first, 1 for the second, and so on. A
//! fresh barrier has, so to say, ended a phase of parity 1.
//!
//! A phase may also expect bytes, which the copy engine (TMA) brings: it ends when all have arrived
//! and all bytes have come. The emulator makes the engine's copies at once. To race detection they
//! are accesses of the engine, not of the thread that has started them. They follow what that
//! thread had done, and only a wait for the barrier follows them.
//!
//! ```text
//! threads of the block   0 .. 383      the engine for the first barrier: 384, the next: 385, ..
//! ```
//! Invariant: a thread that has waited for a phase follows everything that the threads that arrived
//! in it had done before.

use super::collective::Collective;
use super::detector::ENGINES;
use super::{Block, WARP, current, current_block};
use std::panic::Location;

/// A barrier of a block.
pub(super) struct Phases {
    byte: u32,
    /// The arrivals of a phase, and those that the present phase still lacks.
    expected: u32,
    missing: u32,
    /// The expected bytes of the present phase that have not come.
    bytes: i64,
    /// The number of phases that have ended.
    ended: u32,
}

impl Phases {
    fn of(all: &mut [Self], byte: u32) -> &mut Self {
        let found = all.iter_mut().find(|phases| phases.byte == byte);
        found.unwrap_or_else(|| panic!("the barrier at byte {byte} of shared memory is not initialized"))
    }

    /// Begins the next phase if nothing is missing. Returns true if so.
    fn end(&mut self) -> bool {
        let ends = self.missing == 0 && self.bytes == 0;
        if ends {
            (self.missing, self.ended) = (self.expected, self.ended + 1);
        }
        ends
    }
}

/// Initializes the barrier at a byte of the block's shared memory, for phases of `arrivals`
/// arrivals.
///
/// # Panics
/// Panics if there is a barrier, or if it has no arrivals.
pub fn init(byte: u32, arrivals: u32) {
    assert!(arrivals > 0, "a barrier without arrivals");
    current(|block| {
        let mut all = block.phases.borrow_mut();
        assert!(all.iter().all(|phases| phases.byte != byte), "the barrier at byte {byte} is initialized twice");
        all.push(Phases { byte, expected: arrivals, missing: arrivals, bytes: 0, ended: 0 });
    });
}

/// Arrives at the barrier.
///
/// # Panics
/// Panics if the barrier is not initialized.
pub fn arrive(byte: u32) {
    arrive_expecting(byte, 0);
}

/// Arrives at the barrier, whose present phase then expects this many more bytes.
///
/// # Panics
/// Panics if the barrier is not initialized, or if more threads arrive than it counts.
pub fn arrive_expecting(byte: u32, bytes: u32) {
    current(|block| {
        let mut all = block.phases.borrow_mut();
        let phases = Phases::of(&mut all, byte);
        phases.missing = phases.missing.checked_sub(1).expect("more arrivals than the barrier counts");
        phases.bytes += i64::from(bytes);
        let ends = phases.end();
        block.arrived(block.thread_idx()[0], byte, ends);
    });
}

/// Makes a copy of the engine, `copy`, which brings `bytes` to the barrier.
///
/// # Panics
/// Panics if the barrier is not initialized.
pub fn bring(byte: u32, bytes: u32, copy: impl FnOnce()) {
    let engine = current(|block| {
        let all = block.phases.borrow();
        let number = all.iter().position(|phases| phases.byte == byte);
        let number = number.unwrap_or_else(|| panic!("the barrier at byte {byte} of shared memory is not initialized"));
        assert!(number < ENGINES as usize, "copies to more than {ENGINES} mbarriers");
        block.threads.next_multiple_of(WARP) + number as u32
    });
    current(|block| block.begin_engine(engine));
    copy();
    current(|block| {
        let mut all = block.phases.borrow_mut();
        let phases = Phases::of(&mut all, byte);
        phases.bytes -= i64::from(bytes);
        let ends = phases.end();
        block.end_engine();
        block.arrived(engine, byte, ends);
    });
}

/// Waits until the phase of this parity has ended.
///
/// # Panics
/// Panics if the barrier is not initialized.
#[track_caller]
pub fn wait(byte: u32, parity: u32) {
    let phase = Collective::Phase { byte, is_odd: parity != 0 };
    if !current(|block| block.has_ended(byte, parity != 0)) {
        // SAFETY: the reference is not kept.
        unsafe { current_block() }.wait(phase, 0, Location::caller());
    }
    current(|block| block.acquired(byte));
}

impl Block {
    /// True if the present phase of a barrier follows one of this parity.
    pub(super) fn has_ended(&self, byte: u32, is_odd: bool) -> bool {
        let mut all = self.phases.borrow_mut();
        Phases::of(&mut all, byte).ended.is_multiple_of(2) == is_odd
    }
    /// Called when a thread arrives at an mbarrier, and `ends` its phase.
    fn arrived(&self, thread: u32, byte: u32, ends: bool) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().arrived(thread, byte, ends);
        }
    }

    /// Called when the running thread has waited for a phase of an mbarrier.
    fn acquired(&self, byte: u32) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().acquired(self.thread_idx()[0], byte);
        }
    }
}
