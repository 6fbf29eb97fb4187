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
//! An mbarrier stores up to which time it follows each thread of the block. A thread that arrives
//! adds what it follows, and its own time, which it increments. A thread that has waited follows
//! all of that.
//!
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

/// The time up to which its holder follows each thread of the block.
type Followed = Vec<u32>;

/// The times that an mbarrier follows: of its ended phases, and of the present one too.
struct Arrivals {
    byte: u32,
    ended: Followed,
    present: Followed,
}

fn join(times: &mut [u32], others: &[u32]) {
    for (time, other) in times.iter_mut().zip(others) {
        *time = other.max(time).to_owned();
    }
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
    /// Empty until the first mbarrier.
    followed: &'c [u32],
}

impl Now<'_> {
    /// True if this access observes the effect of the `earlier` one.
    #[inline]
    pub(super) fn follows(&self, earlier: Stamp) -> bool {
        let now = self.stamp;
        earlier.block == now.block
            && (earlier.epoch < now.epoch
                || earlier.thread == now.thread
                || earlier.warp() == now.warp() && earlier.time < self.seen[earlier.lane() as usize]
                || self.followed.get(usize::from(earlier.thread)).is_some_and(|&time| earlier.time < time))
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
    /// For each thread, the times of other threads that it has learned from mbarriers. Empty until
    /// the first arrival.
    followed: Vec<Followed>,
    arrivals: Vec<Arrivals>,
    threads: u32,
}

impl Clock {
    pub(super) fn new(block: u32, threads: u32) -> Self {
        let times = vec![0; threads.div_ceil(WARP) as usize];
        let (seen, followed, arrivals) = (Vec::new(), Vec::new(), Vec::new());
        Self { block, epoch: NonZeroU32::MIN, times, seen, followed, arrivals, threads }
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
        if self.followed.is_empty() {
            return;
        }
        let own = (0..WARP).filter(|&lane| meets(lane as usize)).map(|lane| (warp * WARP + lane) as usize);
        let mut joined = vec![0; self.threads as usize];
        own.clone().for_each(|thread| join(&mut joined, &self.followed[thread]));
        own.for_each(|thread| self.followed[thread].clone_from(&joined));
    }

    /// Records that a thread arrives at the mbarrier at a byte of shared memory, and `ends` its
    /// phase.
    pub(super) fn arrived(&mut self, thread: u32, byte: u32, ends: bool) {
        let none = vec![0; self.threads as usize];
        self.followed.resize(self.threads as usize, none.clone());
        let found = self.arrivals.iter().position(|arrivals| arrivals.byte == byte);
        let found = found.unwrap_or_else(|| {
            self.arrivals.push(Arrivals { byte, ended: none.clone(), present: none });
            self.arrivals.len() - 1
        });
        let Arrivals { ended, present, .. } = &mut self.arrivals[found];
        join(present, &self.followed[thread as usize]);
        let (warp, lane) = (thread / WARP, (thread % WARP) as usize);
        // What the thread follows of its own warp, and itself.
        let of_warp = &mut present[(warp * WARP) as usize..];
        if let Some(seen) = self.seen.get(thread as usize) {
            join(of_warp, seen);
        }
        let time = &mut self.times[warp as usize];
        *time += 1;
        of_warp[lane] = *time;
        if ends {
            ended.clone_from(present);
        }
    }

    /// Records that a thread has waited for a phase of the mbarrier at a byte of shared memory.
    pub(super) fn acquired(&mut self, thread: u32, byte: u32) {
        if let Some(arrivals) = self.arrivals.iter().find(|arrivals| arrivals.byte == byte) {
            join(&mut self.followed[thread as usize], &arrivals.ended);
        }
    }

    /// Records that a thread follows the accesses of another, but not what those follow.
    pub(super) fn follows(&mut self, thread: u32, other: u32) {
        self.followed.resize(self.threads as usize, vec![0; self.threads as usize]);
        let time = &mut self.times[(other / WARP) as usize];
        *time += 1;
        self.followed[thread as usize][other as usize] = *time;
    }

    /// Returns an access of a thread at the current time.
    #[inline]
    pub(super) fn now(&self, thread: u32, site: Site) -> Now<'_> {
        let time = self.times[(thread / WARP) as usize];
        let stamp = Stamp { block: self.block, epoch: self.epoch, time, thread: thread as u16, site };
        let followed = self.followed.get(thread as usize).map_or(&[][..], Vec::as_slice);
        Now { stamp, seen: self.seen.get(thread as usize).unwrap_or(NOTHING_SEEN), followed }
    }
}
