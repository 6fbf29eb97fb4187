//! The emulator's side: questions to the block that runs, and waits for its other threads.

use crate::emulator::{Collective, current};
use core::mem::{size_of, transmute_copy};
use core::sync::atomic::{Ordering, fence};

macro_rules! indices {
    ($($name:ident: $of:ident[$axis:literal];)*) => {$(
        #[inline(always)]
        pub(crate) fn $name() -> u32 {
            current(|block| block.$of()[$axis])
        }
    )*};
}
indices! {
    thread_idx_x: thread_idx[0];
    thread_idx_y: thread_idx[1];
    thread_idx_z: thread_idx[2];
    block_idx_x: block_idx[0];
    block_idx_y: block_idx[1];
    block_idx_z: block_idx[2];
    block_dim_x: block_dim[0];
    block_dim_y: block_dim[1];
    block_dim_z: block_dim[2];
    grid_dim_x: grid_dim[0];
    grid_dim_y: grid_dim[1];
    grid_dim_z: grid_dim[2];
}

#[inline(always)]
pub(crate) fn lane_id() -> u32 {
    current(|block| block.lane())
}

#[inline(always)]
pub(crate) fn active_mask() -> u32 {
    current(|block| block.active_lanes())
}

#[inline(always)]
#[track_caller]
pub(crate) fn barrier() {
    Collective::Barrier.wait(0);
}

macro_rules! barriers {
    ($($name:ident: $collective:ident;)*) => {$(
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(predicate: u32) -> u32 {
            Collective::$collective.wait(u64::from(predicate)) as u32
        }
    )*};
}
barriers! {
    barrier_count: BarrierCount;
    barrier_and: BarrierAnd;
    barrier_or: BarrierOr;
}

macro_rules! fences {
    ($($name:ident)*) => {$(
        #[inline(always)]
        pub(crate) fn $name() {
            fence(Ordering::SeqCst);
        }
    )*};
}
fences! { fence_block fence_device fence_system }

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them. The emulator checks it.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn sync_warp(mask: u32) {
    Collective::Warp(mask).wait(0);
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them. The emulator checks it.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn vote_all(mask: u32, predicate: bool) -> bool {
    Collective::Ballot(mask).wait(u64::from(predicate)) as u32 == mask
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them. The emulator checks it.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn vote_any(mask: u32, predicate: bool) -> bool {
    Collective::Ballot(mask).wait(u64::from(predicate)) != 0
}

/// # Safety
/// Every lane in `mask` makes this call, and the caller is among them. The emulator checks it.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn vote_ballot(mask: u32, predicate: bool) -> u32 {
    Collective::Ballot(mask).wait(u64::from(predicate)) as u32
}

macro_rules! shuffles {
    ($($name:ident)*) => {$(
        /// Returns the value of lane `source`.
        ///
        /// # Safety
        /// Every lane in `mask` makes this call, the caller and its source lane are among them, and
        /// one lane's `T`, of 4 or 8 bytes without padding, is valid for the others.
        #[inline(always)]
        #[track_caller]
        pub(crate) unsafe fn $name<T: Copy>(mask: u32, value: T, _operand: u32, _width: u32, source: u32) -> T {
            // SAFETY: `T` has as many bytes as the word, and none is padding.
            let word = unsafe {
                if size_of::<T>() == 4 { u64::from(transmute_copy::<T, u32>(&value)) } else { transmute_copy::<T, u64>(&value) }
            };
            let moved = Collective::Shuffle { mask, source: source as u8 }.wait(word);
            // SAFETY: the word is the `T` of this lane, or of another that made the same call.
            unsafe {
                if size_of::<T>() == 4 { transmute_copy::<u32, T>(&(moved as u32)) } else { transmute_copy::<u64, T>(&moved) }
            }
        }
    )*};
}
shuffles! { shuffle_xor shuffle_down shuffle_idx }

/// Returns the start of the block's dynamic shared memory.
#[inline(always)]
pub(crate) fn shared_start() -> *mut u8 {
    current(|block| block.shared_start())
}

/// Returns `a * b + c`, rounded once.
#[inline(always)]
pub(crate) fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    f32::mul_add(a, b, c)
}

/// Returns the square root.
#[inline(always)]
pub(crate) fn sqrt(x: f32) -> f32 {
    f32::sqrt(x)
}
