//! The step scope: what may be done while a step runs.
//!
//! [`Step`] allocates and launches, no more; ops take it and cannot tell whether they are recorded. [`Eager`] adds
//! what must not happen in a recording: uploads and reads. Invariant: the brand `'s` is fresh for every step and
//! invariant, so no tensor outlives its step or meets another arena's.

use crate::driver::{Description, Device, Launch};
use crate::error::{Error, Result};
use crate::launch::launch;
use crate::memory::{Arena, Aside, Buffer, Labels, Measured, Region, Turns};
use crate::precision::Precision;
use crate::report::Phase;
use crate::tensor::{Brand, Element, Lent, LentMut, Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::Contract;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::Location;
use std::slice;
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// A step in progress: makes tensors and launches kernels.
pub struct Step<'s> {
    region: &'s Region,
    precision: Cell<Precision>,
    /// Whether what is queued here is queued again in the backward pass.
    runs_again: bool,
    brand: Brand<'s>,
}

impl<'s> Step<'s> {
    pub(crate) fn new(region: &'s Region) -> Self {
        Self { region, precision: Cell::default(), runs_again: false, brand: PhantomData }
    }

    /// How the step's matrix multiplies round their factors, forward and backward, where they do not say it themselves:
    /// [`Precision::Ieee`] unless set.
    pub fn precision(&self) -> Precision {
        self.precision.get()
    }

    /// Sets [`Step::precision`] for what is queued from now on in this step and its scratches.
    pub fn set_precision(&self, precision: Precision) {
        self.precision.set(precision);
    }

    pub(crate) fn device(&self) -> &Device {
        self.region.device()
    }

    /// Whether this is a checkpoint's part of a step.
    pub(crate) fn runs_again(&self) -> bool {
        self.runs_again
    }

    /// What the device is that the step is for.
    pub fn description(&self) -> &Description {
        self.device().description()
    }

    pub(crate) fn region(&self) -> &'s Region {
        self.region
    }

    /// A tensor whose content is whatever was there: a kernel must write all of it before one reads it.
    ///
    /// # Errors
    /// [`Error::ArenaFull`]; [`Error::Misuse`] when the shape's bytes overflow.
    #[track_caller]
    pub fn empty<T: Element>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        Ok(Tensor::new(self.region.empty(shape, Location::caller())?, shape))
    }

    /// Ends a tensor before its step does: the next one of the same size that this step makes may have its memory. What is queued already
    /// still finds it there, since the stream runs in order.
    ///
    /// Nothing else can reach the memory: the tensor is moved in, so it is not saved and not lent. One of a step around this one, one in the
    /// overflow, and all in checked mode keep their memory until their step ends.
    #[track_caller]
    pub fn give_back<S: Stored>(&self, tensor: Tensor<'s, S>) {
        self.region.give_back(tensor, Location::caller());
    }

    /// Queues a kernel, after everything queued before. Does not wait. A grid of no blocks queues nothing.
    ///
    /// On a GPU the driver takes it while the step goes on: if it refuses, a later launch of the step, a read or the step's end tells of it, and
    /// nothing that the step launches behind it runs.
    ///
    /// # Errors
    /// [`Error::Contract`] when the arguments break the kernel's contract; on the emulator [`Error::Kernel`]; [`Error::Driver`] and
    /// [`Error::Timeout`] of this launch or one before it.
    #[track_caller]
    pub fn launch<K: Contract>(&self, kernel: K) -> Result<()> {
        let launched = launch(self.device(), Some(self.region.launches()), &kernel, self.region.time_left());
        launched.map_err(|error| self.region.with_report(error))
    }

    /// What has become of a part of the step: [`Region::launched`].
    pub(crate) fn launched<R>(&self, result: Result<R>) -> Result<R> {
        self.region.launched(result)
    }

    /// The updates that the step makes when it queues an optimiser's next one: none if it is measured; and if it is recorded, each replay
    /// makes one.
    pub(crate) fn makes<'t>(&self, turns: &'t Arc<Turns>) -> Result<&'t [Arc<Turns>]> {
        if self.region.is_lent() {
            self.region.conditions().ask_turn(turns)?;
        }
        Ok(if self.device().rehearses() { &[] } else { slice::from_ref(turns) })
    }

    /// An error for a label that is no class, where the host knows it: now if they were uploaded in this step, at each replay if they are
    /// an input of one that is recorded. For ops that take labels, before they queue anything.
    ///
    /// # Errors
    /// [`Error::Label`] with the sample.
    pub fn check_labels(&self, labels: &impl Source<'s, u32>, classes: usize) -> Result<()> {
        self.check(labels, classes, false)
    }

    /// [`Step::check_labels`], where [`IGNORED`](crate::ops::IGNORED) is allowed too.
    ///
    /// # Errors
    /// As for [`Step::check_labels`].
    pub fn check_labels_but_ignored(&self, labels: &impl Source<'s, u32>, classes: usize) -> Result<()> {
        self.check(labels, classes, true)
    }

    fn check(&self, labels: &impl Source<'s, u32>, classes: usize, ignore: bool) -> Result<()> {
        let (memory, conditions) = (labels.memory(), self.region.conditions());
        if !self.region.owns(memory) {
            // A buffer's: the host does not know them.
            return Ok(());
        }
        let asked = Labels { address: memory.address(), classes, ignore };
        if self.region.is_lent() {
            conditions.ask_labels(asked);
        } else if conditions.doubts(asked) {
            // A kernel may have changed them since.
            asked.check(&memory.download(self.device(), self.region.time_left())?)?;
        }
        Ok(())
    }

    /// What the step is doing until the guard goes.
    pub(crate) fn enter(&self, phase: Phase) -> PhaseGuard<'s> {
        PhaseGuard { region: self.region, before: self.region.enter(phase), _span: phase.span().entered() }
    }

    /// A persistent buffer, to be read by kernels of this step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device, or the shape has another number of elements.
    pub fn lend<'b, T: Element>(&self, buffer: &'b Buffer<T>, shape: impl Into<Shape>) -> Result<Lent<'b, 's, T>> {
        let shape = check_shape(buffer, shape.into())?;
        self.borrow(buffer, false)?;
        Ok(Lent::new(buffer.memory(), shape))
    }

    /// A persistent buffer, to be written by kernels of this step.
    ///
    /// # Errors
    /// As for [`Step::lend`].
    pub fn lend_mut<'b, T: Element>(
        &self,
        buffer: &'b mut Buffer<T>,
        shape: impl Into<Shape>,
    ) -> Result<LentMut<'b, 's, T>> {
        let shape = check_shape(buffer, shape.into())?;
        self.borrow(buffer, true)?;
        Ok(LentMut::new(buffer.memory(), shape))
    }

    /// The step relies on a buffer until it is over, and may write it if `written`: no replay comes between. An error unless the
    /// buffer is on the step's device.
    pub(crate) fn borrow<T: Element>(&self, buffer: &Buffer<T>, written: bool) -> Result<()> {
        let device = buffer.device();
        if self.device().reaches(device.identity()) {
            self.region.lend(buffer.address(), buffer.bytes(), written);
            return Ok(());
        }
        let name = |device: &Device| device.description().name.clone();
        let got = format!("one on {}, or on a rehearsal of it", name(device));
        Err(Error::misuse("lend", format!("a buffer on {}", name(self.device())), got))
    }

    /// Runs an op's launches with memory that ends with them: what is queued later may use it again. `scoped` allocates on
    /// the step that it is given, and on no other.
    #[track_caller]
    pub(crate) fn workspace<R>(&self, scoped: impl for<'i> FnOnce(&Step<'i>) -> Result<R>) -> Result<R> {
        let before = self.region.attribute(None);
        self.region.attribute(before.or(Some(Location::caller())));
        let done = self.region.scope(|| scoped(&Step::new(self.region)));
        self.region.attribute(before);
        done
    }

    /// Runs `scoped` with memory that ends with it, while this step's tensors are used on. `scoped` allocates on the step that it is given
    /// and, behind [`Exit::leave`], on this one alone: what it makes there stays.
    pub(crate) fn aside<R>(&self, scoped: impl for<'i> FnOnce(&Step<'i>, Exit<'_, 's>) -> Result<R>) -> Result<R> {
        self.region.aside(|aside| {
            let inner = Step { precision: self.precision.clone(), runs_again: true, ..Step::new(self.region) };
            scoped(&inner, Exit { step: self, aside })
        })
    }

    /// Runs `scoped` with memory that ends with it. The outer step is borrowed meanwhile and cannot allocate; its
    /// tensors are seen inside through [`Scratch::lend`].
    ///
    /// # Errors
    /// Those of the closure.
    pub fn scratch<R>(&mut self, scoped: impl for<'i> FnOnce(&mut Scratch<'i, 's>) -> Result<R>) -> Result<R> {
        let region = self.region;
        let precision = self.precision.clone();
        region.scope(|| scoped(&mut Scratch { step: Step { precision, ..Step::new(region) }, outer: PhantomData }))
    }
}

/// The way out of a scope aside.
pub(crate) struct Exit<'a, 's> {
    step: &'a Step<'s>,
    aside: &'a Aside<'a>,
}

impl<'a, 's> Exit<'a, 's> {
    /// The step around the scope, for what stays. The scope's tensors are still there, and it makes no more.
    pub(crate) fn leave(self) -> &'a Step<'s> {
        self.aside.leave();
        self.step
    }
}

/// The shape, if it is one of the buffer's elements.
fn check_shape<T: Element>(buffer: &Buffer<T>, shape: Shape) -> Result<Shape> {
    if shape.checked_elements() == Some(buffer.len()) {
        return Ok(shape);
    }
    Err(Error::misuse("lend", format!("a shape of {} elements", buffer.len()), shape.to_string()))
}

/// Ends a phase.
pub(crate) struct PhaseGuard<'s> {
    region: &'s Region,
    before: Phase,
    _span: EnteredSpan,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.region.enter(self.before);
        self.region.attribute(None);
    }
}

impl fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step on {}", self.device().description().name)
    }
}

/// A step that runs at once: it may also upload and read.
#[derive(Debug)]
pub struct Eager<'s> {
    step: Step<'s>,
}

impl<'s> Eager<'s> {
    pub(crate) fn new(region: &'s Region) -> Self {
        region.conditions().clear();
        Self { step: Step::new(region) }
    }

    /// The device that the step runs on.
    pub fn device(&self) -> &Device {
        self.step.device()
    }

    /// A tensor that holds a copy of `values`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has another number of elements; [`Error::ArenaFull`].
    #[track_caller]
    pub fn upload<T: Element>(&self, values: &[T], shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        if shape.checked_elements() != Some(values.len()) {
            return Err(Error::misuse("upload", format!("a shape of {} elements", values.len()), shape.to_string()));
        }
        let tensor = self.empty(shape)?;
        let uploaded = tensor.memory().copy_from(self.device(), values, self.region().time_left());
        uploaded.map_err(|error| self.region().with_report(error))?;
        if T::NAME == u32::NAME {
            self.region().conditions().uploaded(tensor.memory().as_slice().address(), bytemuck::cast_slice(values));
        }
        Ok(tensor)
    }

    /// Waits for the work queued before and returns the tensor's elements.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the host has less memory than they take; [`Error::Timeout`]
    /// after the device's deadline, or what is left of the step's; that of a launch which the
    /// driver refused.
    pub fn read<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<Vec<T>> {
        let region = self.region();
        region.launched(tensor.memory().download(self.device(), region.time_left()))
    }

    /// [`Eager::read`] of a tensor with one element.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it has another number of elements; as for [`Eager::read`].
    pub fn read_scalar<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<T> {
        match self.read(tensor)?.as_slice() {
            [value] => Ok(*value),
            _ => Err(Error::misuse("read_scalar", "one element", format!("shape {}", tensor.shape()))),
        }
    }

    /// [`Step::scratch`].
    ///
    /// # Errors
    /// Those of the closure.
    pub fn scratch<R>(&mut self, scoped: impl for<'i> FnOnce(&mut Scratch<'i, 's>) -> Result<R>) -> Result<R> {
        self.step.scratch(scoped)
    }
}

impl<'s> Deref for Eager<'s> {
    type Target = Step<'s>;

    fn deref(&self) -> &Step<'s> {
        &self.step
    }
}

impl Arena {
    /// Runs one step. Every tensor that it makes is branded with `'s`, which the result cannot name; the memory is
    /// taken back when the closure has returned, failed or panicked, and only then.
    ///
    /// # Errors
    /// Those of the closure; [`Error::Timeout`](crate::Error::Timeout) when the step has a deadline and missed it; [`Error::Driver`](crate::Error::Driver) when the
    /// overflow could not be given back.
    pub fn step<R>(&mut self, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>) -> Result<R> {
        self.run_step(|region| run(&mut Eager::new(region)))
    }

    /// Runs a step without kernels and without memory, and tells what it would need. It runs on a rehearsal of the device: buffers
    /// of the device can be lent to it and tensors of its running steps launched with; what it reads is zero, and nothing on the
    /// device changes. What is made on [`Eager::device`] there is of the rehearsal, too: no real step takes it, and it is of no
    /// use once the closure has ended.
    ///
    /// # Errors
    /// Those of the closure.
    pub fn measure<R>(&self, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>) -> Result<Measured> {
        self.run_measured(|region| run(&mut Eager::new(region)))
    }

    /// The same as if the device were another, and what the step would launch there, in order: `examples/predict` computes from it what
    /// the step takes on a GPU that is not here.
    ///
    /// # Errors
    /// Those of the closure.
    #[doc(hidden)]
    pub fn launches<R>(
        &self,
        other: Description,
        run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>,
    ) -> Result<(Measured, Vec<Launch>)> {
        self.run_listed(other, |region| run(&mut Eager::new(region)))
    }
}

/// A nested scope of the step `'o`, with tensors of its own brand `'i`.
#[derive(Debug)]
pub struct Scratch<'i, 'o> {
    step: Step<'i>,
    outer: Brand<'o>,
}

impl<'i, 'o> Scratch<'i, 'o> {
    /// A tensor of the outer step, to be read here.
    pub fn lend<'b, T: Element>(&self, tensor: &'b impl Source<'o, T>) -> Lent<'b, 'i, T> {
        Lent::new(tensor.memory(), tensor.shape())
    }

    /// A tensor of the outer step, to be written here: how a result leaves the scratch.
    pub fn lend_mut<'b, T: Element>(&self, tensor: &'b mut impl Target<'o, T>) -> LentMut<'b, 'i, T> {
        LentMut::new(tensor.memory(), tensor.shape())
    }

    /// A scope within this one.
    ///
    /// # Errors
    /// Those of the closure.
    pub fn scratch<R>(&mut self, scoped: impl for<'n> FnOnce(&mut Scratch<'n, 'i>) -> Result<R>) -> Result<R> {
        self.step.scratch(scoped)
    }
}

impl<'i> Deref for Scratch<'i, '_> {
    type Target = Step<'i>;

    fn deref(&self) -> &Step<'i> {
        &self.step
    }
}
