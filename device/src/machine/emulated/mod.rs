//! The emulator's side of [`machine`](super).

pub mod float;
pub mod hints;
pub mod mbarrier;
pub mod memory;
pub mod mma;
pub mod shared;
pub mod warp;
pub mod warpgroup;
pub mod wgmma;

/// True on a GPU.
pub const IS_GPU: bool = false;

/// Drops its tokens, because this is no GPU.
#[macro_export]
macro_rules! only_on_gpu {
    ($($tokens:tt)*) => {};
}

/// Unrolls like [`unroll!`](crate::unroll) on the GPU. On a CPU it is a plain loop, because copies
/// gain nothing there and compile slowly.
#[macro_export]
macro_rules! unroll_on_gpu {
    ($index:ident < $count:expr $(, at most $most:literal)? => $body:block) => {{
        let mut next = 0_usize;
        while next < $count {
            let $index = next;
            $body
            next += 1;
        }
    }};
}
