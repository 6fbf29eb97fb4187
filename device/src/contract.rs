//! `contract!`: a kernel's requirements on a launch. It is declared next to the kernel.
//!
//! ```text
//! // SAFETY: a thread accesses the element of its index in `x` and `y`, and only if it lies inside
//! // `x`; `y` is as long.
//! contract! { unsafe leaky_relu { block: 128, align: 4 } |k| {
//!     Violation::unless_length("y", k.x.len(), k.y.len())?;
//!     Grid::cover(k.x.len(), 128)
//! }}
//! ```
//! `block` may be followed by `shared: BYTES` (default 0) and `align: BYTES` (default [`ALIGN`]),
//! in this order. The closure gets the kernel's arguments. It checks every length on which the
//! kernel's index arithmetic relies, and returns the grid.
//!
//! Invariant: a launch whose closure returns `Ok` stays inside its arguments.
//!
//! The author guarantees this. Nothing else checks it, hence the word `unsafe`. The arguments may
//! be any numbers. A contract therefore adds and multiplies them as
//! [`Size`](cuda_std::launch::Size), which does not wrap, and clippy rejects `*`, `+` and `-` in a
//! contract. On the GPU the macro is empty, so the same file compiles with rust-cuda.

/// Declares a kernel's contract; see the module.
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
        // Where `unsafe` is forbidden, the contract must be rejected too: the lint does not see the
        // word inside this macro.
        ::cuda_std::written_unsafe!($unsafe);
        const _: () = {
            #[allow(unused_imports)]
            use ::cuda_std::launch::{Contract, Entry, Grid, Listed, Size, Violation};

            static ENTRY: Entry = Entry::of::<$kernel<'_>>($crate::package!(), $block as u32, $shared as u32, $align as u64);
            ::cuda_std::launch::inventory::submit! { Listed(&ENTRY) }

            // SAFETY: the author has written `unsafe` for the contract, with a SAFETY comment
            // there.
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

/// Ignores a kernel's contract: on the GPU there is nothing to check.
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! contract {
    ($($contract:tt)*) => {};
}

/// The default alignment in bytes that a contract requires of every pointer: the alignment of an
/// access of four floats.
#[cfg(not(target_arch = "nvptx64"))]
pub const ALIGN: u64 = 16;

/// Returns the package that declares a contract, as `name@version`. A package that could be
/// mistaken for this one is rejected.
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

/// Returns every kernel of this package that has a contract, in no particular order.
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
