//! Stored types of numbers: f32, or BF16 for half the bytes.
//!
//! Invariant: a tensor whose type is erased is restored with the same type.

#![forbid(unsafe_code)]

use super::access::Source;
use super::element::Element;
use super::owned::Tensor;
use super::shape::Shape;
use half::bf16;

/// A stored type of numbers: `f32` or [`bf16`]. Ops compute in f32 whatever is stored, and round
/// once, to nearest even, when they write.
pub trait Stored: Element + kernels::stored::Stored + sealed::Erase {}

mod sealed {
    use super::{AnyTensor, Element, Tensor};

    pub trait Erase: Element {
        fn erase(tensor: Tensor<'_, Self>) -> AnyTensor<'_>;

        /// Returns the tensor if it holds this type.
        fn restore(tensor: AnyTensor<'_>) -> Option<Tensor<'_, Self>>;
    }
}

/// A tensor of numbers of any stored type.
#[derive(Debug)]
pub enum AnyTensor<'s> {
    /// A tensor of f32.
    F32(Tensor<'s>),
    /// A tensor of BF16.
    Bf16(Tensor<'s, bf16>),
}

macro_rules! stored {
    ($($ty:ty: $variant:ident;)*) => {
        impl AnyTensor<'_> {
            /// The address. It is unique among the tensors of a step, even those without elements.
            pub(crate) fn address(&self) -> u64 {
                match self { $(Self::$variant(tensor) => tensor.memory().address(),)* }
            }

            /// The extents.
            pub(crate) fn shape(&self) -> Shape {
                match self { $(Self::$variant(tensor) => tensor.shape(),)* }
            }

            /// Returns the same tensor under another brand. The caller takes it across a scope's
            /// boundary and guarantees that its memory lives on there.
            pub(crate) fn rebrand<'i>(&self) -> AnyTensor<'i> {
                match self {
                    $(Self::$variant(tensor) => AnyTensor::$variant(Tensor::new(tensor.memory(), tensor.shape())),)*
                }
            }
        }

        $(
        impl Stored for $ty {}

        impl sealed::Erase for $ty {
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
