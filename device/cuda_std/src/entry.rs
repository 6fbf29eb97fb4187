//! The entry points that PTX contains: those of all kernels, or, for `sm_90a`, those of kernels of
//! warpgroups.
//!
//! `sm_90a` has instructions that a GPU of compute capability 9.0 lacks otherwise. Such a GPU loads
//! PTX for `sm_90` as well, so PTX for `sm_90a` repeats no kernel, and takes seconds to compile.
//! `cuda_builder` sets `cfg(cuda_arch)` to the architecture.

/// Expands to the entry point of a kernel, except for `sm_90a`.
#[cfg(not(cuda_arch = "sm_90a"))]
#[macro_export]
macro_rules! entry {
    ($($entry:tt)*) => { $($entry)* };
}

/// Drops the entry point of a kernel that PTX for `sm_90` contains.
#[cfg(cuda_arch = "sm_90a")]
#[macro_export]
macro_rules! entry {
    ($($entry:tt)*) => {};
}

/// Expands to the entry point of a kernel of warpgroups.
#[cfg(cuda_arch = "sm_90a")]
#[macro_export]
macro_rules! warpgroup_entry {
    ($($entry:tt)*) => { $($entry)* };
}

/// Drops the entry point of a kernel of warpgroups.
#[cfg(not(cuda_arch = "sm_90a"))]
#[macro_export]
macro_rules! warpgroup_entry {
    ($($entry:tt)*) => {};
}
