//! The operations at which threads wait for each other, and what each thread gets from them.
//!
//! Invariant: a result depends on the values that the threads brought, never on the order in which they came.

use super::{WARP, current_block};
use core::mem::transmute_copy;
use std::panic::Location;

/// An operation that several threads perform together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// All threads of the block.
    Barrier,
    /// All threads of the block; each gets how many brought non-zero.
    BarrierCount,
    /// All threads of the block; each gets 1 when all brought non-zero.
    BarrierAnd,
    /// All threads of the block; each gets 1 when at least one brought non-zero.
    BarrierOr,
    /// The lanes of a mask.
    Warp(u32),
    /// The lanes of a mask; each gets the set of those that brought non-zero.
    Ballot(u32),
    /// The lanes of a mask; each may look at what all brought.
    Gather(u32),
    /// The lanes of a mask; each gets what lane `source` brought.
    Shuffle {
        /// The lanes that take part.
        mask: u32,
        /// The lane of the warp whose value this one gets. A byte, so that the whole fits a register on its way to the scheduler.
        source: u8,
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

    /// The lanes that take part; `None`: the whole block.
    pub(super) fn mask(self) -> Option<u32> {
        match self {
            Self::Barrier | Self::BarrierCount | Self::BarrierAnd | Self::BarrierOr => None,
            Self::Warp(mask) | Self::Ballot(mask) | Self::Gather(mask) | Self::Shuffle { mask, .. } => Some(mask),
        }
    }

    /// Whether two threads perform the same operation.
    pub(super) fn same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shuffle { mask: a, .. }, Self::Shuffle { mask: b, .. }) => a == b,
            (a, b) => a == b,
        }
    }
}

/// What the lanes of the caller's segment bring, by their place in it. A segment has `lanes` lanes, a power of two. All lanes of
/// `mask`, the segment among them, call it together. One wait shows a lane what it would otherwise see by many shuffles, with a
/// wait for each.
///
/// # Safety
/// `T` has no padding, all lanes of the mask bring the same `T`, and `lanes` is a power of two up to 32.
///
/// # Panics
/// When the segment is not in the mask.
#[inline(always)]
#[track_caller]
pub unsafe fn gather<T: Copy>(mask: u32, lanes: u32, value: T) -> [T; WARP as usize] {
    const { assert!(size_of::<T>() == 4 || size_of::<T>() == 8, "lanes exchange 4 or 8 bytes") };
    debug_assert!(lanes.is_power_of_two() && lanes <= WARP, "a segment of {lanes} lanes");
    // SAFETY: reads as many bytes as `T` has. All are initialised, since `T` has no padding.
    let word = unsafe {
        if size_of::<T>() == 4 { u64::from(transmute_copy::<T, u32>(&value)) } else { transmute_copy::<T, u64>(&value) }
    };
    Collective::Gather(mask).wait(word);
    let mut values = [value; WARP as usize];
    // SAFETY: the reference is not kept beyond this call.
    let block = unsafe { current_block() };
    let first = block.lane() & !(lanes - 1);
    let segment = (u32::MAX >> (WARP - lanes)) << first;
    assert!(mask & segment == segment, "lanes {segment:#010x} are not all in the mask {mask:#010x}");
    let brought = block.brought_by(first..first + lanes);
    // SAFETY: the lane is in the mask, so it brought the word to this gather, and made it from the same `T`.
    let value_of = |word| unsafe {
        if size_of::<T>() == 4 { transmute_copy(&(word as u32)) } else { transmute_copy::<u64, T>(&word) }
    };
    // Eight at a time: a number that the compiler knows, so that it converts whole registers.
    let ((words, rest), (eights, _)) = (brought.as_chunks::<8>(), values.as_chunks_mut::<8>());
    for (words, values) in words.iter().zip(eights) {
        *values = words.map(value_of);
    }
    // Fewer than eight lanes are all there are.
    for (&word, value) in rest.iter().zip(&mut values) {
        *value = value_of(word);
    }
    values
}
