//! `contract!`: what a kernel asks of a launch. It stands beside the kernel.
//!
//! ```text
//! // SAFETY: a thread touches the element of its index in `x` and `y`, and only where `x` has one; `y` is as long.
//! contract! { unsafe leaky_relu { block: 128, align: 4 } |k| {
//!     Violation::unless_length("y", k.x.len(), k.y.len())?;
//!     Grid::cover(k.x.len(), 128)
//! }}
//! ```
//! After `block` may stand `shared: BYTES` (default 0) and `align: BYTES` (default [`ALIGN`]), in this order. The closure gets the
//! kernel's arguments. It checks every length on which the kernel's index arithmetic relies, and returns the grid.
//!
//! Invariant: a launch whose closure returns `Ok` stays inside its arguments.
//!
//! This is the author's promise. Nothing else checks it, hence the word `unsafe`. The arguments may be any numbers. So a contract
//! adds and multiplies them as [`Size`](cuda_std::launch::Size), which does not wrap, and clippy refuses `*`, `+` and `-` in a
//! contract. On the GPU the macro is empty, so the same file compiles with rust-cuda.

/// Gives a kernel its contract; see the module.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! contract {
    ($unsafe:tt $kernel:ident { block: $block:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($unsafe $kernel { block: $block, shared: 0, align: $crate::ALIGN } $($rest)*);
    };
    ($unsafe:tt $kernel:ident { block: $block:expr, shared: $shared:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($unsafe $kernel { block: $block, shared: $shared, align: $crate::ALIGN } $($rest)*);
    };
    ($unsafe:tt $kernel:ident { block: $block:expr, align: $align:expr $(,)? } $($rest:tt)*) => {
        $crate::contract!($unsafe $kernel { block: $block, shared: 0, align: $align } $($rest)*);
    };
    ($unsafe:tt $kernel:ident { block: $block:expr, shared: $shared:expr, align: $align:expr $(,)? }
        |$arguments:ident| $grid:expr) => {
        // Where `unsafe` is forbidden, the contract must be refused too: the compiler does not look for the word in this macro.
        ::cuda_std::written_unsafe!($unsafe);
        const _: () = {
            #[allow(unused_imports)]
            use ::cuda_std::launch::{Contract, Entry, Grid, Listed, Size, Violation};

            static ENTRY: Entry = Entry::of::<$kernel<'_>>($crate::package!(), $block as u32, $shared as u32, $align as u64);
            ::cuda_std::launch::inventory::submit! { Listed(&ENTRY) }

            // SAFETY: the author has written `unsafe` for it, and the reason at the same place.
            unsafe impl Contract for $kernel<'_> {
                fn entry(&self) -> Result<&'static Entry, Violation> {
                    Ok(&ENTRY)
                }
                #[deny(clippy::arithmetic_side_effects)]
                fn grid(&self) -> Result<Grid, Violation> {
                    let $arguments = self;
                    $grid
                }
            }
        };
    };
    ($($other:tt)*) => {
        ::core::compile_error!(
            "a contract is `contract! { unsafe KERNEL { block: THREADS } |arguments| GRID }`: nothing else checks that the kernel \
             stays inside what it accepts, so its author says `unsafe`"
        );
    };
}

/// Gives a kernel its contract; on the GPU there is nothing to check.
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! contract {
    ($($contract:tt)*) => {};
}

/// The alignment in bytes that a contract asks of every pointer, unless it says otherwise: what an access of four floats needs.
#[cfg(not(target_arch = "nvptx64"))]
pub const ALIGN: u64 = 16;

/// The package that a contract is written in, as `name@version`. A package that could be taken for this one is refused.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
#[macro_export]
macro_rules! package {
    () => {
        $crate::package_of(concat!(env!("CARGO_PKG_NAME"), "@", env!("CARGO_PKG_VERSION")), env!("CARGO_MANIFEST_DIR"))
    };
}

#[cfg(not(target_arch = "nvptx64"))]
const OWN: &str = concat!(env!("CARGO_PKG_NAME"), "@", env!("CARGO_PKG_VERSION"));

#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub const fn package_of(package: &'static str, folder: &str) -> &'static str {
    let is_own = same(folder, env!("CARGO_MANIFEST_DIR"));
    assert!(
        is_own || !same(package, OWN),
        "a package with the name of stepscope's kernels would launch those: rename it"
    );
    package
}

/// Every kernel of this package, in no order: every one that has a contract.
#[cfg(not(target_arch = "nvptx64"))]
pub fn entries() -> impl Iterator<Item = &'static cuda_std::launch::Entry> {
    cuda_std::launch::entries().filter(|entry| entry.package == OWN)
}

#[cfg(not(target_arch = "nvptx64"))]
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}
