//! The collective operations at which threads wait for each other, and their results.
//!
//! Invariant: a result depends only on the threads' values, never on the order of their arrival.

use super::{WARP, current_block};
use core::mem::transmute_copy;
use std::panic::Location;

/// An operation that several threads perform together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// A barrier of all threads of the block.
    Barrier,
    /// A barrier of all threads of the block. Each thread gets the number of threads that brought
    /// non-zero.
    BarrierCount,
    /// A barrier of all threads of the block. Each thread gets 1 if all brought non-zero.
    BarrierAnd,
    /// A barrier of all threads of the block. Each thread gets 1 if at least one brought non-zero.
    BarrierOr,
    /// A barrier of the lanes of a mask.
    Warp(u32),
    /// A vote of the lanes of a mask. Each lane gets the set of lanes that brought non-zero.
    Ballot(u32),
    /// A gather of the lanes of a mask. Each lane may read the values of all.
    Gather(u32),
    /// A shuffle of the lanes of a mask. Each lane gets the value of lane `source`.
    Shuffle {
        /// The participating lanes.
        mask: u32,
        /// The lane of the warp whose value this one gets. It is a byte, so that the whole enum
        /// fits a register on its way to the scheduler.
        source: u8,
    },
    /// A wait for the end of a phase of the [`mbarrier`](super::mbarrier) at a byte of shared
    /// memory. The thread resumes without the others.
    Phase {
        /// The byte at which the barrier lies.
        byte: u32,
        /// The parity of the phase.
        is_odd: bool,
    },
}

impl Collective {
    /// Brings `value`, waits for the others, and returns this thread's result.
    #[inline(always)]
    #[track_caller]
    pub fn wait(self, value: u64) -> u64 {
        // SAFETY: the reference is not kept.
        unsafe { current_block() }.wait(self, value, Location::caller())
    }

    /// True for a barrier of all threads of the block.
    pub(super) fn is_of_block(self) -> bool {
        matches!(self, Self::Barrier | Self::BarrierCount | Self::BarrierAnd | Self::BarrierOr)
    }

    /// Returns the participating lanes, or `None` for the whole block and for a phase.
    pub(super) fn mask(self) -> Option<u32> {
        match self {
            Self::Barrier | Self::BarrierCount | Self::BarrierAnd | Self::BarrierOr | Self::Phase { .. } => None,
            Self::Warp(mask) | Self::Ballot(mask) | Self::Gather(mask) | Self::Shuffle { mask, .. } => Some(mask),
        }
    }

    /// True if two threads perform the same operation.
    pub(super) fn same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shuffle { mask: a, .. }, Self::Shuffle { mask: b, .. }) => a == b,
            (a, b) => a == b,
        }
    }
}

/// Returns the values of the lanes of the caller's segment, by their position in it. A segment has
/// `lanes` lanes, a power of two. All lanes of `mask`, which includes the segment, call it
/// together. A single wait replaces many shuffles, each of which would wait.
///
/// # Safety
/// `T` has no padding, all lanes of the mask bring the same `T`, and `lanes` is a power of two up
/// to 32.
///
/// # Panics
/// Panics if the segment is not in the mask.
#[inline(always)]
#[track_caller]
pub unsafe fn gather<T: Copy>(mask: u32, lanes: u32, value: T) -> [T; WARP as usize] {
    const { assert!(size_of::<T>() == 4 || size_of::<T>() == 8, "lanes exchange 4 or 8 bytes") };
    debug_assert!(lanes.is_power_of_two() && lanes <= WARP, "a segment of {lanes} lanes");
    // SAFETY: it reads as many bytes as `T` has. All are initialized, because `T` has no padding.
    let word = unsafe {
        if size_of::<T>() == 4 { u64::from(transmute_copy::<T, u32>(&value)) } else { transmute_copy::<T, u64>(&value) }
    };
    Collective::Gather(mask).wait(word);
    let mut values = [value; WARP as usize];
    // SAFETY: the reference is not kept past this call.
    let block = unsafe { current_block() };
    let first = block.lane() & !(lanes - 1);
    let segment = (u32::MAX >> (WARP - lanes)) << first;
    assert!(mask & segment == segment, "lanes {segment:#010x} are not all in the mask {mask:#010x}");
    let brought = block.brought_by(first..first + lanes);
    // SAFETY: the lane is in the mask, so it brought the word to this gather, and made it from the
    // same `T`.
    let value_of = |word| unsafe {
        if size_of::<T>() == 4 { transmute_copy(&(word as u32)) } else { transmute_copy::<u64, T>(&word) }
    };
    // Eight at a time: a constant, so that the compiler converts whole registers.
    let ((words, rest), (eights, _)) = (brought.as_chunks::<8>(), values.as_chunks_mut::<8>());
    for (words, values) in words.iter().zip(eights) {
        *values = words.map(value_of);
    }
    // The remainder exists only for segments of fewer than eight lanes.
    for (&word, value) in rest.iter().zip(&mut values) {
        *value = value_of(word);
    }
    values
}
