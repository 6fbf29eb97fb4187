//! The tape: the records of a forward pass, run once in reverse.
//!
//! Invariant: a tape is consumed by its one backward pass, and takes neither a variable of another tape nor a parameter of another
//! layout.

#![forbid(unsafe_code)]

use super::backward::{Backward, Record};
use super::var::{Var, check};
use crate::error::{Error, Result};
use crate::ops::{Draws, Generator};
use crate::params::{Gradients, Parameters};
use crate::report::Phase;
use crate::step::Step;
use crate::tensor::{Saved, Stored};
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::span::EnteredSpan;

/// The records of a tape, and how many outputs they have.
#[derive(Default)]
pub(super) struct Records<'t, 's> {
    pub(super) all: Vec<Record<'t, 's>>,
    /// Those of no record come first: what a tape within another one is given.
    pub(super) outputs: usize,
}

/// Where dropout has its numbers from.
#[derive(Clone, Copy)]
enum Randomness<'t> {
    Unset,
    From(&'t Generator),
    /// Nothing is dropped.
    Off,
}

/// The forward pass of one step, remembered for one backward pass.
pub struct Tape<'t, 's> {
    pub(super) step: &'t Step<'s>,
    pub(super) parameters: &'t Parameters,
    pub(super) identity: u64,
    pub(super) records: RefCell<Records<'t, 's>>,
    randomness: Randomness<'t>,
    /// The generator's numbers for this step, once they are asked for.
    pub(super) draws: OnceCell<Draws<'s>>,
    /// None within another tape.
    forward: Option<EnteredSpan>,
}

/// What the tapes within a tape have of it, each the same.
pub(super) struct Around<'t, 's> {
    parameters: &'t Parameters,
    pub(super) identity: u64,
    randomness: Randomness<'t>,
    draws: Option<Draws<'s>>,
}

impl Around<'_, '_> {
    /// An empty tape.
    pub(super) fn tape<'x, 'i>(&'x self, step: &'x Step<'i>) -> Tape<'x, 'i> {
        let mut tape = Tape::bare(step, self.parameters, self.randomness);
        tape.draws =
            self.draws.as_ref().map(|draws| draws.within(draws.calls())).map_or_else(OnceCell::new, OnceCell::from);
        tape
    }
}

impl fmt::Debug for Tape<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape of {} records", self.records.borrow().all.len())
    }
}

impl<'t, 's> Tape<'t, 's> {
    /// An empty tape over a step and the weights that it will use.
    pub fn new(step: &'t Step<'s>, parameters: &'t Parameters) -> Self {
        let forward = Some(Phase::Forward.span().entered());
        Self { forward, ..Self::bare(step, parameters, Randomness::Unset) }
    }

    fn bare(step: &'t Step<'s>, parameters: &'t Parameters, randomness: Randomness<'t>) -> Self {
        // Tells the variables of two tapes of one step apart.
        static TAPES: AtomicU64 = AtomicU64::new(0);
        let identity = TAPES.fetch_add(1, Ordering::Relaxed);
        let (records, draws) = (RefCell::default(), OnceCell::new());
        Self { step, parameters, identity, records, randomness, draws, forward: None }
    }

    /// The same, where dropout draws from this generator: what a pass for training needs. The first dropout, or checkpoint, queues one launch
    /// more.
    #[must_use]
    pub fn with_generator(self, generator: &'t Generator) -> Self {
        Self { randomness: Randomness::From(generator), ..self }
    }

    /// The same, where dropout drops nothing and draws nothing.
    #[must_use]
    pub fn evaluating(self) -> Self {
        Self { randomness: Randomness::Off, ..self }
    }

    /// Whether the tape is for an evaluation: [`Tape::evaluating`] made it.
    pub fn is_evaluating(&self) -> bool {
        matches!(self.randomness, Randomness::Off)
    }

    /// The random numbers of the step, from the tape's generator; none on a tape that evaluates.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a tape that neither has a generator nor evaluates; those of [`Generator::draws`].
    #[track_caller]
    pub fn draws(&self) -> Result<Option<&Draws<'s>>> {
        if let Some(draws) = self.draws.get() {
            return Ok(Some(draws));
        }
        match self.randomness {
            Randomness::Off => Ok(None),
            Randomness::From(generator) => {
                let draws = generator.draws(self.step)?;
                Ok(Some(self.draws.get_or_init(|| draws)))
            }
            Randomness::Unset => {
                let expected = "a tape with a generator, by `Tape::with_generator` or `Learner::with_dropout`, or one that \
                                evaluates, by `Tape::evaluating`";
                Err(Error::misuse("draws", expected, "neither"))
            }
        }
    }

    /// What tapes within this one have of it. Draws its random numbers, which must not end with what is within.
    #[track_caller]
    pub(super) fn around(&self) -> Result<Around<'t, 's>> {
        let draws = match self.randomness {
            Randomness::From(_) => self.draws()?.map(|draws| draws.within(draws.calls())),
            Randomness::Unset | Randomness::Off => None,
        };
        let Self { parameters, identity, randomness, .. } = *self;
        Ok(Around { parameters, identity, randomness, draws })
    }

    /// The step that the tape records.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// A value that needs no gradient: a tensor, or one that is saved already.
    pub fn input<S: Stored>(&self, value: impl Into<Saved<'s, S>>) -> Var<'s, S> {
        Var { value: value.into(), tape: self.identity, output: None }
    }

    /// Puts a record of so many outputs on the tape; returns the number of the first.
    pub(super) fn push(&self, outputs: usize, record: impl FnOnce(usize) -> Record<'t, 's>) -> usize {
        let mut records = self.records.borrow_mut();
        let first = records.outputs;
        records.outputs += outputs;
        records.all.push(record(first));
        first
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
