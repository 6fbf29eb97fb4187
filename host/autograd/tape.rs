//! The tape: the records of a forward pass, run once in reverse.
//!
//! Invariant: a tape is consumed by its one backward pass, and takes neither a variable of another tape nor a parameter of another
//! layout.

#![forbid(unsafe_code)]

use super::backward::{Backward, Record};
use super::var::{Var, check};
use crate::error::{Error, Result};
use crate::params::{Gradients, Parameters};
use crate::report::Phase;
use crate::step::Step;
use crate::tensor::{Saved, Stored};
use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::span::EnteredSpan;

/// The records of a tape, and how many outputs they have.
#[derive(Default)]
pub(super) struct Records<'t, 's> {
    pub(super) all: Vec<Record<'t, 's>>,
    pub(super) outputs: usize,
}

/// The forward pass of one step, remembered for one backward pass.
pub struct Tape<'t, 's> {
    pub(super) step: &'t Step<'s>,
    pub(super) parameters: &'t Parameters,
    pub(super) identity: u64,
    pub(super) records: RefCell<Records<'t, 's>>,
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
    pub fn input<S: Stored>(&self, value: impl Into<Saved<'s, S>>) -> Var<'s, S> {
        Var { value: value.into(), tape: self.identity, output: None }
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
        check(loss, OP, self.identity)?;
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
