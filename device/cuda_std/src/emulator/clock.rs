//! The happens-before order within a block. A barrier orders all threads of the block, and a warp
//! barrier the lanes that meet there.
//!
//! Each barrier increments the epoch, and each warp barrier increments the time of its warp. Each
//! lane stores up to which time it follows each other lane of its warp (a vector clock; Fidge and
//! Mattern, 1988).
//!
//! ```text
//! one warp                 time   lane 0 follows lane 1 before   lane 2 follows lane 0 before
//! start                     0                0                              0
//! sync_warp(lanes 0, 1)     1                1                              0
//! sync_warp(lanes 1, 2)     2                1                              1       through lane 1
//! ```
//! Shuffles and votes are not recorded here: they exchange values and do not order memory.
//!
//! Invariant: an access follows another if and only if CUDA guarantees that it observes the other.

use super::WARP;
use super::site::Site;
use core::num::NonZeroU32;

/// The times by lane of a warp: its holder follows the accesses that the lane made before this
/// time.
type Seen = [u32; WARP as usize];

const NOTHING_SEEN: &Seen = &[0; WARP as usize];

/// The time, the thread and the source line of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The block's index in the grid, x first.
    pub(super) block: u32,
    /// The number of the block's barriers so far, plus one.
    pub(super) epoch: NonZeroU32,
    /// The number of the warp's barriers so far.
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

    /// True if one warp made both accesses, with no barrier of any kind between them.
    #[inline]
    pub(super) fn same_moment(self, other: Self) -> bool {
        self.epoch == other.epoch && self.time == other.time && self.same_warp(other)
    }

    #[inline]
    pub(super) fn same_warp(self, other: Self) -> bool {
        self.warp() == other.warp() && self.block == other.block
    }

    /// Returns this access by another lane of the warp.
    pub(super) fn by_lane(self, lane: u32) -> Self {
        Self { thread: (self.warp() * WARP + lane) as u16, ..self }
    }
}

/// An access at the current time.
#[derive(Clone, Copy)]
pub(super) struct Now<'c> {
    pub(super) stamp: Stamp,
    seen: &'c Seen,
}

impl Now<'_> {
    /// True if this access observes the effect of the `earlier` one.
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
    /// The times by warp.
    times: Vec<u32>,
    /// The vector clocks by thread. Empty until the first warp barrier.
    seen: Vec<Seen>,
}

impl Clock {
    pub(super) fn new(block: u32, threads: u32) -> Self {
        Self { block, epoch: NonZeroU32::MIN, times: vec![0; threads.div_ceil(WARP) as usize], seen: Vec::new() }
    }

    /// Records a barrier that every thread of the block has reached.
    pub(super) fn barrier(&mut self) {
        self.epoch = self.epoch.checked_add(1).expect("a block passes fewer than 2^32 barriers");
    }

    /// Records a warp barrier that the lanes in `mask` of a warp have reached.
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

    /// Returns an access of a thread at the current time.
    #[inline]
    pub(super) fn now(&self, thread: u32, site: Site) -> Now<'_> {
        let time = self.times[(thread / WARP) as usize];
        let stamp = Stamp { block: self.block, epoch: self.epoch, time, thread: thread as u16, site };
        Now { stamp, seen: self.seen.get(thread as usize).unwrap_or(NOTHING_SEEN) }
    }
}
