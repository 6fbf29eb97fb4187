//! Steps that run at once, and the scopes nested in them.

use super::Step;
use crate::arena::{Arena, ArenaInner, Measured};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Brand, Element, Lent, LentMut, Shape, Source, Target, Tensor};
use std::ops::Deref;

impl Arena {
    /// Runs one step. Every tensor that it makes is branded with `'s`, which the result cannot
    /// name. The memory is reclaimed when the closure has returned, failed or panicked, and only
    /// then.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the step missed its deadline, if it has one.
    /// [`Error::Driver`] when the overflow could not be freed.
    pub fn step<R>(&mut self, run: impl for<'s> FnOnce(&mut EagerStep<'s>) -> Result<R>) -> Result<R> {
        let (mut run, mut result) = (Some(run), None);
        self.run_step(&mut |region| {
            let run = run.take().expect("a step runs its closure once");
            result = Some(run(&mut EagerStep::new(region))?);
            Ok(())
        })?;
        Ok(result.expect("a step that succeeded has a result"))
    }

    /// Runs a step without kernels or memory, and returns the bytes that it would need. The step
    /// runs on a dry run of the device. It may borrow the device's buffers, and launch with tensors
    /// of the device's running steps. All reads return zero, and nothing on the device changes.
    /// Anything that the closure makes on [`EagerStep::device`] belongs to the dry run: real steps
    /// reject it, and it is useless once the closure has returned.
    pub fn measure<R>(&self, run: impl for<'s> FnOnce(&mut EagerStep<'s>) -> Result<R>) -> Result<Measured> {
        self.run_measured(|region| run(&mut EagerStep::new(region)))
    }
}

/// A step that runs immediately: it may also upload and read.
///
/// It dereferences to [`Step`], so ops accept it, and it also has the methods of a step:
/// [`empty`](Step::empty), [`free`](Step::free), [`lend`](Step::lend),
/// [`lend_mut`](Step::lend_mut), [`launch`](Step::launch), [`precision`](Step::precision),
/// [`set_precision`](Step::set_precision), [`set_batch_invariant`](Step::set_batch_invariant) and
/// [`description`](Step::description).
#[derive(Debug)]
pub struct EagerStep<'s> {
    step: Step<'s>,
}

impl<'s> EagerStep<'s> {
    pub(crate) fn new(region: &'s ArenaInner) -> Self {
        Self { step: Step::new(region) }
    }

    /// The device that the step runs on.
    pub fn device(&self) -> &Device {
        self.step.device()
    }

    /// Uploads a copy of `values` into a new tensor.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has a different number of elements. [`Error::ArenaFull`].
    #[track_caller]
    pub fn upload<T: Element>(&self, values: &[T], shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        if shape.checked_elements() != Some(values.len()) {
            return Err(Error::misuse("upload", format!("a shape of {} elements", values.len()), shape.to_string()));
        }
        let tensor = self.empty(shape)?;
        let uploaded = tensor.memory().copy_from(self.device(), values, self.region().time_left());
        uploaded.map_err(|error| self.region().with_report(error))?;
        Ok(tensor)
    }

    /// Waits for the work queued before and returns the tensor's elements.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the host has too little memory for them. [`Error::Timeout`]
    /// after the device's deadline, or after the rest of the step's deadline. The error of an
    /// earlier launch that the driver refused.
    pub fn read<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<Vec<T>> {
        let region = self.region();
        region.launched(tensor.memory().download(self.device(), region.time_left()))
    }

    /// Reads a tensor of one element, like [`EagerStep::read`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when it has a different number of elements.
    pub fn read_scalar<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<T> {
        match self.read(tensor)?.as_slice() {
            [value] => Ok(*value),
            _ => Err(Error::misuse("read_scalar", "one element", format!("shape {}", tensor.shape()))),
        }
    }

    /// Runs a nested scope; see [`Step::scratch`].
    pub fn scratch<R>(&mut self, scoped: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<R>) -> Result<R> {
        self.step.scratch(scoped)
    }
}

impl<'s> Deref for EagerStep<'s> {
    type Target = Step<'s>;

    fn deref(&self) -> &Step<'s> {
        &self.step
    }
}

/// A nested scope of the step `'o`, with tensors of its own brand `'i`.
///
/// It dereferences to [`Step`], so ops accept it, and it also has the methods of a step:
/// [`empty`](Step::empty), [`free`](Step::free), [`launch`](Step::launch),
/// [`precision`](Step::precision), [`set_precision`](Step::set_precision),
/// [`set_batch_invariant`](Step::set_batch_invariant) and [`description`](Step::description). Its
/// own `lend` and `lend_mut` take tensors of the outer step. To lend a buffer, call
/// `Step::lend(step, &buffer, shape)`.
#[derive(Debug)]
pub struct ScratchStep<'i, 'o> {
    pub(super) step: Step<'i>,
    pub(super) outer: Brand<'o>,
}

impl<'i, 'o> ScratchStep<'i, 'o> {
    /// Lends a tensor of the outer step, for reading.
    pub fn lend<'b, T: Element>(&self, tensor: &'b impl Source<'o, T>) -> Lent<'b, 'i, T> {
        Lent::new(tensor.memory(), tensor.shape())
    }

    /// Lends a tensor of the outer step, for writing. This is how a result leaves the scratch
    /// scope.
    pub fn lend_mut<'b, T: Element>(&self, tensor: &'b mut impl Target<'o, T>) -> LentMut<'b, 'i, T> {
        LentMut::new(tensor.memory(), tensor.shape())
    }

    /// Runs a scope nested in this one.
    pub fn scratch<R>(&mut self, scoped: impl for<'n> FnOnce(&mut ScratchStep<'n, 'i>) -> Result<R>) -> Result<R> {
        self.step.scratch(scoped)
    }
}

impl<'i> Deref for ScratchStep<'i, '_> {
    type Target = Step<'i>;

    fn deref(&self) -> &Step<'i> {
        &self.step
    }
}
