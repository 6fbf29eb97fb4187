//! Gradients of the trained parameters, which outlive steps, in one flat region.
//!
//! Invariant: the padding between parameters stays zero, and each gradient's position is the
//! spec's.

#![forbid(unsafe_code)]

use super::spec::{Parameter, ParameterSpec, StackedParameters};
use super::weights::{Flat, Parameters};
use crate::buffer::Buffer;
use crate::elementary;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::LentMut;

/// A model's gradients on a device. Backward adds to them, and the optimizer reads them.
#[derive(Debug)]
pub struct Gradients {
    flat: Flat,
}

impl Gradients {
    /// Makes gradients of zero for `parameters`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room.
    pub fn zeros(parameters: &Parameters) -> Result<Self> {
        let spec = parameters.spec().clone();
        let values = Buffer::zeros(parameters.device(), spec.elements())?;
        Ok(Self { flat: Flat { spec, values } })
    }

    /// Finds the first gradient that is not finite. Waits.
    pub(super) fn first_not_finite(&self) -> Result<Option<&str>> {
        self.flat.first_not_finite()
    }

    /// The names, shapes and positions.
    pub fn spec(&self) -> &ParameterSpec {
        &self.flat.spec
    }

    /// Queues zeroing of all gradients.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn zero(&mut self, step: &Step<'_>) -> Result<()> {
        elementary::fill_into(step, &mut self.lend_flat_mut(step)?, 0.0)
    }

    /// Lends all gradients as one flat region to kernels of a step that write them. Keep the
    /// padding between parameters zero.
    pub fn lend_flat_mut<'b, 's>(&'b mut self, step: &Step<'s>) -> Result<LentMut<'b, 's>> {
        let elements = [self.flat.values.len()];
        step.lend_mut(&mut self.flat.values, elements)
    }

    /// Lends one parameter's gradient, to be added to.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device, or the handle belongs to another parameter
    /// spec.
    pub fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>, parameter: Parameter) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.flat.part(step, parameter, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// Lends the gradients of several parameters at once, to be added to.
    ///
    /// # Errors
    /// [`Error::Misuse`] when a parameter appears twice.
    pub fn lend_many_mut<'b, 's, const N: usize>(
        &'b mut self,
        step: &Step<'s>,
        parameters: [Parameter; N],
    ) -> Result<[LentMut<'b, 's>; N]> {
        for (at, parameter) in parameters.iter().enumerate() {
            if parameters[..at].contains(parameter) {
                return Err(Error::misuse("gradients", "different parameters", "the same parameter twice"));
            }
        }
        // Different parameters of one spec do not overlap.
        let parts =
            parameters.iter().map(|&parameter| self.flat.part(step, parameter, true)).collect::<Result<Vec<_>>>()?;
        let mut parts = parts.into_iter().map(|(memory, shape)| LentMut::new(memory, shape));
        Ok(parameters.map(|_| parts.next().expect("there is a part for each parameter")))
    }

    /// Lends a stack's gradients from the first member's start to the last member's end, flat. Keep
    /// the padding between members zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub fn lend_stack_mut<'b, 's>(&'b mut self, step: &Step<'s>, stack: &StackedParameters) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.flat.stack(step, stack, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// Waits, and returns one parameter's gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        self.flat.read(parameter)
    }

    /// All gradients as one flat region of the spec.
    pub fn flat(&self) -> &Buffer<f32> {
        &self.flat.values
    }
}
