//! Weights that an op reads as one type, whatever they are stored in.
//!
//! Invariant: decoded weights have the bits that the host decodes.

#![forbid(unsafe_code)]

use crate::step::Step;
use crate::tensor::{Lent, Memory, Sealed, Shape, Source, Stored, Tensor};

/// The weights of a parameter for one op: lent, or converted into memory of the step. An op that
/// has queued its launches passes them to [`MatrixWeights::free`], so that only one converted
/// matrix of each size takes memory at a time.
#[derive(Debug)]
pub enum MatrixWeights<'b, 's, S: Stored> {
    /// Weights that are stored as S.
    Lent(Lent<'b, 's, S>),
    /// Weights that were converted to S.
    Converted(Tensor<'s, S>),
}

impl<'b, 's, S: Stored> MatrixWeights<'b, 's, S> {
    /// Frees converted weights, like [`Step::free`].
    #[track_caller]
    pub fn free(self, step: &Step<'s>) {
        if let Self::Converted(tensor) = self {
            step.free(tensor);
        }
    }

    /// Lends the weights as they are.
    pub fn lent(&self) -> Lent<'_, 's, S> {
        Lent::new(self.memory(), self.shape())
    }

    /// Keeps converted weights until the step ends.
    pub(super) fn keep(self) -> Lent<'b, 's, S> {
        match self {
            Self::Lent(lent) => lent,
            Self::Converted(tensor) => {
                let shape = tensor.shape();
                Lent::new(tensor.save().memory(), shape)
            }
        }
    }
}

impl<S: Stored> Sealed for MatrixWeights<'_, '_, S> {}

impl<'s, S: Stored> Source<'s, S> for MatrixWeights<'_, 's, S> {
    fn shape(&self) -> Shape {
        match self {
            Self::Lent(lent) => lent.shape(),
            Self::Converted(tensor) => tensor.shape(),
        }
    }

    fn memory(&self) -> Memory<S> {
        match self {
            Self::Lent(lent) => lent.memory(),
            Self::Converted(tensor) => tensor.memory(),
        }
    }
}
