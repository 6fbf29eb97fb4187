//! The tape: the records of a forward pass, run once in reverse.
//!
//! Invariant: a tape is consumed by its one backward pass. It rejects variables of another tape and
//! parameters of another spec.

#![forbid(unsafe_code)]

use super::backward::{Backward, Destination, Record};
use super::open::OpenTape;
use super::var::{Var, check};
use crate::error::{Error, Result};
use crate::generator::{Draws, Generator};
use crate::params::{GradientConsumer, Gradients, ParameterSpec, Parameters};
use crate::report::Phase;
use crate::step::Step;
use crate::tensor::{Saved, Shape, Stored};
use cuda_std::float_mode;
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::span::EnteredSpan;

const OP: &str = "backward";

/// The source of dropout's random numbers.
#[derive(Clone, Copy)]
enum Randomness<'t> {
    Unset,
    From(&'t Generator),
    /// Dropout drops nothing.
    Off,
}

/// The forward pass of one step, recorded for one backward pass.
pub struct Tape<'t, 's> {
    pub(super) step: &'t Step<'s>,
    pub(super) parameters: &'t Parameters,
    pub(super) identity: u64,
    /// The records of this tape's own ops. Those of its variables are in `open`.
    records: RefCell<Vec<Record<'t, 's>>>,
    pub(super) open: OpenTape,
    /// For each trained parameter, a number that is at most that of the first record that uses it.
    uses: RefCell<Vec<usize>>,
    randomness: Randomness<'t>,
    /// The generator's numbers for this step, once requested.
    pub(super) draws: OnceCell<Draws<'s>>,
    /// The factor of all gradients: the part of the batch that the tape records. Gradients that
    /// enter a nested tape already include it.
    share: f64,
    /// `None` for a nested tape.
    forward: Option<EnteredSpan>,
}

/// The context that a tape passes to the tapes nested in it. All of them get the same.
pub(super) struct TapeContext<'t, 's> {
    parameters: &'t Parameters,
    pub(super) identity: u64,
    randomness: Randomness<'t>,
    draws: Option<Draws<'s>>,
}

impl TapeContext<'_, '_> {
    /// Makes an empty nested tape.
    pub(super) fn tape<'x, 'i>(&'x self, step: &'x Step<'i>) -> Tape<'x, 'i> {
        let mut tape = Tape::bare(step, self.parameters, self.randomness);
        tape.draws =
            self.draws.as_ref().map(|draws| draws.within(draws.calls())).map_or_else(OnceCell::new, OnceCell::from);
        tape
    }
}

impl fmt::Debug for Tape<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape of {} records", self.recorded().len())
    }
}

impl<'t, 's> Tape<'t, 's> {
    /// Makes an empty tape over a step and the weights that it will use.
    pub fn new(step: &'t Step<'s>, parameters: &'t Parameters) -> Self {
        let forward = Some(Phase::Forward.span().entered());
        Self { forward, ..Self::bare(step, parameters, Randomness::Unset) }
    }

    fn bare(step: &'t Step<'s>, parameters: &'t Parameters, randomness: Randomness<'t>) -> Self {
        // Distinguishes the variables of two tapes of one step.
        static TAPES: AtomicU64 = AtomicU64::new(0);
        let identity = TAPES.fetch_add(1, Ordering::Relaxed);
        let (records, draws, open) = (RefCell::default(), OnceCell::new(), OpenTape::new(identity, step));
        let uses = RefCell::new(vec![usize::MAX; parameters.spec().entries().len()]);
        Self { step, parameters, identity, records, open, uses, randomness, draws, share: 1.0, forward: None }
    }

    /// Makes dropout draw from this generator, as a training pass needs. The first dropout or
    /// recompute queues one extra launch.
    #[must_use]
    pub fn with_generator(self, generator: &'t Generator) -> Self {
        Self { randomness: Randomness::From(generator), ..self }
    }

    /// Disables dropout for an evaluation: it drops nothing and draws nothing.
    #[must_use]
    pub fn evaluating(self) -> Self {
        Self { randomness: Randomness::Off, ..self }
    }

    /// Records a part of a batch: `samples` of its `batch` samples, with a loss that is the part's
    /// mean. Backward multiplies all gradients by `samples / batch`. The gradients of all parts
    /// then add up to those of the mean over the batch.
    #[must_use]
    pub fn of_part(self, samples: usize, batch: usize) -> Self {
        Self { share: float_mode::in_default(|| samples as f64 / batch as f64), ..self }
    }

    /// The factor of all gradients, set by [`Tape::of_part`].
    pub fn share(&self) -> f64 {
        self.share
    }

    /// True if the tape is for an evaluation, set by [`Tape::evaluating`].
    pub fn is_evaluating(&self) -> bool {
        matches!(self.randomness, Randomness::Off)
    }

    /// The random numbers of the step, from the tape's generator. `None` on an evaluation tape.
    ///
    /// # Errors
    /// [`Error::Misuse`] on a tape that has no generator and is not for an evaluation.
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
                let expected = "a tape with a generator (`Tape::with_generator`, `TrainState::with_dropout`), or a tape for an \
                                evaluation (`Tape::evaluating`)";
                Err(Error::misuse("draws", expected, "neither"))
            }
        }
    }

    /// The context for nested tapes. Draws the random numbers now, so that they outlive the nested
    /// scope.
    #[track_caller]
    pub(super) fn around(&self) -> Result<TapeContext<'t, 's>> {
        let draws = match self.randomness {
            Randomness::From(_) => self.draws()?.map(|draws| draws.within(draws.calls())),
            Randomness::Unset | Randomness::Off => None,
        };
        let Self { parameters, identity, randomness, .. } = *self;
        Ok(TapeContext { parameters, identity, randomness, draws })
    }

    /// The parameter spec of the weights.
    pub fn spec(&self) -> &'t ParameterSpec {
        self.parameters.spec()
    }

    /// The step that the tape records.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// Puts a value that needs no gradient on the tape: a tensor, or a saved one.
    pub fn input<S: Stored>(&self, value: impl Into<Saved<'s, S>>) -> Var<'s, S> {
        self.var(value.into(), None)
    }

    /// Makes a variable of this tape.
    pub(super) fn var<S: Stored>(&self, value: Saved<'s, S>, output: Option<usize>) -> Var<'s, S> {
        Var { value, region: self.step.region(), tape: self.identity, output, constant: false }
    }

    /// Puts a record with this many outputs on the tape. Returns the number of the first output.
    pub(super) fn push(&self, outputs: usize, record: impl FnOnce(usize) -> Record<'t, 's>) -> usize {
        let first = self.open.reserve(outputs);
        self.records.borrow_mut().push(record(first));
        first
    }

    /// Notes that the next record, or a later one, uses a trained parameter of this index.
    pub(super) fn note_use(&self, index: usize) {
        let used = &mut self.uses.borrow_mut()[index];
        *used = self.open.outputs().min(*used);
    }

    /// Notes the parameters that a nested tape uses, which the next record runs again.
    pub(super) fn note_uses_of(&self, nested: &Tape<'_, '_>) {
        let used = nested.uses.borrow();
        used.iter().enumerate().filter(|(_, first)| **first < usize::MAX).for_each(|(index, _)| self.note_use(index));
    }

    /// The name of each recorded op, and the number and shape of its first output, in order.
    pub(super) fn recorded(&self) -> Vec<(&'static str, usize, Shape)> {
        let mut all: Vec<_> =
            self.records.borrow().iter().map(|record| (record.op, record.first, record.shape)).collect();
        all.extend(self.open.recorded());
        all.sort_by_key(|&(_, first, _)| first);
        all
    }

    /// Returns the records in order, the number of their outputs, and for each trained parameter a
    /// number that is at most that of the first record that uses it. The outputs include the
    /// variables lent to a nested tape, which belong to no record and come first.
    pub(super) fn into_records(self) -> (Vec<Record<'t, 's>>, usize, Vec<usize>) {
        drop(self.forward);
        let (mut all, outputs) = (self.records.into_inner(), self.open.outputs());
        all.extend(self.open.close());
        all.sort_by_key(|record| record.first);
        (all, outputs, self.uses.into_inner())
    }

    /// Runs the records backwards from `loss`, a single element, and adds to `gradients`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when `loss` belongs to another tape, has more than one element or depends
    /// on no trained parameter, or when `gradients` belong to another parameter spec or device.
    pub fn backward(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![true; gradients.spec().entries().len()];
        self.run_into(loss, gradients, written)
    }

    /// Runs the records like [`Tape::backward`], but overwrites `gradients`. The result is the same
    /// as from zeroed gradients, without the pass that zeroes them.
    pub fn backward_overwrite(self, loss: &Var<'s>, gradients: &mut Gradients) -> Result<()> {
        let written = vec![false; gradients.spec().entries().len()];
        self.run_into(loss, gradients, written)
    }

    /// Runs the records like [`Tape::backward_overwrite`], but stores no gradients. Each is
    /// computed in f32 in memory of the step, passed to `consumer` as soon as it is final, and
    /// freed. A parameter that the loss does not depend on has a gradient of zero.
    ///
    /// # Errors
    /// As [`Tape::backward`]; those of `consumer`; [`Error::Misuse`] when a parameter that
    /// [`Tape::recompute`] uses is used outside of the recomputed part too; [`Error::ArenaFull`].
    pub fn backward_consumed(self, loss: &Var<'s>, consumer: &mut dyn GradientConsumer) -> Result<()> {
        let written = vec![false; self.parameters.spec().entries().len()];
        self.run(loss, Destination::Consumed(consumer), written)
    }

    fn run_into(self, loss: &Var<'s>, gradients: &mut Gradients, written: Vec<bool>) -> Result<()> {
        if !gradients.spec().same(self.parameters.spec()) {
            let expected = "gradients of the tape's parameters";
            return Err(Error::misuse(OP, expected, "gradients of another parameter spec"));
        }
        gradients.borrow(self.step)?;
        self.run(loss, Destination::Stored(gradients), written)
    }

    fn run(self, loss: &Var<'s>, gradients: Destination<'_>, written: Vec<bool>) -> Result<()> {
        check(loss, OP, self.identity)?;
        if loss.shape().elements() != 1 {
            return Err(Error::misuse(OP, "a loss of one element", format!("shape {}", loss.shape())));
        }
        if loss.output.is_none() && self.parameters.spec().trained_parameters().next().is_some() {
            let expected = "a loss that depends on a trained parameter";
            return Err(Error::misuse(OP, expected, "one of inputs and frozen parameters only"));
        }
        let Self { step, share, parameters, identity, .. } = self;
        // Ends the span of the forward pass too.
        let (all, outputs, first_uses) = self.into_records();
        let _phase = step.enter(Phase::Backward);
        let mut back = Backward::new(step, parameters, identity, gradients, first_uses, written, outputs);
        back.begin(loss, share);
        back.run_all(all)?;
        back.finish()?;
        step.region().pass_completed();
        Ok(())
    }
}
