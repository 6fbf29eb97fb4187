//! Open tapes: how an op that is called on a variable finds the variable's tape.
//!
//! A variable carries its tape's number and its step's memory, but no reference to the tape, so
//! that it stays a small value of one lifetime. A tape is open from when it is made until its
//! backward pass begins, or until it is dropped. Each thread lists its open tapes. An op that is
//! called on a variable ([`VarOp`]) launches in the step, and puts its record on the list's entry.
//! The tape merges these records with those of its own ops, by the numbers of their outputs.
//!
//! Invariant: a record holds no lifetime, but [`Kept`] variables of its own tape. Only the backward
//! pass of that tape runs it, within the step to which the memory of these variables belongs.

use super::backward::{Backward, Record, Upstream};
use super::var::{AnyVar, Dependence, Var, check};
use crate::arena::ArenaInner;
use crate::error::{Error, Result};
use crate::step::{Numerics, Step};
use crate::tensor::{Element, Memory, Saved, Shape, Source, Stored, Tensor};
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;

thread_local! {
    /// The open tapes of this thread. Few are open at once: a tape, and those of recomputed parts.
    static OPEN: RefCell<Vec<Rc<Entry>>> = const { RefCell::new(Vec::new()) };
}

/// Runs the backward pass of an op in any step.
type Closure = Box<dyn for<'b, 't, 's> FnOnce(&mut Backward<'b, 't, 's>, Vec<Upstream<'s>>) -> Result<()>>;

/// The record of an op that was called on a variable.
struct VarRecord {
    op: &'static str,
    site: &'static Location<'static>,
    first: usize,
    shape: Shape,
    backward: Closure,
}

/// The part of a tape that its variables reach.
struct Entry {
    tape: u64,
    /// The number of the next output.
    outputs: Cell<usize>,
    records: RefCell<Vec<VarRecord>>,
    numerics: Rc<Cell<Numerics>>,
    runs_again: bool,
}

impl Entry {
    fn reserve(&self, outputs: usize) -> usize {
        self.outputs.replace(self.outputs.get() + outputs)
    }
}

/// A tape's entry among the open tapes, until it is dropped.
pub(super) struct OpenTape(Rc<Entry>);

impl OpenTape {
    pub(super) fn new(tape: u64, step: &Step<'_>) -> Self {
        let (numerics, runs_again) = (step.shared_numerics(), step.runs_again());
        let entry = Entry { tape, outputs: Cell::new(0), records: RefCell::default(), numerics, runs_again };
        let entry = Rc::new(entry);
        OPEN.with_borrow_mut(|open| open.push(Rc::clone(&entry)));
        Self(entry)
    }

    /// Returns the number of outputs so far.
    pub(super) fn outputs(&self) -> usize {
        self.0.outputs.get()
    }

    /// Gives the first outputs to variables that a nested tape was lent.
    pub(super) fn begin_after(&self, lent: usize) {
        self.0.outputs.set(lent);
    }

    /// Returns the number of the first of so many new outputs.
    pub(super) fn reserve(&self, outputs: usize) -> usize {
        self.0.reserve(outputs)
    }

    /// The name of each op, and the number and shape of its first output.
    pub(super) fn recorded(&self) -> Vec<(&'static str, usize, Shape)> {
        self.0.records.borrow().iter().map(|record| (record.op, record.first, record.shape)).collect()
    }

    /// Returns the records, after which no op can be called on a variable of the tape.
    pub(super) fn close<'t, 's>(self) -> Vec<Record<'t, 's>> {
        let bound = |VarRecord { op, site, first, shape, backward }| -> Record<'t, 's> {
            Record { op, site, first, shape, backward: Box::new(move |back, upstream| backward(back, upstream)) }
        };
        self.0.records.take().into_iter().map(bound).collect()
    }
}

impl Drop for OpenTape {
    fn drop(&mut self) {
        // The thread may be about to end, and its list gone.
        let _ = OPEN.try_with(|open| open.borrow_mut().retain(|entry| !Rc::ptr_eq(entry, &self.0)));
    }
}

/// An op that is called on a variable.
pub(crate) struct VarOp<'s> {
    name: &'static str,
    site: &'static Location<'static>,
    entry: Rc<Entry>,
    region: &'s ArenaInner,
    step: Step<'s>,
    /// True if one of its variables wants a gradient.
    is_recorded: bool,
    /// True if its result follows only from frozen parameters and inputs.
    constant: bool,
}

impl<'s, S: Stored> Var<'s, S> {
    /// Begins an op of these variables, of which this is one.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape, and after the tape's backward pass.
    #[track_caller]
    pub(crate) fn op(&self, name: &'static str, of: &[&dyn AnyVar]) -> Result<VarOp<'s>> {
        let found = OPEN.with_borrow(|open| open.iter().rev().find(|entry| entry.tape == self.tape).cloned());
        let Some(entry) = found else {
            return Err(Error::misuse(name, "a variable of a tape whose backward pass has not begun", "a later use"));
        };
        of.iter().try_for_each(|&var| check(var, name, self.tape))?;
        let dependence = of.iter().map(|var| var.dependence()).max().unwrap_or(Dependence::Unknown);
        let step = Step::sharing(self.region, Rc::clone(&entry.numerics), entry.runs_again);
        let is_recorded = dependence == Dependence::Trained;
        let constant = dependence == Dependence::Constant;
        Ok(VarOp { name, site: Location::caller(), entry, region: self.region, step, is_recorded, constant })
    }
}

impl<'s> VarOp<'s> {
    /// The step that the tape records.
    pub(crate) fn step(&self) -> &Step<'s> {
        &self.step
    }

    /// Puts the output on the tape. `backward` receives its gradient, as in
    /// [`Op::record`](super::Op::record). An op none of whose variables wants a gradient has no
    /// backward pass.
    pub(crate) fn record<S: Stored>(
        self,
        value: Saved<'s, S>,
        backward: impl for<'b, 't, 'x> FnOnce(&mut Backward<'b, 't, 'x>, Tensor<'x, S>) -> Result<()> + 'static,
    ) -> Var<'s, S> {
        if !self.is_recorded {
            return self.unrecorded(value);
        }
        let shape = value.shape();
        let of_one: Closure = Box::new(move |back, upstream| {
            let mut upstream = gradients(back, upstream, &[shape])?;
            upstream.pop().flatten().map_or(Ok(()), |gradient| backward(back, gradient))
        });
        let first = self.push(shape, 1, of_one);
        Var { output: Some(first), ..self.unrecorded(value) }
    }

    /// Puts outputs on the tape. `backward` receives the gradient of each, or `None` for an output
    /// on which the loss does not depend. See [`VarOp::record`].
    pub(crate) fn record_all<S: Stored>(
        self,
        values: Vec<Saved<'s, S>>,
        backward: impl for<'b, 't, 'x> FnOnce(&mut Backward<'b, 't, 'x>, Vec<Option<Tensor<'x, S>>>) -> Result<()> + 'static,
    ) -> Vec<Var<'s, S>> {
        if !self.is_recorded || values.is_empty() {
            return values.into_iter().map(|value| self.unrecorded(value)).collect();
        }
        let shapes: Vec<Shape> = values.iter().map(Saved::shape).collect();
        let (first_shape, count) = (shapes[0], shapes.len());
        let of_all: Closure = Box::new(move |back, upstream| {
            let upstream = gradients(back, upstream, &shapes)?;
            backward(back, upstream)
        });
        let first = self.push(first_shape, count, of_all);
        let numbered = values.into_iter().zip(first..);
        numbered.map(|(value, output)| Var { output: Some(output), ..self.unrecorded(value) }).collect()
    }

    /// Puts a record with this many outputs on the tape. Returns the number of the first.
    fn push(&self, shape: Shape, outputs: usize, backward: Closure) -> usize {
        let (op, site, entry) = (self.name, self.site, &self.entry);
        let first = entry.reserve(outputs);
        entry.records.borrow_mut().push(VarRecord { op, site, first, shape, backward });
        first
    }

    /// Puts an output without a backward pass on the tape.
    pub(crate) fn unrecorded<S: Stored>(&self, value: Saved<'s, S>) -> Var<'s, S> {
        Var { value, region: self.region, tape: self.entry.tape, output: None, constant: self.constant }
    }
}

/// Returns the gradient of each output, of these shapes.
fn gradients<'s, S: Stored>(
    back: &Backward<'_, '_, 's>,
    upstream: Vec<Upstream<'s>>,
    shapes: &[Shape],
) -> Result<Vec<Option<Tensor<'s, S>>>> {
    upstream.into_iter().zip(shapes).map(|(upstream, &shape)| upstream.into_tensor(back.step(), shape)).collect()
}

/// A variable that a record keeps for the backward pass, without its lifetime.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept<T> {
    memory: Memory<T>,
    shape: Shape,
    tape: u64,
    output: Option<usize>,
    constant: bool,
}

impl<S: Stored> Var<'_, S> {
    /// Keeps the variable for the backward pass.
    pub(crate) fn keep(&self) -> Kept<S> {
        let Self { value, tape, output, constant, .. } = *self;
        Kept { memory: value.memory(), shape: value.shape(), tape, output, constant }
    }
}

impl<T: Element> Kept<T> {
    /// Keeps a value that is not a variable.
    pub(crate) fn of(value: &Saved<'_, T>) -> Self {
        Self { memory: value.memory(), shape: value.shape(), tape: 0, output: None, constant: false }
    }

    /// Returns the value, in the backward pass of its tape.
    pub(crate) fn value<'s>(&self, _: &Backward<'_, '_, 's>) -> Saved<'s, T> {
        Saved::new(self.memory, self.shape)
    }
}

impl<S: Stored> Kept<S> {
    /// Returns the variable, in the backward pass of its tape.
    ///
    /// # Errors
    /// [`Error::Misuse`] in the backward pass of another tape.
    pub(crate) fn var<'s>(self, back: &Backward<'_, '_, 's>) -> Result<Var<'s, S>> {
        let Self { memory, shape, tape, output, constant } = self;
        let var = Var { value: Saved::new(memory, shape), region: back.step().region(), tape, output, constant };
        back.check(&var).map(|()| var)
    }
}
