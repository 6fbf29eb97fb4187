//! The types that a tensor may hold.

#![forbid(unsafe_code)]

use half::bf16;
use std::fmt;

/// A type that a tensor may hold.
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq + sealed::Sealed {
    /// The type's name in messages and files.
    const NAME: &'static str;
    /// The word that checked mode writes to memory that nothing has written yet.
    const POISON: u32;
}

/// The word that checked mode writes to the memory of a finished step, whatever its tensors held.
/// It is NaN as f32 and as either of two BF16.
pub(crate) const STALE: u32 = bf16::POISON;

/// Host values of any element type.
#[derive(Clone, Copy, Debug)]
pub enum Values<'v> {
    /// Values of f32.
    F32(&'v [f32]),
    /// Values of BF16.
    Bf16(&'v [bf16]),
    /// Values of u32.
    U32(&'v [u32]),
}

impl<'v> Values<'v> {
    /// The values' bytes.
    pub(crate) fn bytes(self) -> &'v [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) => bytemuck::cast_slice(values),
            Self::U32(values) => bytemuck::cast_slice(values),
        }
    }

    /// The index of the first value that is not finite.
    pub(crate) fn first_not_finite(self) -> Option<usize> {
        match self {
            Self::F32(values) => values.iter().position(|&value| !is_finite(value)),
            Self::Bf16(values) => values.iter().position(|value| !value.is_finite()),
            Self::U32(_) => None,
        }
    }
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    // A quiet NaN that no operation produces.
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

/// True if a value is finite, judged by its bits. A comparison could trap, depending on the
/// thread's floating-point mode.
pub fn is_finite(value: f32) -> bool {
    const EXPONENT: u32 = f32::INFINITY.to_bits();
    value.to_bits() & EXPONENT != EXPONENT
}

mod sealed {
    use super::{Values, bf16};

    pub trait Sealed: Sized {
        fn erase_values(values: &[Self]) -> Values<'_>;
    }

    macro_rules! sealed {
        ($($ty:ty: $variant:ident,)*) => {$(
            impl Sealed for $ty {
                fn erase_values(values: &[Self]) -> Values<'_> {
                    Values::$variant(values)
                }
            }
        )*};
    }

    sealed! { f32: F32, bf16: Bf16, u32: U32, }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_poison_is_nan() {
        assert!(f32::from_bits(f32::POISON).is_nan() && f32::from_bits(STALE).is_nan());
        for word in [bf16::POISON, STALE] {
            assert!(
                [word as u16, (word >> 16) as u16].into_iter().all(|half| bf16::from_bits(half).is_nan()),
                "{word:#x}"
            );
        }
    }
}
