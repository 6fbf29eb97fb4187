//! How a grid follows the one before it in its stream.
//!
//! The host launches a kernel so that what its start costs is paid while the kernel before it still runs ("programmatic
//! dependent launch", CUDA C++ Programming Guide, from compute capability 9.0 on). Invariant: no kernel touches memory before
//! [`begin`] has returned; by then all that was queued before it is over and visible, because the kernel before it has waited
//! in the same way.
//!
//! No kernel lets the next one's blocks come before its own have ended: they would fill the multiprocessors that are free first,
//! and the others would stay empty (on an H200 that made a training step 1.4 times as slow).

/// Waits until the kernels before this one are over. `#[kernel]` puts it first.
///
/// # Safety
/// All threads of the grid call it, before they touch memory.
#[inline(always)]
pub unsafe fn begin() {
    #[cfg(grid_dependency)]
    // SAFETY: the build sets `grid_dependency` where the target has the instruction; every thread of the grid is here.
    unsafe {
        wait();
    }
}

#[cfg(grid_dependency)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    fn wait();
}
