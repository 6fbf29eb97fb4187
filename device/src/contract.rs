//! `contract!`: what a kernel asks of a launch, beside the kernel.
//!
//! ```text
//! contract!(gelu_forward { block: 256 } |k| {
//!     Violation::unless_length("y", k.x.len(), k.y.len())?;
//!     Grid::cover(k.x.len(), 256 * 4)
//! });
//! ```
//! After `block`, in this order, may stand `shared: BYTES` (default 0) and `align: BYTES` (default 16, what a
//! 4-wide access needs). The closure gets the kernel's arguments, checks every length that the kernel's index
//! arithmetic relies on, and returns the grid. Invariant: a launch whose closure returns `Ok` stays inside its
//! arguments. On the GPU the macro is empty, so the same file compiles with rust-cuda.

/// Gives a kernel its contract; see the module.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! contract {
    ($kernel:ident { block: $block:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($kernel { block: $block, shared: 0, align: 16 } $($rest)*);
    };
    ($kernel:ident { block: $block:expr, shared: $shared:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($kernel { block: $block, shared: $shared, align: 16 } $($rest)*);
    };
    ($kernel:ident { block: $block:expr, align: $align:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($kernel { block: $block, shared: 0, align: $align } $($rest)*);
    };
    ($kernel:ident { block: $block:expr, shared: $shared:expr, align: $align:expr $(,)? } |$arguments:ident| $grid:expr) => {
        const _: () = {
            #[allow(unused_imports)]
            use ::cuda_std::launch::{Contract, Grid, Violation};

            // SAFETY: the closure checks every length on which the kernel's indices depend, as its author states.
            unsafe impl Contract for $kernel<'_> {
                const PACKAGE: &'static str = env!("CARGO_PKG_NAME");
                const BLOCK: u32 = $block as u32;
                const SHARED_BYTES: u32 = $shared as u32;
                const ALIGN: u64 = $align as u64;
                fn grid(&self) -> Result<Grid, Violation> {
                    let $arguments = self;
                    $grid
                }
            }
        };
    };
}

/// Gives a kernel its contract; on the GPU there is nothing to check.
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! contract {
    ($($contract:tt)*) => {};
}
