//! Gradients of the trained parameters, which outlive steps, in one flat region of f32 or BF16.
//!
//! Invariant: the padding between parameters stays zero, and each gradient's position is the
//! spec's.

#![forbid(unsafe_code)]

use super::masters::LentMasters;
use super::matrix::MatrixWeights;
use super::spec::{GradientType, Parameter, ParameterSpec, StackedParameters};
use super::weights::{Flat, Parameters};
use crate::buffer::{AnyBuffer, Buffer};
use crate::elementary;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Element, Lent, LentMut, Memory, Shape, Source, Stored, Target};
use half::bf16;
use kernels::cast::cast_to_f32;
use std::any::Any;
use std::ops::Range;

/// A model's gradients on a device. Backward adds to them, and the optimizer reads them.
#[derive(Debug)]
pub struct Gradients {
    flat: FlatGradients,
}

/// The flat region.
#[derive(Debug)]
enum FlatGradients {
    F32(Flat),
    Bf16(Flat<bf16>),
    Released(ParameterSpec),
}

impl Gradients {
    /// Makes gradients of zero for `parameters`, in the type of [`ParameterSpec::with_gradients`].
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room.
    pub fn zeros(parameters: &Parameters) -> Result<Self> {
        let (spec, device) = (parameters.spec().clone(), parameters.device());
        let elements = spec.elements();
        let flat = match spec.gradients() {
            GradientType::F32 => FlatGradients::F32(Flat { values: Buffer::zeros(device, elements)?, spec }),
            GradientType::Bf16 => FlatGradients::Bf16(Flat { values: Buffer::zeros(device, elements)?, spec }),
            GradientType::Released => FlatGradients::Released(spec),
        };
        Ok(Self { flat })
    }

    /// Finds the first gradient that is not finite. Waits.
    pub(super) fn first_not_finite(&self) -> Result<Option<&str>> {
        match &self.flat {
            FlatGradients::F32(flat) => flat.first_not_finite(),
            FlatGradients::Bf16(flat) => flat.first_not_finite(),
            FlatGradients::Released(_) => Ok(None),
        }
    }

    /// The names, shapes and positions.
    pub fn spec(&self) -> &ParameterSpec {
        match &self.flat {
            FlatGradients::F32(flat) => &flat.spec,
            FlatGradients::Bf16(flat) => &flat.spec,
            FlatGradients::Released(spec) => spec,
        }
    }

    /// Queues zeroing of all gradients.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn zero(&mut self, step: &Step<'_>) -> Result<()> {
        let elements = [self.spec().elements()];
        match &mut self.flat {
            FlatGradients::F32(flat) => {
                elementary::fill_into(step, &mut step.lend_mut(&mut flat.values, elements)?, 0.0)
            }
            FlatGradients::Bf16(flat) => {
                elementary::fill_into(step, &mut step.lend_mut(&mut flat.values, elements)?, 0.0)
            }
            FlatGradients::Released(_) => Ok(()),
        }
    }

    /// The gradients as they are stored, for functions that lend them to be written.
    fn stored_as<S: Stored>(&self) -> Result<&Flat<S>> {
        let stored: Option<&dyn Any> = match &self.flat {
            FlatGradients::F32(flat) => Some(flat),
            FlatGradients::Bf16(flat) => Some(flat),
            FlatGradients::Released(_) => None,
        };
        stored.and_then(|flat| flat.downcast_ref()).ok_or_else(|| {
            let expected =
                format!("gradients in {}, the type of `ParameterSpec::with_gradients`", <S as Element>::NAME);
            Error::misuse("gradients", expected, format!("{:?}", self.spec().gradients()))
        })
    }

    /// Lends all gradients as one flat region to kernels of a step that write them. Keep the
    /// padding between parameters zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device, or stored in another type.
    pub fn lend_flat_mut<'b, 's, S: Stored>(&'b mut self, step: &Step<'s>) -> Result<LentMut<'b, 's, S>> {
        let values = &self.stored_as::<S>()?.values;
        step.borrow(values, true)?;
        Ok(LentMut::new(values.memory(), [values.len()].into()))
    }

    /// Lends one parameter's gradient, to be added to.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device or stored in BF16, or the handle belongs to
    /// another parameter spec.
    pub fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>, parameter: Parameter) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.stored_as::<f32>()?.part(step, parameter, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// Returns the gradients of several parameters, to be written by a step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when a parameter appears twice.
    pub(crate) fn parts<const N: usize>(
        &mut self,
        step: &Step<'_>,
        parameters: [Parameter; N],
    ) -> Result<GradientParts> {
        check_distinct(&parameters)?;
        // Different parameters of one spec do not overlap.
        let parameters = parameters.iter();
        Ok(match &self.flat {
            FlatGradients::F32(flat) => {
                GradientParts::F32(parameters.map(|&of| flat.part(step, of, true)).collect::<Result<_>>()?)
            }
            FlatGradients::Bf16(flat) => {
                GradientParts::Bf16(parameters.map(|&of| flat.part(step, of, true)).collect::<Result<_>>()?)
            }
            FlatGradients::Released(_) => return Err(released()),
        })
    }

    /// Returns a stack's gradients from the first member's start to the last member's end, flat, to
    /// be written by a step. Keep the padding between members zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub(crate) fn stack_part(&mut self, step: &Step<'_>, stack: &StackedParameters) -> Result<GradientParts> {
        Ok(match &self.flat {
            FlatGradients::F32(flat) => GradientParts::F32(vec![flat.stack(step, stack, true)?]),
            FlatGradients::Bf16(flat) => GradientParts::Bf16(vec![flat.stack(step, stack, true)?]),
            FlatGradients::Released(_) => return Err(released()),
        })
    }

    /// Registers that a step writes the gradients.
    pub(crate) fn borrow(&self, step: &Step<'_>) -> Result<()> {
        match &self.flat {
            FlatGradients::F32(flat) => step.borrow(&flat.values, true),
            FlatGradients::Bf16(flat) => step.borrow(&flat.values, true),
            FlatGradients::Released(_) => Err(released()),
        }
    }

    /// Lends elements of the flat region in f32: as they are stored, or converted into memory of
    /// the step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device; [`Error::ArenaFull`].
    ///
    /// # Panics
    /// Panics if the range exceeds the region.
    pub fn lend<'b, 's>(&'b self, step: &Step<'s>, range: Range<usize>) -> Result<MatrixWeights<'b, 's, f32>> {
        let elements = [self.spec().elements()];
        Ok(match &self.flat {
            FlatGradients::F32(flat) => MatrixWeights::Lent(step.lend(&flat.values, elements)?.part(range)),
            FlatGradients::Bf16(flat) => {
                let stored = step.lend(&flat.values, elements)?.part(range);
                let mut converted = step.empty(stored.shape())?;
                step.launch(cast_to_f32 { x: stored.slice(), out: converted.out() })?;
                MatrixWeights::Converted(converted)
            }
            FlatGradients::Released(_) => return Err(released()),
        })
    }

    /// Waits, and returns one parameter's gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        match &self.flat {
            FlatGradients::F32(flat) => flat.read(parameter),
            FlatGradients::Bf16(flat) => Ok(flat.read(parameter)?.into_iter().map(bf16::to_f32).collect()),
            FlatGradients::Released(_) => Err(released()),
        }
    }

    /// Waits, and returns all gradients by the positions of the spec.
    pub fn read_flat(&self) -> Result<Vec<f32>> {
        match &self.flat {
            FlatGradients::F32(flat) => flat.values.read(),
            FlatGradients::Bf16(flat) => Ok(flat.values.read()?.into_iter().map(bf16::to_f32).collect()),
            FlatGradients::Released(_) => Err(released()),
        }
    }

    /// The region in which the gradients are stored.
    ///
    /// # Errors
    /// [`Error::Misuse`] for [`GradientType::Released`].
    pub fn region(&self) -> Result<AnyBuffer<'_>> {
        match &self.flat {
            FlatGradients::F32(flat) => Ok(AnyBuffer::F32(&flat.values)),
            FlatGradients::Bf16(flat) => Ok(AnyBuffer::Bf16(&flat.values)),
            FlatGradients::Released(_) => Err(released()),
        }
    }
}

/// The places of gradients that a step writes.
pub(crate) enum GradientParts {
    F32(Vec<(Memory<f32>, Shape)>),
    Bf16(Vec<(Memory<bf16>, Shape)>),
    /// Elements of the flat region that have no memory.
    Unstored(Vec<(Range<usize>, Shape)>),
}

impl GradientParts {
    /// Returns the places of several parameters' gradients that are not stored.
    pub(crate) fn unstored<const N: usize>(spec: &ParameterSpec, parameters: [Parameter; N]) -> Result<Self> {
        check_distinct(&parameters)?;
        let place = |of| spec.trained_entry(of).map(|entry| (entry.range(), entry.shape()));
        Ok(Self::Unstored(parameters.map(place).into_iter().collect::<Result<_>>()?))
    }

    /// Returns the place of a stack's gradients that are not stored.
    pub(crate) fn unstored_stack(spec: &ParameterSpec, stack: &StackedParameters) -> Result<Self> {
        let span = spec.trained_span(stack)?;
        let shape = [span.len()].into();
        Ok(Self::Unstored(vec![(span, shape)]))
    }
}

fn released() -> Error {
    let expected = "gradients that are stored: leave out `GradientType::Released`, or use `Tape::backward_consumed`";
    Error::misuse("gradients", expected, "released gradients")
}

fn check_distinct(parameters: &[Parameter]) -> Result<()> {
    let is_second = |(at, parameter): (usize, &Parameter)| parameters[..at].contains(parameter);
    if parameters.iter().enumerate().any(is_second) {
        return Err(Error::misuse("gradients", "different parameters", "the same parameter twice"));
    }
    Ok(())
}

/// Receives gradients that are not stored, each as soon as it is final; see
/// [`Tape::backward_consumed`](crate::Tape::backward_consumed).
pub trait GradientConsumer {
    /// Receives the gradient of these elements of the flat region, which are whole runs of 64, and
    /// their weights. Nothing in the pass reads these weights any more.
    ///
    /// # Errors
    /// Any error ends the pass.
    fn consume<'s>(
        &mut self,
        step: &Step<'s>,
        elements: Range<usize>,
        weights: LentMasters<'_, 's>,
        gradient: Lent<'_, 's>,
    ) -> Result<()>;
}
