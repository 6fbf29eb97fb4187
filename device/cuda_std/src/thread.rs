//! A thread's position in its grid, and the barriers of its block.
//!
//! Invariant: every thread of a block reaches the same barrier, or none does. The emulator reports
//! anything else as an error.

use crate::machine;

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            machine::$name()
        }
    )*};
}

index! {
    /// Returns this thread's index in its block, x.
    thread_idx_x;
    /// Returns this thread's index in its block, y.
    thread_idx_y;
    /// Returns this thread's index in its block, z.
    thread_idx_z;
    /// Returns this block's index in the grid, x.
    block_idx_x;
    /// Returns this block's index in the grid, y.
    block_idx_y;
    /// Returns this block's index in the grid, z.
    block_idx_z;
    /// Returns the threads in a block, x.
    block_dim_x;
    /// Returns the threads in a block, y.
    block_dim_y;
    /// Returns the threads in a block, z.
    block_dim_z;
    /// Returns the blocks in the grid, x.
    grid_dim_x;
    /// Returns the blocks in the grid, y.
    grid_dim_y;
    /// Returns the blocks in the grid, z.
    grid_dim_z;
}

/// Returns this thread's index in a one-dimensional grid, in 32 bits. It wraps past 2^32 threads,
/// so a contract allows no more.
#[inline(always)]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Waits until every thread of the block has reached this call, and makes their writes visible to
/// each other.
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    machine::barrier();
}

macro_rules! barrier {
    ($($(#[$doc:meta])* $name:ident: $barrier:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        #[track_caller]
        pub fn $name(predicate: u32) -> u32 {
            machine::$barrier(predicate)
        }
    )*};
}

barrier! {
    /// Waits like [`sync_threads`], and returns the number of the block's threads that passed a
    /// non-zero `predicate`.
    sync_threads_count: barrier_count;
    /// Waits like [`sync_threads`], and returns non-zero if every thread of the block passed a
    /// non-zero `predicate`.
    sync_threads_and: barrier_and;
    /// Waits like [`sync_threads`], and returns non-zero if any thread of the block passed a
    /// non-zero `predicate`.
    sync_threads_or: barrier_or;
}

macro_rules! fence {
    ($($(#[$doc:meta])* $name:ident: $fence:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() {
            machine::$fence();
        }
    )*};
}

fence! {
    /// Orders this thread's writes for the threads of its block.
    block_fence: fence_block;
    /// Orders this thread's writes for every thread of the device.
    device_fence: fence_device;
    /// Orders this thread's writes for every thread of the device and the host.
    system_fence: fence_system;
}
