//! The types that a tensor may hold.

#![forbid(unsafe_code)]

use half::bf16;
use std::fmt;

/// What a tensor may hold.
pub trait Element: bytemuck::Pod + fmt::Debug + PartialEq + sealed::Sealed {
    /// The name of the type in messages and files.
    const NAME: &'static str;
    /// The word that checked mode leaves where nothing has been written.
    const POISON: u32;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    // A quiet NaN that no operation makes by itself.
    const POISON: u32 = 0x7fc0_dead;
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    // Two quiet NaNs.
    const POISON: u32 = 0x7fde_7fde;
}

impl Element for u32 {
    const NAME: &'static str = "u32";
    const POISON: u32 = 0xdead_beef;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u32 {}
}
