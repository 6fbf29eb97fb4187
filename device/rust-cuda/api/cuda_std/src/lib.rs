//! The part of rust-cuda's `cuda_std` that the kernels may use: its paths and signatures, over
//! stepscope's own crate with the same API. They were recorded from its main branch (946c91f,
//! 2026-04-19).
//!
//! Invariant: everything here exists in rust-cuda. The features omitted here cannot be used:
//! `print`, the prelude's items from `alloc`, libdevice's functions (`exp`, `tanh`), and shuffles.
//! Shuffles crash libNVVM for `compute_121` (device/src/machine/gpu/warp.rs has its own).
#![no_std]

// stepscope's attribute takes the place of rust-cuda's, and passes arrays as this type.
#[doc(hidden)]
pub use ours::array;
pub use ours::kernel;

/// Expands to an entry point, to which stepscope's attribute passes each.
#[doc(hidden)]
#[macro_export]
macro_rules! entry {
    ($($entry:tt)*) => { $($entry)* };
}

/// The imports of a kernel's file.
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
    /// Returns this lane's number.
    #[inline(always)]
    pub fn lane_id() -> u32 {
        ours::warp::lane_id()
    }

    /// Returns the lanes that currently run together.
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
        // SAFETY: the caller meets the requirements.
        unsafe { ours::warp::sync_warp(mask) }
    }

    /// Returns true if every lane in `mask` passed true.
    ///
    /// # Safety
    /// Every lane in `mask` makes this call, and the caller is among them.
    #[inline(always)]
    pub unsafe fn warp_vote_all(mask: u32, predicate: bool) -> bool {
        // SAFETY: the caller meets the requirements.
        unsafe { ours::warp::warp_vote_all(mask, predicate) }
    }
}

/// The function that stepscope's attribute calls first. rust-cuda's attribute calls nothing, and
/// its kernels do not wait for previous ones.
#[doc(hidden)]
pub mod grid {
    /// Does nothing.
    ///
    /// # Safety
    /// There are no requirements.
    #[inline(always)]
    pub unsafe fn begin() {}
}

/// The block's dynamic shared memory.
pub mod shared {
    /// Returns its start, 16-byte aligned.
    #[inline(always)]
    pub fn dynamic_shared_mem<T>() -> *mut T {
        ours::shared::dynamic_shared_mem()
    }
}

/// The part of rust-cuda's trait that is exact.
pub trait GpuFloat: Copy + PartialOrd {
    /// Returns `self * a + b`, rounded once (`fma.rn`).
    #[must_use]
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the square root, correctly rounded (`sqrt.rn`).
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
