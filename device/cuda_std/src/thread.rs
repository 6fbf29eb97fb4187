//! A thread's position in its grid, and the barriers of its block.
//!
//! Invariant: every thread of a block reaches the same barrier, or none does. The emulator reports
//! anything else as an error.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator::{Collective, current};
#[cfg(target_arch = "nvptx64")]
use core::arch::nvptx;

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident: $gpu:ident, $cpu:ident[$axis:literal];)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: the intrinsic reads a special register.
            #[cfg(target_arch = "nvptx64")]
            return unsafe { nvptx::$gpu() as u32 };
            #[cfg(not(target_arch = "nvptx64"))]
            current(|block| block.$cpu()[$axis])
        }
    )*};
}

index! {
    /// Returns this thread's index in its block, x.
    thread_idx_x: _thread_idx_x, thread_idx[0];
    /// Returns this thread's index in its block, y.
    thread_idx_y: _thread_idx_y, thread_idx[1];
    /// Returns this thread's index in its block, z.
    thread_idx_z: _thread_idx_z, thread_idx[2];
    /// Returns this block's index in the grid, x.
    block_idx_x: _block_idx_x, block_idx[0];
    /// Returns this block's index in the grid, y.
    block_idx_y: _block_idx_y, block_idx[1];
    /// Returns this block's index in the grid, z.
    block_idx_z: _block_idx_z, block_idx[2];
    /// Returns the threads in a block, x.
    block_dim_x: _block_dim_x, block_dim[0];
    /// Returns the threads in a block, y.
    block_dim_y: _block_dim_y, block_dim[1];
    /// Returns the threads in a block, z.
    block_dim_z: _block_dim_z, block_dim[2];
    /// Returns the blocks in the grid, x.
    grid_dim_x: _grid_dim_x, grid_dim[0];
    /// Returns the blocks in the grid, y.
    grid_dim_y: _grid_dim_y, grid_dim[1];
    /// Returns the blocks in the grid, z.
    grid_dim_z: _grid_dim_z, grid_dim[2];
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
    // SAFETY: a barrier; the intrinsic is convergent.
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        nvptx::_syncthreads()
    }
    #[cfg(not(target_arch = "nvptx64"))]
    Collective::Barrier.wait(0);
}

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier0.popc"]
    fn barrier_popc(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.barrier0.and"]
    fn barrier_and(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.barrier0.or"]
    fn barrier_or(predicate: i32) -> i32;
    #[link_name = "llvm.nvvm.membar.cta"]
    fn membar_cta();
    #[link_name = "llvm.nvvm.membar.gl"]
    fn membar_gl();
    #[link_name = "llvm.nvvm.membar.sys"]
    fn membar_sys();
}

macro_rules! barrier {
    ($($(#[$doc:meta])* $name:ident: $gpu:ident, $collective:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        #[track_caller]
        pub fn $name(predicate: u32) -> u32 {
            // SAFETY: a barrier; the intrinsic is convergent.
            #[cfg(target_arch = "nvptx64")]
            return unsafe { $gpu(predicate as i32) as u32 };
            #[cfg(not(target_arch = "nvptx64"))]
            (Collective::$collective.wait(u64::from(predicate)) as u32)
        }
    )*};
}

barrier! {
    /// Waits like [`sync_threads`], and returns the number of the block's threads that passed a
    /// non-zero `predicate`.
    sync_threads_count: barrier_popc, BarrierCount;
    /// Waits like [`sync_threads`], and returns non-zero if every thread of the block passed a
    /// non-zero `predicate`.
    sync_threads_and: barrier_and, BarrierAnd;
    /// Waits like [`sync_threads`], and returns non-zero if any thread of the block passed a
    /// non-zero `predicate`.
    sync_threads_or: barrier_or, BarrierOr;
}

macro_rules! fence {
    ($($(#[$doc:meta])* $name:ident: $gpu:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() {
            // SAFETY: a memory fence.
            #[cfg(target_arch = "nvptx64")]
            unsafe {
                $gpu()
            }
            #[cfg(not(target_arch = "nvptx64"))]
            core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
        }
    )*};
}

fence! {
    /// Orders this thread's writes for the threads of its block.
    block_fence: membar_cta;
    /// Orders this thread's writes for every thread of the device.
    device_fence: membar_gl;
    /// Orders this thread's writes for every thread of the device and the host.
    system_fence: membar_sys;
}
