//! The step scope: everything that may be done while a step runs.
//!
//! [`Step`] only allocates and launches. Ops take a `Step` and cannot detect that they are being
//! recorded. [`EagerStep`] adds uploads and reads, which a recording must not contain.
//!
//! Invariant: the brand `'s` is fresh for every step and invariant, so no tensor outlives its step
//! or mixes with another arena's tensors.

mod eager;

pub use eager::{EagerStep, ScratchStep};

use crate::arena::{ArenaInner, NestedScope};
use crate::buffer::Buffer;
use crate::device::{Description, Device};
use crate::error::{Error, Result};
use crate::launch::launch;
use crate::precision::Precision;
use crate::report::Phase;
use crate::tensor::{Brand, Element, Lent, LentMut, Shape, Stored, Tensor};
use cuda_std::launch::Contract;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;
use tracing::span::EnteredSpan;

/// A step in progress: makes tensors and launches kernels.
pub struct Step<'s> {
    region: &'s ArenaInner,
    numerics: Rc<Cell<Numerics>>,
    /// True if the work queued here is queued again in the backward pass.
    runs_again: bool,
    brand: Brand<'s>,
}

/// The settings of a step on which the bits of its products depend.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numerics {
    precision: Precision,
    batch_invariant: bool,
}

impl<'s> Step<'s> {
    pub(crate) fn new(region: &'s ArenaInner) -> Self {
        Self::sharing(region, Rc::default(), false)
    }

    /// The precision to which the step's matrix multiplies round their operands, forward and
    /// backward, unless a multiply sets its own. The default is [`Precision::F32`].
    pub fn precision(&self) -> Precision {
        self.numerics.get().precision
    }

    /// Sets [`Step::precision`] for everything queued from now on in this step and its scratch
    /// scopes.
    pub fn set_precision(&self, precision: Precision) {
        self.numerics.set(Numerics { precision, ..self.numerics.get() });
    }

    /// True if a row's result has the same bits whatever other rows are computed with it. The
    /// default is false.
    pub fn batch_invariant(&self) -> bool {
        self.numerics.get().batch_invariant
    }

    /// Sets [`Step::batch_invariant`] for everything queued from now on in this step and its
    /// scratch scopes.
    ///
    /// A product `[rows, k] [k, n]` then splits k as for
    /// [`Gemm::BATCH_INVARIANT_ROWS`](crate::ops::Gemm::BATCH_INVARIANT_ROWS) rows, and
    /// [`attention_cached`](crate::ops::attention_cached) of one token has the bits of
    /// [`attention`](crate::ops::attention) over all tokens. A text's log-probabilities are then
    /// the same without other texts, in a batch, and token by token. Gradients of weights are sums
    /// over rows, so they depend on the batch.
    pub fn set_batch_invariant(&self, batch_invariant: bool) {
        self.numerics.set(Numerics { batch_invariant, ..self.numerics.get() });
    }

    pub(crate) fn numerics(&self) -> Numerics {
        self.numerics.get()
    }

    pub(crate) fn set_numerics(&self, numerics: Numerics) {
        self.numerics.set(numerics);
    }

    /// Makes a step that has another's settings.
    pub(crate) fn sharing(region: &'s ArenaInner, numerics: Rc<Cell<Numerics>>, runs_again: bool) -> Self {
        Self { region, numerics, runs_again, brand: PhantomData }
    }

    /// The settings, which steps may share.
    pub(crate) fn shared_numerics(&self) -> Rc<Cell<Numerics>> {
        Rc::clone(&self.numerics)
    }

    pub(crate) fn device(&self) -> &Device {
        self.region.device()
    }

    /// True if this is the scope of a recomputed part of a step.
    pub(crate) fn runs_again(&self) -> bool {
        self.runs_again
    }

    /// The description of the device that the step runs on.
    pub fn description(&self) -> &Description {
        self.device().description()
    }

    pub(crate) fn region(&self) -> &'s ArenaInner {
        self.region
    }

    /// Allocates a tensor without initializing it: a kernel must write all of it before any kernel
    /// reads it.
    ///
    /// # Errors
    /// [`Error::ArenaFull`]. [`Error::Misuse`] when the shape's size in bytes overflows.
    #[track_caller]
    pub fn empty<T: Element>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        Ok(Tensor::new(self.region.empty(shape, Location::caller())?, shape))
    }

    /// Frees a tensor before its step ends. The next tensor of the same size in this step may reuse
    /// its memory. Work queued before still finds the contents, because the stream runs in order.
    ///
    /// Nothing else can reach the memory: the tensor is passed by value, so it is neither saved nor
    /// lent. The memory is kept until the step ends for tensors of an enclosing step, for tensors
    /// in the overflow, and for all tensors in checked mode.
    #[track_caller]
    pub fn free<S: Stored>(&self, tensor: Tensor<'s, S>) {
        self.region.free(tensor, Location::caller());
    }

    /// Queues a kernel after everything queued before, without waiting. An empty grid queues
    /// nothing.
    ///
    /// On a GPU the driver receives the launch while the step continues. If the driver refuses it,
    /// a later launch of the step, a read or the end of the step returns the error. Nothing that
    /// the step launches after the refused kernel runs.
    ///
    /// # Errors
    /// [`Error::Contract`] when the arguments break the kernel's contract. [`Error::Kernel`] on the
    /// emulator. [`Error::Driver`] and [`Error::Timeout`] for this launch or an earlier one.
    #[track_caller]
    pub fn launch<K: Contract>(&self, kernel: K) -> Result<()> {
        let launched = launch(self.region.launches(), &kernel, self.region.time_left());
        launched.map_err(|error| self.region.with_report(error))
    }

    /// Waits until the driver has taken the step's launches. Returns the error of the first launch
    /// that failed, otherwise `result`; see `ArenaInner::launched`.
    pub fn launched<R>(&self, result: Result<R>) -> Result<R> {
        self.region.launched(result)
    }

    /// Sets the step's phase until the guard is dropped.
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'s> {
        PhaseGuard { region: self.region, before: self.region.enter(phase), _span: phase.span().entered() }
    }

    /// Lends a persistent buffer to kernels of this step, for reading.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the buffer is on another device, or the shape has a different number
    /// of elements.
    pub fn lend<'b, T: Element>(&self, buffer: &'b Buffer<T>, shape: impl Into<Shape>) -> Result<Lent<'b, 's, T>> {
        let shape = check_shape(buffer, shape.into())?;
        self.borrow(buffer, false)?;
        Ok(Lent::new(buffer.memory(), shape))
    }

    /// Lends a persistent buffer to kernels of this step, for writing.
    pub fn lend_mut<'b, T: Element>(
        &self,
        buffer: &'b mut Buffer<T>,
        shape: impl Into<Shape>,
    ) -> Result<LentMut<'b, 's, T>> {
        let shape = check_shape(buffer, shape.into())?;
        self.borrow(buffer, true)?;
        Ok(LentMut::new(buffer.memory(), shape))
    }

    /// Registers that the step uses a buffer until it ends, and may write it if `written`, so that
    /// no replay runs in between. Returns an error unless the buffer is on the step's device.
    pub(crate) fn borrow<T: Element>(&self, buffer: &Buffer<T>, written: bool) -> Result<()> {
        let device = buffer.device();
        if self.device().reaches(device.identity()) {
            self.region.lend(buffer.address(), buffer.bytes(), written);
            return Ok(());
        }
        let name = |device: &Device| device.description().name.clone();
        let got = format!("a buffer on {}, or on a dry run of it", name(device));
        Err(Error::misuse("lend", format!("a buffer on {}", name(self.device())), got))
    }

    /// Runs an op's launches with memory that is freed when `scoped` returns, so that work queued
    /// later may reuse it. `scoped` allocates only on the step that it is given.
    #[track_caller]
    pub(crate) fn workspace<R>(&self, scoped: impl for<'i> FnOnce(&Step<'i>) -> Result<R>) -> Result<R> {
        let before = self.region.attribute(None);
        self.region.attribute(before.or(Some(Location::caller())));
        let done = self.region.scope(|| scoped(&self.inner()));
        self.region.attribute(before);
        done
    }

    /// Runs `scoped` with memory that is freed when it returns, while this step's tensors remain in
    /// use. `scoped` allocates on the step that it is given. After [`ScopeExit::leave`] it
    /// allocates only on this step, and what it makes there stays.
    pub(crate) fn aside<R>(&self, scoped: impl for<'i> FnOnce(&Step<'i>, ScopeExit<'_, 's>) -> Result<R>) -> Result<R> {
        self.region.aside(|aside| {
            let inner = Step { runs_again: true, ..self.inner() };
            scoped(&inner, ScopeExit { step: self, aside })
        })
    }

    /// Runs `scoped` with memory that is freed when it returns. The outer step is borrowed
    /// meanwhile and cannot allocate. Its tensors are available inside through
    /// [`ScratchStep::lend`].
    pub fn scratch<R>(&mut self, scoped: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<R>) -> Result<R> {
        self.region.scope(|| scoped(&mut ScratchStep { step: self.inner(), outer: PhantomData }))
    }

    /// Makes the step of an inner scope, which begins with this step's settings.
    fn inner(&self) -> Self {
        Self::sharing(self.region, Rc::new(Cell::new(self.numerics())), false)
    }
}

/// The way out of a [`Step::aside`] scope.
pub(crate) struct ScopeExit<'a, 's> {
    step: &'a Step<'s>,
    aside: &'a NestedScope<'a>,
}

impl<'a, 's> ScopeExit<'a, 's> {
    /// Returns the enclosing step, on which to make the tensors that stay. The scope's tensors are
    /// still valid, but it makes no more of them.
    pub(crate) fn leave(self) -> &'a Step<'s> {
        self.aside.leave();
        self.step
    }
}

/// Returns the shape if it has as many elements as the buffer.
fn check_shape<T: Element>(buffer: &Buffer<T>, shape: Shape) -> Result<Shape> {
    if shape.checked_elements() == Some(buffer.len()) {
        return Ok(shape);
    }
    Err(Error::misuse("lend", format!("a shape of {} elements", buffer.len()), shape.to_string()))
}

/// Restores the previous phase when dropped.
#[derive(Debug)]
pub struct PhaseGuard<'s> {
    region: &'s ArenaInner,
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
