//! The types of tensors in files.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use stepscope_core::{Element, Stored};

/// The type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    /// F32.
    F32,
    /// BF16.
    Bf16,
    /// F16.
    F16,
}

impl FileType {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns true if values of S have this type.
    pub(crate) fn is<S: Stored>(self) -> bool {
        let name = <S as Element>::NAME;
        matches!((self, name), (Self::F32, <f32 as Element>::NAME) | (Self::Bf16, <bf16 as Element>::NAME))
    }

    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Converts little-endian values of this type: exactly to f32, and rounded to BF16. Runs in the
    /// default floating-point mode.
    pub(crate) fn decode<S: Stored>(self, bytes: &[u8], values: &mut [S]) {
        let (twos, fours) = (bytes.as_chunks().0.iter(), bytes.as_chunks().0.iter());
        match self {
            Self::F32 => fours.zip(values).for_each(|(&four, value)| *value = S::narrow(f32::from_le_bytes(four))),
            Self::Bf16 => {
                twos.zip(values).for_each(|(&two, value)| *value = S::narrow(bf16::from_le_bytes(two).to_f32()));
            }
            Self::F16 => {
                twos.zip(values).for_each(|(&two, value)| *value = S::narrow(f16::from_le_bytes(two).to_f32()));
            }
        }
    }

    /// Converts values to this type, rounding to nearest, ties to even. Returns their bytes,
    /// little-endian, or the first value that is not finite then.
    pub(crate) fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        float_mode::in_default(|| {
            let mut bytes = Vec::with_capacity(values.len() * self.bytes());
            for &value in values {
                let is_finite = match self {
                    Self::F32 => {
                        bytes.extend(value.to_le_bytes());
                        value.is_finite()
                    }
                    Self::Bf16 => {
                        let rounded = bf16::from_f32(value);
                        bytes.extend(rounded.to_le_bytes());
                        rounded.is_finite()
                    }
                    Self::F16 => {
                        let rounded = f16::from_f32(value);
                        bytes.extend(rounded.to_le_bytes());
                        rounded.is_finite()
                    }
                };
                if !is_finite {
                    return Err(value);
                }
            }
            Ok(bytes)
        })
    }
}
