//! The GPU's side of [`machine`](super).

pub mod float;
pub mod hints;
#[cfg(cuda_arch = "sm_90a")]
pub mod mbarrier;
pub mod memory;
pub mod mma;
pub mod shared;
pub mod warp;
#[cfg(cuda_arch = "sm_90a")]
pub mod warpgroup;
#[cfg(cuda_arch = "sm_90a")]
pub mod wgmma;

/// True on a GPU.
pub const IS_GPU: bool = true;

/// Expands to its tokens, because this is a GPU.
#[macro_export]
macro_rules! only_on_gpu {
    ($($tokens:tt)*) => { $($tokens)* };
}

/// Unrolls like [`unroll!`](crate::unroll).
#[macro_export]
macro_rules! unroll_on_gpu {
    ($($turns:tt)*) => {{ $crate::unroll!($($turns)*); }};
}
