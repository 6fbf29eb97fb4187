//! Barriers in shared memory at which some threads of a block arrive and others wait (mbarrier).
//!
//! A barrier counts arrivals. When the last of a phase has arrived, the next phase begins. A wait
//! names the parity of the phase that it waits for: 0 for the first, 1 for the second, and so on. A
//! fresh barrier has, so to say, ended a phase of parity 1.
//!
//! Invariant: a thread that has waited for a phase follows everything that the threads that arrived
//! in it had done before.

use super::collective::Collective;
use super::{Block, current, current_block};
use std::panic::Location;

/// A barrier of a block.
pub(super) struct Phases {
    byte: u32,
    /// The arrivals of a phase, and those that the present phase still lacks.
    expected: u32,
    missing: u32,
    /// The number of phases that have ended.
    ended: u32,
}

impl Phases {
    fn of(all: &mut [Self], byte: u32) -> &mut Self {
        let found = all.iter_mut().find(|phases| phases.byte == byte);
        found.unwrap_or_else(|| panic!("the barrier at byte {byte} of shared memory is not initialized"))
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
        all.push(Phases { byte, expected: arrivals, missing: arrivals, ended: 0 });
    });
}

/// Arrives at the barrier.
///
/// # Panics
/// Panics if the barrier is not initialized.
pub fn arrive(byte: u32) {
    current(|block| {
        let mut all = block.phases.borrow_mut();
        let phases = Phases::of(&mut all, byte);
        phases.missing -= 1;
        let ends = phases.missing == 0;
        if ends {
            (phases.missing, phases.ended) = (phases.expected, phases.ended + 1);
        }
        block.arrived(byte, ends);
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
}
