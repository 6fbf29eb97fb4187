//! What happened before what within a block. A barrier orders all threads of the block, a warp barrier the lanes that meet there.
//!
//! Each barrier counts up the epoch. Each warp barrier counts up the time of its warp. Each lane knows up to which time it follows
//! each other lane of its warp (a vector clock; Fidge and Mattern, 1988).
//!
//! ```text
//! one warp                              time    lane 0 follows lane 1 before     lane 2 follows lane 0 before
//! start                                  0                 0                                0
//! sync_warp(lanes 0, 1)                  1                 1                                0
//! sync_warp(lanes 1, 2)                  2                 1                                1       through lane 1
//! ```
//! Shuffles and votes are not told here: they exchange values and order no memory.
//!
//! Invariant: an access follows another exactly if CUDA promises that it sees it.

use super::WARP;
use super::site::Site;
use core::num::NonZeroU32;

/// By lane of a warp: whoever has this follows the accesses that the lane made before this time.
type Seen = [u32; WARP as usize];

const NOTHING_SEEN: &Seen = &[0; WARP as usize];

/// When an access happened, who made it, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The block's place in the grid, x first.
    pub(super) block: u32,
    /// Barriers of the block so far, plus one.
    pub(super) epoch: NonZeroU32,
    /// Warp barriers of the warp so far.
    time: u32,
    pub(super) thread: u16,
    pub(super) site: Site,
}

impl Stamp {
    fn warp(self) -> u32 {
        u32::from(self.thread) / WARP
    }

    pub(super) fn lane(self) -> u32 {
        u32::from(self.thread) % WARP
    }

    /// Whether one warp made both, with no barrier of any kind between them.
    #[inline]
    pub(super) fn same_moment(self, other: Self) -> bool {
        self.epoch == other.epoch && self.time == other.time && self.same_warp(other)
    }

    #[inline]
    pub(super) fn same_warp(self, other: Self) -> bool {
        self.warp() == other.warp() && self.block == other.block
    }

    /// This access by another lane of the warp.
    pub(super) fn by_lane(self, lane: u32) -> Self {
        Self { thread: (self.warp() * WARP + lane) as u16, ..self }
    }
}

/// An access that happens now.
#[derive(Clone, Copy)]
pub(super) struct Now<'c> {
    pub(super) stamp: Stamp,
    seen: &'c Seen,
}

impl Now<'_> {
    /// Whether this access sees what the `earlier` one did.
    #[inline]
    pub(super) fn follows(&self, earlier: Stamp) -> bool {
        let now = self.stamp;
        earlier.block == now.block
            && (earlier.epoch < now.epoch
                || earlier.thread == now.thread
                || earlier.warp() == now.warp() && earlier.time < self.seen[earlier.lane() as usize])
    }
}

/// The clocks of a block.
pub(super) struct Clock {
    block: u32,
    epoch: NonZeroU32,
    /// By warp.
    times: Vec<u32>,
    /// By thread. Empty until the first warp barrier.
    seen: Vec<Seen>,
}

impl Clock {
    pub(super) fn new(block: u32, threads: u32) -> Self {
        Self { block, epoch: NonZeroU32::MIN, times: vec![0; threads.div_ceil(WARP) as usize], seen: Vec::new() }
    }

    /// Every thread of the block has come to a barrier.
    pub(super) fn barrier(&mut self) {
        self.epoch = self.epoch.checked_add(1).expect("a block passes fewer than 2^32 barriers");
    }

    /// The lanes in `mask` of a warp have come to a warp barrier.
    pub(super) fn warp_barrier(&mut self, warp: u32, mask: u32) {
        self.seen.resize(self.times.len() * WARP as usize, *NOTHING_SEEN);
        let time = &mut self.times[warp as usize];
        *time += 1;
        let lanes = &mut self.seen[(warp * WARP) as usize..][..WARP as usize];
        let meets = |lane: usize| mask >> lane & 1 == 1;
        let mut joined = *NOTHING_SEEN;
        for lane in (0..lanes.len()).filter(|&lane| meets(lane)) {
            for (joined, seen) in joined.iter_mut().zip(lanes[lane]) {
                *joined = seen.max(*joined);
            }
        }
        for lane in (0..lanes.len()).filter(|&lane| meets(lane)) {
            joined[lane] = *time;
        }
        for lane in (0..lanes.len()).filter(|&lane| meets(lane)) {
            lanes[lane] = joined;
        }
    }

    /// An access of a thread at this moment.
    #[inline]
    pub(super) fn now(&self, thread: u32, site: Site) -> Now<'_> {
        let time = self.times[(thread / WARP) as usize];
        let stamp = Stamp { block: self.block, epoch: self.epoch, time, thread: thread as u16, site };
        Now { stamp, seen: self.seen.get(thread as usize).unwrap_or(NOTHING_SEEN) }
    }
}
