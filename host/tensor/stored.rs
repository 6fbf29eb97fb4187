//! Numbers in memory: f32, or BF16 for half the bytes.
//!
//! Invariant: whatever holds a tensor without its type gives it back with the same type.

#![forbid(unsafe_code)]

use super::access::Source;
use super::element::Element;
use super::owned::Tensor;
use super::shape::Shape;
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
    ($($ty:ty: $variant:ident;)*) => {
        impl AnyTensor<'_> {
            /// Where it is: the same for no two tensors of a step, also of those without elements.
            pub(crate) fn address(&self) -> u64 {
                match self { $(Self::$variant(tensor) => tensor.memory().address(),)* }
            }

            /// The extents.
            pub(crate) fn shape(&self) -> Shape {
                match self { $(Self::$variant(tensor) => tensor.shape(),)* }
            }

            /// The same tensor under another brand, for who takes it across a scope's border and knows that its memory lives on there.
            pub(crate) fn rebrand<'i>(&self) -> AnyTensor<'i> {
                match self {
                    $(Self::$variant(tensor) => AnyTensor::$variant(Tensor::new(tensor.memory(), tensor.shape())),)*
                }
            }
        }

        $(
        impl Stored for $ty {
            fn erase(tensor: Tensor<'_, Self>) -> AnyTensor<'_> {
                AnyTensor::$variant(tensor)
            }

            fn restore(tensor: AnyTensor<'_>) -> Option<Tensor<'_, Self>> {
                if let AnyTensor::$variant(tensor) = tensor { Some(tensor) } else { None }
            }
        }
        )*
    };
}

stored! {
    f32: F32;
    bf16: Bf16;
}
