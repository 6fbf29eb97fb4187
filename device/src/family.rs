//! `family!`: kernels that differ only in a constant or a type. They share an argument list and a
//! contract, and have a table of variants.
//!
//! ```text
//! family! {
//!     /// Multiplies f32 matrices.
//!     matmul(tile: Tile as TILE) {
//!         /// 16 x 16, 64 threads.
//!         matmul_16x16 = T16X16;
//!         matmul_32x32 = T32X32;
//!     }
//!     unsafe fn(a: &[f32], b: &[f32], out: *mut f32) { .. }
//!     // SAFETY: why the grid suffices.
//!     contract unsafe { block: TILE.threads(), shared: TILE.shared_bytes() } |p| grid!(p, TILE)
//! }
//! ```
//! Each row of the table is a kernel: the name of its PTX entry, and its value of the constant. A
//! launch selects the kernel by that value: `step.launch(matmul { tile, a, b, out })`. The body and
//! the contract can use the row's constant. Functions outside the family do the work.
//! `FAMILY::VARIANTS` lists the rows.
//!
//! A family may differ only in the stored type:
//!
//! ```text
//! family! {
//!     /// Computes y = tanh(x). Shapes: `x`, `y`: `[n]`.
//!     tanh_forward<S: Stored> { tanh_forward_f32: f32; tanh_forward_bf16: bf16; }
//!     unsafe fn(x: &[S], y: *mut S) { .. }
//!     // SAFETY: why the grid suffices.
//!     contract unsafe { block: BLOCK, shared: 0 } |k| { .. }
//! }
//! ```
//! Here the tensors' type selects the kernel: `step.launch(tanh_forward { x, y })`.
//!
//! A family may differ in both. A row then has a value of the constant, and the kernel of each
//! stored type for that value:
//!
//! ```text
//!     matmul_bf16<S: Stored>(variant: (OperandLayout, Tile) as VARIANT) {
//!         (Plain, T64X64) => { matmul_of_bf16_64x64_f32: f32; matmul_of_bf16_64x64_bf16: bf16; }
//!         (Plain, T128X128) => { matmul_of_bf16_128x128_f32: f32; matmul_of_bf16_128x128_bf16: bf16; }
//!         ..
//!     }
//! ```
//! Every kernel's name stands in the table, so that a search for the name in a profile or an error
//! finds it.
//!
//! Invariant: the variants of a family have the same parameters. On the GPU each row is a plain
//! `#[kernel]`, also for rust-cuda.

/// Declares the kernels of a family; see the module.
#[macro_export]
macro_rules! family {
    // A constant and a stored type.
    (
        $(#[doc = $doc:literal])*
        $family:ident<$S:ident: Stored>($choice:ident: $Choice:ty as $CHOICE:ident) {
            $($value:expr => { $($kernel:ident: $T:ty;)* })*
        }
        unsafe fn $parameters:tt $body:tt
        contract $unsafe:tt { block: $block:expr, shared: $shared:expr } |$arguments:ident| $grid:expr
    ) => {
        $($(
            $crate::family! {
                @kernel $kernel { pub(super) const $CHOICE: $Choice = $value; type $S = $T; }
                $parameters $body $block, $shared,
                {
                    #[deny(clippy::arithmetic_side_effects)]
                    pub(in super::super) fn grid<$S>(
                        $arguments: &super::super::$family<'_, $S>,
                    ) -> Result<Grid, Violation> {
                        $grid
                    }
                }
            }
        )*)*

        $crate::only_on_host! {
            ::cuda_std::arguments! { $(#[doc = $doc])* pub struct $family<$S> { $choice: $Choice } $parameters }

            // The SAFETY comment precedes the contract, where `cargo xtask contracts` expects it.
            // clippy would expect it before the family.
            #[allow(clippy::undocumented_unsafe_blocks)]
            const _: () = {
                // Rejects the contract where `unsafe` is forbidden; see below.
                ::cuda_std::written_unsafe!($unsafe);
                use ::cuda_std::launch::{Contract, Entry, Grid, Violation};
                use $crate::stored::Stored;

                impl $family<'_, f32> {
                    /// The kernels of the family: name, choice and stored type.
                    pub const VARIANTS: &'static [(&'static str, $Choice, &'static str)] =
                        &[$($((stringify!($kernel), $kernel::$CHOICE, <$T as Stored>::NAME)),*),*];
                }

                impl<$S: Stored> $family<'_, $S> {
                    fn unknown(&self) -> Violation {
                        Violation::choice(stringify!($choice), stringify!($family), &self.$choice)
                    }
                }

                // SAFETY: the author has written `unsafe` for the contract, with a SAFETY comment
                // there.
                unsafe impl<$S: Stored> Contract for $family<'_, $S> {
                    fn entry(&self) -> Result<&'static Entry, Violation> {
                        $($(if self.$choice == $kernel::$CHOICE && $S::NAME == <$T as Stored>::NAME {
                            return Ok(&$kernel::ENTRY);
                        })*)*
                        Err(self.unknown())
                    }

                    fn grid(&self) -> Result<Grid, Violation> {
                        $($(if self.$choice == $kernel::$CHOICE && $S::NAME == <$T as Stored>::NAME {
                            return $kernel::grid(self);
                        })*)*
                        Err(self.unknown())
                    }
                }
            };
        }
    };
    // A stored type.
    (
        $(#[doc = $doc:literal])*
        $family:ident<$S:ident: Stored> { $($kernel:ident: $T:ty;)* }
        unsafe fn $parameters:tt $body:tt
        contract $unsafe:tt { block: $block:expr, shared: $shared:expr } |$arguments:ident| $grid:expr
    ) => {
        $(
            $crate::family! { @kernel $kernel { type $S = $T; } $parameters $body $block, $shared, {} }
        )*

        $crate::only_on_host! {
            ::cuda_std::arguments! { $(#[doc = $doc])* pub struct $family<$S> $parameters }

            // The SAFETY comment precedes the contract, where `cargo xtask contracts` expects it.
            // clippy would expect it before the family.
            #[allow(clippy::undocumented_unsafe_blocks)]
            const _: () = {
                // Rejects the contract where `unsafe` is forbidden; see below.
                ::cuda_std::written_unsafe!($unsafe);
                #[allow(unused_imports)]
                use ::cuda_std::launch::{Contract, Entry, Grid, Size, Violation};
                use $crate::stored::Stored;

                // SAFETY: the author has written `unsafe` for the contract, with a SAFETY comment
                // there.
                unsafe impl<$S: Stored> Contract for $family<'_, $S> {
                    fn entry(&self) -> Result<&'static Entry, Violation> {
                        $(if $S::NAME == <$T as Stored>::NAME {
                            return Ok(&$kernel::ENTRY);
                        })*
                        Err(Violation::choice("S", stringify!($family), &$S::NAME))
                    }

                    #[deny(clippy::arithmetic_side_effects)]
                    fn grid(&self) -> Result<Grid, Violation> {
                        let $arguments = self;
                        $grid
                    }
                }
            };
        }
    };
    // A constant.
    (
        $(#[doc = $doc:literal])*
        $family:ident($choice:ident: $Choice:ty as $CHOICE:ident) {
            $($(#[doc = $row:literal])* $(#[cfg($cfg:meta)])? $kernel:ident = $value:expr;)*
        }
        unsafe fn $parameters:tt $body:tt
        contract $unsafe:tt { block: $block:expr, shared: $shared:expr } |$arguments:ident| $grid:expr
    ) => {
        $(
            $crate::family! {
                @kernel $(#[cfg($cfg)])? $kernel { pub(super) const $CHOICE: $Choice = $value; }
                $parameters $body $block, $shared,
                {
                    #[deny(clippy::arithmetic_side_effects)]
                    pub(in super::super) fn grid($arguments: &super::super::$family<'_>) -> Result<Grid, Violation> {
                        $grid
                    }
                }
            }
        )*

        $crate::only_on_host! {
            ::cuda_std::arguments! { $(#[doc = $doc])* pub struct $family { $choice: $Choice } $parameters }

            // The SAFETY comment precedes the contract, where `cargo xtask contracts` expects it.
            // clippy would expect it before the family.
            #[allow(clippy::undocumented_unsafe_blocks)]
            const _: () = {
                // Where `unsafe` is forbidden, the contract must be rejected too: the lint does not
                // see the word inside this macro.
                ::cuda_std::written_unsafe!($unsafe);
                use ::cuda_std::launch::{Contract, Entry, Grid, Violation};

                impl $family<'_> {
                    /// The kernels of the family: name and choice.
                    pub const VARIANTS: &'static [(&'static str, $Choice)] =
                        &[$($(#[cfg($cfg)])? (stringify!($kernel), $kernel::$CHOICE)),*];

                    fn unknown(&self) -> Violation {
                        Violation::choice(stringify!($choice), stringify!($family), &self.$choice)
                    }
                }

                // SAFETY: the author has written `unsafe` for the contract, with a SAFETY comment
                // there.
                unsafe impl Contract for $family<'_> {
                    fn entry(&self) -> Result<&'static Entry, Violation> {
                        $($(#[cfg($cfg)])? if self.$choice == $kernel::$CHOICE {
                            return Ok(&$kernel::ENTRY);
                        })*
                        Err(self.unknown())
                    }

                    fn grid(&self) -> Result<Grid, Violation> {
                        $($(#[cfg($cfg)])? if self.$choice == $kernel::$CHOICE {
                            return $kernel::grid(self);
                        })*
                        Err(self.unknown())
                    }
                }
            };
        }
    };
    // One kernel: a module of its constant and type, the kernel, and on the host its entry and the
    // function of its grid, if it has one of its own.
    (
        @kernel $(#[cfg($cfg:meta)])? $kernel:ident { $($constant:tt)* }
        $parameters:tt $body:tt $block:expr, $shared:expr, { $($grid:tt)* }
    ) => {
        $(#[cfg($cfg)])?
        #[allow(unreachable_pub)]
        mod $kernel {
            use super::*;

            $($constant)*

            #[kernel]
            pub unsafe fn $kernel $parameters $body

            $crate::only_on_host! {
                pub(super) use self::contract::*;
                #[allow(unused_imports)]
                mod contract {
                    use super::*;
                    use ::cuda_std::launch::{Entry, Grid, Listed, Size, Violation};

                    pub(in super::super) static ENTRY: Entry =
                        Entry::of::<super::$kernel<'_>>($crate::package!(), $block, $shared, $crate::ALIGN);
                    ::cuda_std::launch::inventory::submit! { Listed(&ENTRY) }

                    $($grid)*
                }
            }
        }
    };
}
