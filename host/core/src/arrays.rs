//! Conversion between tensors and arrays of the `ndarray` crate (feature `ndarray`).
//!
//! Invariant: an element keeps its indices, whatever the array's strides are.

#![forbid(unsafe_code)]

use crate::error::Result;
use crate::step::EagerStep;
use crate::tensor::{Element, Shape, Source, Tensor};
use ndarray::{ArrayD, ArrayView, Dimension, IxDyn};

impl<'s> EagerStep<'s> {
    /// Uploads a copy of an array of at most six extents into a new tensor.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) for more extents.
    #[track_caller]
    pub fn upload_array<T: Element, D: Dimension>(&self, array: ArrayView<'_, T, D>) -> Result<Tensor<'s, T>> {
        let shape = Shape::of("upload_array", array.shape())?;
        match array.as_slice() {
            Some(values) => self.upload(values, shape),
            None => self.upload(&array.iter().copied().collect::<Vec<T>>(), shape),
        }
    }

    /// Waits for the work queued before and returns the tensor's elements as an array of the same
    /// extents.
    pub fn read_array<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<ArrayD<T>> {
        let extents = IxDyn(tensor.shape().extents());
        Ok(ArrayD::from_shape_vec(extents, self.read(tensor)?).expect("a tensor has as many elements as its shape"))
    }
}
