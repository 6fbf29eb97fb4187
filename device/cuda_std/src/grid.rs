//! Programmatic dependent launch: a grid's start overlaps the end of the grid before it in its
//! stream.
//!
//! The host overlaps a kernel's launch latency with the end of the previous kernel. See the CUDA
//! C++ Programming Guide; it requires compute capability 9.0.
//!
//! Invariant: no kernel accesses memory before [`begin`] has returned. At that time all work queued
//! before it is complete and visible, because the previous kernel has waited in the same way.
//!
//! No kernel triggers the launch of the next kernel's blocks before its own have ended. They would
//! fill the multiprocessors that become free first, and the others would stay empty. On an H200
//! that made a training step 1.4 times as slow.

/// Waits until the previous kernels are complete. `#[kernel]` puts the call first.
///
/// # Safety
/// All threads of the grid call it, before they access memory.
#[inline(always)]
pub unsafe fn begin() {
    #[cfg(grid_dependency)]
    // SAFETY: `cfg(grid_dependency)` is set for targets that have the instruction, and the caller
    // guarantees that nothing has accessed memory.
    unsafe {
        wait();
    }
}

#[cfg(grid_dependency)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    fn wait();
}
