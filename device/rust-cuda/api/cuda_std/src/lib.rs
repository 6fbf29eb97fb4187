//! What the kernels may use of rust-cuda's `cuda_std`: its paths and signatures, recorded from its main branch
//! (946c91f, 2026-04-19), over stepscope's own crate of the same API.
//!
//! Invariant: nothing stands here that rust-cuda has not. What it has and is left out cannot be used: `print` and what its
//! prelude takes from `alloc`, libdevice's functions (`exp`, `tanh`), and shuffles, which crash libNVVM for `compute_121`
//! (device/src/warp.rs has its own).
#![no_std]

// Ours stands in for rust-cuda's attribute.
pub use ours::kernel;

/// What a kernel's file imports.
pub mod prelude {
    pub use crate::{kernel, thread};
}

macro_rules! recorded {
    ($($module:ident { $($name:ident($($argument:ident: $ty:ty),*) $(-> $result:ty)?;)* })*) => {$(
        #[allow(missing_docs)]
        pub mod $module {
            $(#[inline(always)]
            pub fn $name($($argument: $ty),*) $(-> $result)? {
                ours::$module::$name($($argument),*)
            })*
        }
    )*};
}

recorded! {
    thread {
        thread_idx_x() -> u32;
        thread_idx_y() -> u32;
        thread_idx_z() -> u32;
        block_idx_x() -> u32;
        block_idx_y() -> u32;
        block_idx_z() -> u32;
        block_dim_x() -> u32;
        block_dim_y() -> u32;
        block_dim_z() -> u32;
        grid_dim_x() -> u32;
        grid_dim_y() -> u32;
        grid_dim_z() -> u32;
        index_1d() -> u32;
        sync_threads();
        sync_threads_count(predicate: u32) -> u32;
        sync_threads_and(predicate: u32) -> u32;
        sync_threads_or(predicate: u32) -> u32;
        device_fence();
        system_fence();
    }
}

/// The warp's lanes.
pub mod warp {
    /// This lane's number.
    #[inline(always)]
    pub fn lane_id() -> u32 {
        ours::warp::lane_id()
    }

    /// The lanes that are here.
    #[inline(always)]
    pub fn activemask() -> u32 {
        ours::warp::activemask()
    }

    /// Waits for the lanes in `mask`.
    ///
    /// # Safety
    /// Every lane in `mask` makes this call, and the caller is among them.
    #[inline(always)]
    pub unsafe fn sync_warp(mask: u32) {
        // SAFETY: the caller's promise.
        unsafe { ours::warp::sync_warp(mask) }
    }

    /// Whether every lane in `mask` gave true.
    ///
    /// # Safety
    /// Every lane in `mask` makes this call, and the caller is among them.
    #[inline(always)]
    pub unsafe fn warp_vote_all(mask: u32, predicate: bool) -> bool {
        // SAFETY: the caller's promise.
        unsafe { ours::warp::warp_vote_all(mask, predicate) }
    }
}

/// What ours calls first; rust-cuda's own calls nothing, and its kernels wait for none before them.
#[doc(hidden)]
pub mod grid {
    /// Nothing.
    ///
    /// # Safety
    /// None is needed.
    #[inline(always)]
    pub unsafe fn begin() {}
}

/// The block's dynamic shared memory.
pub mod shared {
    /// Its start, 16-byte aligned.
    #[inline(always)]
    pub fn dynamic_shared_mem<T>() -> *mut T {
        ours::shared::dynamic_shared_mem()
    }
}

/// The part of rust-cuda's trait that is exact.
pub trait GpuFloat: Copy + PartialOrd {
    /// `fma.rn`.
    #[must_use]
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `sqrt.rn`.
    #[must_use]
    fn sqrt(self) -> Self;
}

impl GpuFloat for f32 {
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        ours::GpuFloat::mul_add(self, a, b)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        ours::GpuFloat::sqrt(self)
    }
}
