//! Numbers in memory: f32, or BF16 for half the bytes.
//!
//! Invariant: whatever holds a tensor without its type gives it back with the same type.

#![forbid(unsafe_code)]

use super::element::Element;
use super::owned::Tensor;
use half::bf16;

/// What tensors of numbers may hold: `f32` or [`bf16`]. Ops compute in f32 whatever is stored, and round once, to nearest even, when they
/// write.
pub trait Stored: Element + kernels::stored::Stored {
    #[doc(hidden)]
    fn erase(tensor: Tensor<'_, Self>) -> AnyTensor<'_>;

    /// The tensor, if it holds this type.
    #[doc(hidden)]
    fn restore(tensor: AnyTensor<'_>) -> Option<Tensor<'_, Self>>;
}

/// A tensor of numbers that are stored in any type.
#[doc(hidden)]
#[derive(Debug)]
pub enum AnyTensor<'s> {
    /// Of f32.
    F32(Tensor<'s>),
    /// Of BF16.
    Bf16(Tensor<'s, bf16>),
}

macro_rules! stored {
    ($($ty:ty: $variant:ident;)*) => {$(
        impl Stored for $ty {
            fn erase(tensor: Tensor<'_, Self>) -> AnyTensor<'_> {
                AnyTensor::$variant(tensor)
            }

            fn restore(tensor: AnyTensor<'_>) -> Option<Tensor<'_, Self>> {
                if let AnyTensor::$variant(tensor) = tensor { Some(tensor) } else { None }
            }
        }
    )*};
}

stored! {
    f32: F32;
    bf16: Bf16;
}
