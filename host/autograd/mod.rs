//! Reverse-mode differentiation: a tape of what backward must do, in the order of the forward pass.
//!
//! An op's differentiable form stands in the file of its stem: it computes forward with [`ops`](crate::ops), records
//! one closure that turns the output's gradient into the inputs' gradients, and is done; neither the tape nor a
//! device knows a list of ops. Invariant: every value on a tape is [`Saved`], so nothing can overwrite what backward
//! will read, the tape is consumed by its one backward pass, and neither takes a variable of another tape or a parameter of another
//! layout.

#![forbid(unsafe_code)]

mod activation;
mod attention;
mod loss;
mod matmul;
mod norm;
mod tokens;

use crate::error::{Error, Result};
use crate::launch::{Lent, LentMut};
use crate::memory::Phase;
use crate::ops;
use crate::params::{Gradients, Parameter, Parameters, Stack};
use crate::step::Step;
use crate::tensor::{Saved, Shape, Tensor};
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::span::EnteredSpan;

/// A value on a tape, and on no other: anywhere else it is [`Error::Misuse`].
#[derive(Clone, Copy, Debug)]
pub struct Var<'s> {
    value: Saved<'s>,
    tape: u64,
    /// The record whose output this is; none for an input, which needs no gradient.
    record: Option<usize>,
}

impl<'s> Var<'s> {
    /// The value: shared and read-only until the step is over.
    pub fn value(&self) -> &Saved<'s> {
        &self.value
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    fn check(&self, tape: u64) -> Result<()> {
        if self.tape == tape {
            return Ok(());
        }
        Err(Error::misuse("tape", "a variable of this tape", "one of another tape"))
    }
}

/// Turns the gradient of a record's output into gradients of its inputs and parameters.
type Closure<'t, 's> = Box<dyn FnOnce(&mut Backward<'_, 't, 's>, Tensor<'s>) -> Result<()> + 't>;

/// What a record does when its output's gradient has come.
enum Work<'t, 's> {
    Closure(Closure<'t, 's>),
    /// The output is one element and its derivative by a variable is there already.
    Known(Var<'s>, Tensor<'s>),
}

/// Work, and the line of the forward pass that is its reason.
struct Record<'t, 's> {
    site: &'static Location<'static>,
    work: Work<'t, 's>,
}

/// The forward pass of one step, remembered for one backward pass.
pub struct Tape<'t, 's> {
    step: &'t Step<'s>,
    parameters: &'t Parameters,
    identity: u64,
    records: RefCell<Vec<Record<'t, 's>>>,
    forward: EnteredSpan,
}

impl fmt::Debug for Tape<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape of {} records", self.records.borrow().len())
    }
}

impl<'t, 's> Tape<'t, 's> {
    /// An empty tape over a step and the weights that it will use.
    pub fn new(step: &'t Step<'s>, parameters: &'t Parameters) -> Self {
        // Tells the variables of two tapes of one step apart.
        static TAPES: AtomicU64 = AtomicU64::new(0);
        let identity = TAPES.fetch_add(1, Ordering::Relaxed);
        Self { step, parameters, identity, records: RefCell::default(), forward: Phase::Forward.span().entered() }
    }

    /// The step that the tape records.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// A value that needs no gradient: a tensor, or one that is saved already.
    pub fn input(&self, value: impl Into<Saved<'s>>) -> Var<'s> {
        Var { value: value.into(), tape: self.identity, record: None }
    }

    /// The weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device than the step, or the handle is another layout's.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.parameters.lend(self.step, parameter)
    }

    /// Puts an op's output on the tape. `backward` gets the output's gradient and gives the inputs theirs, through
    /// [`Backward::add`] and [`Backward::gradient`].
    #[track_caller]
    pub fn record(
        &self,
        value: Saved<'s>,
        backward: impl FnOnce(&mut Backward<'_, 't, 's>, Tensor<'s>) -> Result<()> + 't,
    ) -> Var<'s> {
        self.push(value, Work::Closure(Box::new(backward)))
    }

    /// Puts an op's output of one element on the tape, whose derivative by `x` is known.
    #[track_caller]
    fn record_known(&self, value: Saved<'s>, x: Var<'s>, derivative: Tensor<'s>) -> Var<'s> {
        self.push(value, Work::Known(x, derivative))
    }

    #[track_caller]
    fn push(&self, value: Saved<'s>, work: Work<'t, 's>) -> Var<'s> {
        let mut records = self.records.borrow_mut();
        records.push(Record { site: Location::caller(), work });
        Var { value, tape: self.identity, record: Some(records.len() - 1) }
    }

    /// The same elements with other extents.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the number of elements differs.
    #[track_caller]
    pub fn reshape(&self, x: &Var<'s>, shape: impl Into<Shape>) -> Result<Var<'s>> {
        self.check(x)?;
        let (value, x) = (x.value.reshape(shape)?, *x);
        Ok(self.record(value, move |back, gradient| {
            let gradient = gradient.reshape(x.shape())?;
            back.add(&x, gradient)
        }))
    }

    /// Runs the records backwards from `loss`, a single element, and adds to `gradients`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when `loss` is another tape's or not one element, or `gradients` are another layout's or on another
    /// device.
    #[track_caller]
    pub fn backward(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![true; gradients.layout().entries().len()];
        self.run(loss, gradients, written)
    }

    /// [`Tape::backward`] over whatever `gradients` hold: as if they were zero before, without a pass that makes them so.
    ///
    /// # Errors
    /// As for [`Tape::backward`].
    #[track_caller]
    pub fn backward_afresh(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![false; gradients.layout().entries().len()];
        self.run(loss, gradients, written)
    }

    #[track_caller]
    fn run(self, loss: &Var<'s>, gradients: &mut Gradients, written: Vec<bool>) -> Result<()> {
        self.check(loss)?;
        if loss.shape().elements() != 1 {
            return Err(Error::misuse("backward", "a loss of one element", format!("shape {}", loss.shape())));
        }
        if !gradients.layout().same(self.parameters.layout()) {
            return Err(Error::misuse("backward", "gradients of the tape's parameters", "another layout's"));
        }
        self.step.borrow(gradients.flat(), true)?;
        drop(self.forward);
        let records = self.records.into_inner();
        let (step, parameters, tape) = (self.step, self.parameters, self.identity);
        let _phase = step.enter(Phase::Backward);
        let pending = records.iter().map(|_| None).collect();
        let mut back = Backward { step, parameters, tape, gradients, written, pending };
        for (at, Record { site, work }) in records.into_iter().enumerate().rev() {
            let root = loss.record == Some(at);
            // Without a gradient, the loss does not depend on it.
            let upstream = back.pending.pop().flatten();
            if upstream.is_none() && !root {
                continue;
            }
            step.region().attribute(Some(site));
            match (work, upstream) {
                (Work::Known(x, derivative), None) => back.add(&x, derivative)?,
                (Work::Known(x, derivative), Some(upstream)) => {
                    back.add(&x, ops::scale_by(step, &derivative, &upstream)?)?;
                }
                (Work::Closure(closure), Some(upstream)) => closure(&mut back, upstream)?,
                (Work::Closure(closure), None) => closure(&mut back, ops::fill(step, loss.shape(), 1.0)?)?,
            }
        }
        back.finish()?;
        step.region().pass_completed();
        Ok(())
    }

    fn check(&self, var: &Var<'s>) -> Result<()> {
        var.check(self.identity)
    }
}

/// The backward pass in progress.
pub struct Backward<'b, 't, 's> {
    step: &'t Step<'s>,
    parameters: &'t Parameters,
    /// The identity of the tape that is run.
    tape: u64,
    gradients: &'b mut Gradients,
    /// Whether each parameter's gradient holds what counts: if not, the next to come overwrites it.
    written: Vec<bool>,
    /// The gradient that the output of each record has so far, of those that have not run.
    pending: Vec<Option<Tensor<'s>>>,
}

impl fmt::Debug for Backward<'_, '_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backward over {} records", self.pending.len())
    }
}

impl<'t, 's> Backward<'_, 't, 's> {
    /// The step that the pass belongs to.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// A parameter's gradient, which the caller must add to when the second is true and overwrite when it is not.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device than the step, or the handle is another layout's.
    pub fn gradient(&mut self, parameter: Parameter) -> Result<(LentMut<'_, 's>, bool)> {
        let index = self.parameters.layout().index(parameter)?;
        let gradient = self.gradients.lend_mut(self.step, parameter)?;
        Ok((gradient, std::mem::replace(&mut self.written[index], true)))
    }

    /// A stack's gradients as one, flat; see [`Backward::gradient`].
    fn stack_gradient(&mut self, stack: &Stack) -> Result<(LentMut<'_, 's>, bool)> {
        // One write must do for all: where some are written already, the others start from zero.
        let layout = self.parameters.layout();
        let places: Vec<usize> = stack.members().iter().map(|member| layout.index(*member)).collect::<Result<_>>()?;
        let written = places.iter().any(|&place| self.written[place]);
        for (member, place) in stack.members().iter().zip(places) {
            if written {
                self.zero_unless_written(*member)?;
            }
            self.written[place] = true;
        }
        Ok((self.gradients.lend_stack_mut(self.step, stack)?, written))
    }

    /// Gradients that nothing has come for are zero.
    fn finish(&mut self) -> Result<()> {
        self.parameters.layout().parameters().try_for_each(|parameter| self.zero_unless_written(parameter))
    }

    fn zero_unless_written(&mut self, parameter: Parameter) -> Result<()> {
        let step = self.step;
        let (mut gradient, written) = self.gradient(parameter)?;
        if written { Ok(()) } else { ops::fill_into(step, &mut gradient, 0.0) }
    }

    /// The weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device than the step.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.parameters.lend(self.step, parameter)
    }

    /// A stack's weights, flat.
    fn stack_weights(&self, stack: &Stack) -> Result<Lent<'t, 's>> {
        self.parameters.lend_stack(self.step, stack)
    }

    /// Whether `var`'s gradient is wanted: an input's is not.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape.
    pub fn wants(&self, var: &Var<'s>) -> Result<bool> {
        self.place(var).map(|record| record.is_some())
    }

    /// Adds `gradient` to what `var` has.
    ///
    /// # Errors
    /// [`Error::Misuse`] when shapes differ, and for a variable of another tape or one that is not an input of the op that is run.
    pub fn add(&mut self, var: &Var<'s>, gradient: Tensor<'s>) -> Result<()> {
        let record = self.place(var)?;
        if gradient.shape() != var.shape() {
            let expected = format!("a gradient of the variable's shape {}", var.shape());
            return Err(Error::misuse("backward", expected, gradient.shape().to_string()));
        }
        let Some(record) = record else { return Ok(()) };
        self.pending[record] = Some(match self.pending[record].take() {
            None => gradient,
            Some(mut sum) => {
                ops::add_assign(self.step, &mut sum, &gradient)?;
                sum
            }
        });
        Ok(())
    }

    /// What `var` has so far, taken out: for an op that can add to it in place.
    fn take(&mut self, var: &Var<'s>) -> Result<Option<Tensor<'s>>> {
        Ok(self.place(var)?.and_then(|record| self.pending[record].take()))
    }

    /// The record of a variable, whose turn is still to come: a gradient for any other would be lost.
    fn place(&self, var: &Var<'s>) -> Result<Option<usize>> {
        var.check(self.tape)?;
        match var.record {
            Some(record) if record >= self.pending.len() => {
                Err(Error::misuse("backward", "a variable made before the op that is run", "a later one"))
            }
            record => Ok(record),
        }
    }
}
