//! The operations at which threads wait for each other, and what each of them gets.
//!
//! Invariant: a result depends on the values that the threads brought, never on the order in which they came.

use super::current;
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
    /// All threads of the block; each gets 1 when one brought non-zero.
    BarrierOr,
    /// The lanes of a mask.
    Warp(u32),
    /// The lanes of a mask; each gets the set of those that brought non-zero.
    Ballot(u32),
    /// The lanes of a mask; each gets what lane `source` brought.
    Shuffle {
        /// The lanes that take part.
        mask: u32,
        /// The lane of the warp whose value this one gets.
        source: u32,
    },
}

impl Collective {
    /// Brings `value`, waits for the others, and returns this thread's result.
    #[inline]
    #[track_caller]
    pub fn wait(self, value: u64) -> u64 {
        let location = Location::caller();
        current(|block| block.wait(self, value, location))
    }

    /// The lanes that take part; `None`: the whole block.
    pub(super) fn mask(self) -> Option<u32> {
        match self {
            Self::Barrier | Self::BarrierCount | Self::BarrierAnd | Self::BarrierOr => None,
            Self::Warp(mask) | Self::Ballot(mask) | Self::Shuffle { mask, .. } => Some(mask),
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
