//! Reverse-mode differentiation: a tape of what backward must do, in the order of the forward pass.
//!
//! An op's differentiable form stands in the file of its stem: it computes forward with [`ops`](crate::ops), records
//! one closure that turns the gradients of its outputs into those of its inputs, and is done; neither the tape nor a
//! device knows a list of ops. An [`Op`] puts it on the tape and a [`Backward`] serves its closure: ops of other packages
//! have the same two. Invariant: every value on a tape is [`Saved`], so nothing can overwrite what backward
//! will read, the tape is consumed by its one backward pass, and neither takes a variable of another tape or a parameter of another
//! layout.

#![forbid(unsafe_code)]

mod activation;
mod attention;
mod backward;
mod elementwise;
mod loss;
mod matmul;
mod norm;
mod op;
mod reduce;
mod softmax;
mod tokens;
mod transpose;

pub use backward::Backward;
pub use op::Op;

use crate::error::{Error, Result};
use crate::memory::Phase;
use crate::params::{Gradients, Parameters};
use crate::step::Step;
use crate::tensor::{Saved, Shape};
use backward::Upstream;
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
    /// Its number among the outputs of the tape's ops; none for an input, which needs no gradient.
    output: Option<usize>,
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

    /// Whether a backward pass wants its gradient: an input's it does not. What is given for one is dropped.
    pub fn wants_gradient(&self) -> bool {
        self.output.is_some()
    }

    /// An error in the name of `op` unless it is a variable of this tape.
    fn check(&self, op: &'static str, tape: u64) -> Result<()> {
        if self.tape == tape {
            return Ok(());
        }
        Err(Error::misuse(op, "a variable of this tape", "one of another tape"))
    }
}

/// Turns the gradients of an op's outputs into gradients of its inputs and parameters.
type Closure<'t, 's> = Box<dyn FnOnce(&mut Backward<'_, 't, 's>, Vec<Upstream<'s>>) -> Result<()> + 't>;

/// What an op has left for the backward pass.
struct Record<'t, 's> {
    op: &'static str,
    /// The line of the forward pass that is the reason for it.
    site: &'static Location<'static>,
    /// The number of its first output; the next op's follow its last.
    first: usize,
    backward: Closure<'t, 's>,
}

/// The records of a tape, and how many outputs they have.
#[derive(Default)]
struct Records<'t, 's> {
    all: Vec<Record<'t, 's>>,
    outputs: usize,
}

/// The forward pass of one step, remembered for one backward pass.
pub struct Tape<'t, 's> {
    step: &'t Step<'s>,
    parameters: &'t Parameters,
    identity: u64,
    records: RefCell<Records<'t, 's>>,
    forward: EnteredSpan,
}

impl fmt::Debug for Tape<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape of {} records", self.records.borrow().all.len())
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
        Var { value: value.into(), tape: self.identity, output: None }
    }

    /// Begins an op of these variables; its errors will have its name.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape.
    #[track_caller]
    pub fn op<const N: usize>(&self, name: &'static str, of: [&Var<'s>; N]) -> Result<Op<'_, 't, 's>> {
        of.into_iter().try_for_each(|var| var.check(name, self.identity))?;
        Ok(Op { tape: self, name, site: Location::caller() })
    }

    /// Runs the records backwards from `loss`, a single element, and adds to `gradients`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when `loss` is another tape's or not one element, or `gradients` are another layout's or on another
    /// device; those of the ops.
    pub fn backward(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![true; gradients.layout().entries().len()];
        self.run(loss, gradients, written)
    }

    /// [`Tape::backward`] over whatever `gradients` hold: as if they were zero before, without a pass that makes them so.
    ///
    /// # Errors
    /// As for [`Tape::backward`].
    pub fn backward_afresh(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![false; gradients.layout().entries().len()];
        self.run(loss, gradients, written)
    }

    fn run(self, loss: &Var<'s>, gradients: &mut Gradients, written: Vec<bool>) -> Result<()> {
        const OP: &str = "backward";
        loss.check(OP, self.identity)?;
        if loss.shape().elements() != 1 {
            return Err(Error::misuse(OP, "a loss of one element", format!("shape {}", loss.shape())));
        }
        if !gradients.layout().same(self.parameters.layout()) {
            return Err(Error::misuse(OP, "gradients of the tape's parameters", "another layout's"));
        }
        self.step.borrow(gradients.flat(), true)?;
        drop(self.forward);
        let Records { all, outputs } = self.records.into_inner();
        let step = self.step;
        let _phase = step.enter(Phase::Backward);
        let mut back = Backward::new(step, self.parameters, self.identity, gradients, written, outputs);
        back.begin(loss);
        for record in all.into_iter().rev() {
            back.run(record)?;
        }
        back.finish()?;
        step.region().pass_completed();
        Ok(())
    }
}
