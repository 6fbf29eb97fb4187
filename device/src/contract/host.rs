//! A contract on the host: a check before every launch.

/// Expands to its items, because this is no GPU.
#[macro_export]
macro_rules! only_on_host {
    ($($items:tt)*) => { $($items)* };
}

/// Declares a kernel's contract; see the module.
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

/// The default alignment in bytes that a contract requires of every pointer: the alignment of an
/// access of four floats.
pub const ALIGN: u64 = 16;

/// Returns the package that declares a contract, as `name@version`. A package that could be
/// mistaken for this one is rejected.
#[doc(hidden)]
#[macro_export]
macro_rules! package {
    () => {
        $crate::package_of(concat!(env!("CARGO_PKG_NAME"), "@", env!("CARGO_PKG_VERSION")), env!("CARGO_MANIFEST_DIR"))
    };
}

const OWN: &str = concat!(env!("CARGO_PKG_NAME"), "@", env!("CARGO_PKG_VERSION"));

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
pub fn entries() -> impl Iterator<Item = &'static cuda_std::launch::Entry> {
    cuda_std::launch::entries().filter(|entry| entry.package == OWN)
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}
