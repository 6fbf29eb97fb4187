//! The backward pass in progress.
//!
//! Invariant: a gradient that was given is never lost. What comes for an output whose op has run already, of another shape or for
//! another tape's variable is refused, and so is an op that takes what a variable has and does not give it back.

use super::var::{Var, check};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::{Gradients, Parameter, Parameters, Stack};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, LentMut, Shape, Stored, Tensor};
use std::fmt;
use std::panic::Location;

/// The gradient that an output has.
pub(super) enum Upstream<'s> {
    /// None: so far, the loss does not depend on it.
    Nothing,
    /// It is the loss, whose gradient is one.
    Loss,
    /// What the ops behind it have given, of the type that the output has.
    Sum(AnyTensor<'s>),
}

impl<'s> Upstream<'s> {
    /// As a tensor of the output's shape.
    pub(super) fn into_tensor<S: Stored>(self, step: &Step<'s>, shape: Shape) -> Result<Option<Tensor<'s, S>>> {
        match self {
            Self::Nothing => Ok(None),
            Self::Loss => {
                let mut one = step.empty(shape)?;
                ops::fill_into(step, &mut one, 1.0).map(|()| Some(one))
            }
            Self::Sum(gradient) => Ok(Some(of_output(gradient))),
        }
    }
}

/// A gradient as what it was given as: a variable's type is that of its gradient.
fn of_output<S: Stored>(gradient: AnyTensor<'_>) -> Tensor<'_, S> {
    S::restore(gradient).expect("the gradient of an output has its type")
}

/// Turns the gradients of an op's outputs into gradients of its inputs and parameters.
type Closure<'t, 's> = Box<dyn FnOnce(&mut Backward<'_, 't, 's>, Vec<Upstream<'s>>) -> Result<()> + 't>;

/// What an op has left for the backward pass.
pub(super) struct Record<'t, 's> {
    pub(super) op: &'static str,
    /// The line of the forward pass that is the reason for it.
    pub(super) site: &'static Location<'static>,
    /// The number of its first output; the next op's follow its last.
    pub(super) first: usize,
    /// The first output's extents.
    pub(super) shape: Shape,
    pub(super) backward: Closure<'t, 's>,
}

/// The backward pass in progress, as the op sees it that is run: what its outputs' gradients become is given to this.
pub struct Backward<'b, 't, 's> {
    step: &'t Step<'s>,
    parameters: &'t Parameters,
    /// The identity of the tape that is run.
    tape: u64,
    /// The name of the op that is run.
    op: &'static str,
    gradients: &'b mut Gradients,
    /// Whether each parameter's gradient holds what counts: if not, the next to come overwrites it.
    written: Vec<bool>,
    /// What each output has so far, of those whose op has not run.
    pub(super) pending: Vec<Upstream<'s>>,
    /// The outputs whose gradients the op that is run has taken and not given back.
    taken: Vec<usize>,
}

impl fmt::Debug for Backward<'_, '_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backward of `{}`, over {} outputs", self.op, self.pending.len())
    }
}

impl<'b, 't, 's> Backward<'b, 't, 's> {
    pub(super) fn new(
        step: &'t Step<'s>,
        parameters: &'t Parameters,
        tape: u64,
        gradients: &'b mut Gradients,
        written: Vec<bool>,
        outputs: usize,
    ) -> Self {
        let pending = (0..outputs).map(|_| Upstream::Nothing).collect();
        Self { step, parameters, tape, op: "backward", gradients, written, pending, taken: Vec::new() }
    }

    /// The loss's gradient is one.
    pub(super) fn begin(&mut self, loss: &Var<'s>) {
        if let Some(output) = loss.output {
            self.pending[output] = Upstream::Loss;
        }
    }

    /// Runs the last op that has not run, if the loss depends on it.
    pub(super) fn run(&mut self, record: Record<'t, 's>) -> Result<()> {
        let Record { op, site, first, backward, .. } = record;
        let upstream = self.pending.split_off(first);
        if upstream.iter().all(|upstream| matches!(upstream, Upstream::Nothing)) {
            return Ok(());
        }
        self.step.region().attribute(Some(site));
        self.op = op;
        backward(self, upstream)?;
        if self.taken.is_empty() {
            return Ok(());
        }
        Err(Error::misuse(op, "`add` for each gradient that was taken", format!("{} not given back", self.taken.len())))
    }

    /// Runs the records of a tape within this one over the same parameters, from what its outputs have so far. Returns what those have
    /// that are of no record.
    pub(super) fn run_within<'x, 'i>(
        &mut self,
        step: &'x Step<'i>,
        tape: u64,
        pending: Vec<Upstream<'i>>,
        records: Vec<Record<'x, 'i>>,
    ) -> Result<Vec<Upstream<'i>>>
    where
        't: 'x,
    {
        let (written, taken) = (std::mem::take(&mut self.written), Vec::new());
        let (parameters, op, gradients) = (self.parameters, self.op, &mut *self.gradients);
        let mut inner = Backward { step, parameters, tape, op, gradients, written, pending, taken };
        records.into_iter().rev().try_for_each(|record| inner.run(record))?;
        let Backward { written, pending, .. } = inner;
        self.written = written;
        Ok(pending)
    }

    /// Gradients that nothing has come for are zero.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.parameters.layout().parameters().try_for_each(|parameter| self.gradient(parameter).map(drop))
    }

    /// The step that the pass belongs to.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// The weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device than the step, or the handle is another layout's.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.weights_as(parameter)
    }

    /// The weights of a parameter as S stores them: of BF16, from the copy that [`Parameters::with_bf16_copy`] makes.
    ///
    /// # Errors
    /// As for [`Backward::weights`]; [`Error::Misuse`] when there is no copy.
    pub fn weights_as<S: Stored>(&self, parameter: Parameter) -> Result<Lent<'t, 's, S>> {
        self.parameters.lend_as(self.step, parameter).map_err(|error| error.in_op(self.op))
    }

    /// A stack's weights, flat; see [`Op::stack_weights`](super::Op::stack_weights).
    ///
    /// # Errors
    /// As for [`Backward::weights`]; [`Error::Misuse`] for a stack without members.
    pub fn stack_weights(&self, stack: &Stack) -> Result<Lent<'t, 's>> {
        self.stack_weights_as(stack)
    }

    /// A stack's weights as S stores them, flat.
    ///
    /// # Errors
    /// As for [`Backward::stack_weights`]; [`Error::Misuse`] when there is no copy.
    pub fn stack_weights_as<S: Stored>(&self, stack: &Stack) -> Result<Lent<'t, 's, S>> {
        self.parameters.lend_stack_as(self.step, stack).map_err(|error| error.in_op(self.op))
    }

    /// A parameter's gradient, which the caller must add to when the second is true and overwrite when it is not. So the gradients of
    /// several ops with one parameter add up, in the reverse of the order in which these were
    /// recorded. It holds what this pass has given so far: zeros when the second is false. So an op
    /// may also read what others have given.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device than the step, or the handle is another layout's.
    pub fn gradient(&mut self, parameter: Parameter) -> Result<(LentMut<'_, 's>, bool)> {
        let step = self.step;
        let (mut gradient, written) = self.gradient_uninit(parameter)?;
        zero_unless(written, step, &mut gradient)?;
        Ok((gradient, written))
    }

    /// The gradients of several parameters at once, each as [`Backward::gradient`] gives it.
    ///
    /// # Errors
    /// As for [`Backward::gradient`]; [`Error::Misuse`] when one parameter is named twice.
    pub fn gradients<const N: usize>(
        &mut self,
        parameters: [Parameter; N],
    ) -> Result<([LentMut<'_, 's>; N], [bool; N])> {
        let step = self.step;
        let (mut gradients, written) = self.gradients_uninit(parameters)?;
        gradients.iter_mut().zip(written).try_for_each(|(gradient, written)| zero_unless(written, step, gradient))?;
        Ok((gradients, written))
    }

    /// A stack's gradients as one, flat like its weights, as [`Backward::gradient`] gives one. The
    /// space between members must stay zero.
    ///
    /// # Errors
    /// As for [`Backward::gradient`]; [`Error::Misuse`] for a stack without members.
    pub fn stack_gradient(&mut self, stack: &Stack) -> Result<(LentMut<'_, 's>, bool)> {
        let step = self.step;
        let (mut gradient, written) = self.stack_gradient_uninit(stack)?;
        zero_unless(written, step, &mut gradient)?;
        Ok((gradient, written))
    }

    /// [`Backward::gradient`] for an op that overwrites all of it when the second is false: it is
    /// not made zero before, and holds the numbers of an earlier update.
    pub(crate) fn gradient_uninit(&mut self, parameter: Parameter) -> Result<(LentMut<'_, 's>, bool)> {
        let ([gradient], [written]) = self.gradients_uninit([parameter])?;
        Ok((gradient, written))
    }

    /// [`Backward::gradients`] without the zeros, likewise.
    pub(crate) fn gradients_uninit<const N: usize>(
        &mut self,
        parameters: [Parameter; N],
    ) -> Result<([LentMut<'_, 's>; N], [bool; N])> {
        let op = self.op;
        let layout = self.parameters.layout();
        let places = parameters.iter().map(|&parameter| layout.index(parameter)).collect::<Result<Vec<_>>>();
        let places = places.map_err(|error| error.in_op(op))?;
        let gradients = self.gradients.lend_many_mut(self.step, parameters).map_err(|error| error.in_op(op))?;
        let mut places = places.into_iter();
        let mut written = || std::mem::replace(&mut self.written[places.next().expect("one for each")], true);
        Ok((gradients, [(); N].map(|()| written())))
    }

    /// [`Backward::stack_gradient`] without the zeros, likewise.
    pub(crate) fn stack_gradient_uninit(&mut self, stack: &Stack) -> Result<(LentMut<'_, 's>, bool)> {
        let op = self.op;
        // One write must do for all: where some are written already, the others start from zero.
        let layout = self.parameters.layout();
        let places = stack.members().iter().map(|member| layout.index(*member)).collect::<Result<Vec<_>>>();
        let places = places.map_err(|error| error.in_op(op))?;
        let written = places.iter().any(|&place| self.written[place]);
        for (member, place) in stack.members().iter().zip(places) {
            if written {
                self.gradient(*member)?;
            }
            self.written[place] = true;
        }
        let gradient = self.gradients.lend_stack_mut(self.step, stack).map_err(|error| error.in_op(op))?;
        Ok((gradient, written))
    }

    /// Adds `gradient` to what `var` has.
    ///
    /// # Errors
    /// [`Error::Misuse`] when shapes differ, and for a variable of another tape or one that was made after the op that is run.
    pub fn add<S: Stored>(&mut self, var: &Var<'s, S>, gradient: Tensor<'s, S>) -> Result<()> {
        let output = self.output(var)?;
        if gradient.shape() != var.shape() {
            let expected = format!("a gradient of the variable's shape {}", var.shape());
            return Err(Error::misuse(self.op, expected, gradient.shape().to_string()));
        }
        let Some(output) = output else { return Ok(()) };
        self.taken.retain(|&taken| taken != output);
        let sum = match std::mem::replace(&mut self.pending[output], Upstream::Nothing) {
            Upstream::Sum(sum) => {
                let mut sum = of_output(sum);
                ops::add_assign(self.step, &mut sum, &gradient)?;
                self.step.give_back(gradient);
                sum
            }
            // The loss's own op is the first to run.
            Upstream::Nothing | Upstream::Loss => gradient,
        };
        self.pending[output] = Upstream::Sum(S::erase(sum));
        Ok(())
    }

    /// Adds `gradient` to what each of two variables has, which may be the same.
    ///
    /// # Errors
    /// Those of [`Backward::add`].
    pub fn add_to_both<S: Stored>(&mut self, a: &Var<'s, S>, b: &Var<'s, S>, gradient: Tensor<'s, S>) -> Result<()> {
        // There is one gradient: the second has it, the first a copy, unless it can add it to what it has.
        let (first, second) = if b.wants_gradient() { (a, b) } else { (b, a) };
        if first.wants_gradient() {
            let sum = match self.take(first)? {
                Some(mut so_far) => ops::add_assign(self.step, &mut so_far, &gradient).map(|()| so_far)?,
                None => ops::copy(self.step, &gradient)?,
            };
            self.add(first, sum)?;
        }
        self.add(second, gradient)
    }

    /// What `var` has so far, if it has something, for an op whose kernel adds to it in place: [`Backward::add`] gives it back.
    ///
    /// # Errors
    /// [`Error::Misuse`] as for [`Backward::add`], and when it was taken and not given back.
    pub fn take<S: Stored>(&mut self, var: &Var<'s, S>) -> Result<Option<Tensor<'s, S>>> {
        let Some(output) = self.output(var)? else { return Ok(None) };
        if self.taken.contains(&output) {
            return Err(Error::misuse(
                self.op,
                "`add` before a variable's gradient is taken again",
                "it was not given back",
            ));
        }
        match std::mem::replace(&mut self.pending[output], Upstream::Nothing) {
            Upstream::Sum(sum) => {
                self.taken.push(output);
                Ok(Some(of_output(sum)))
            }
            Upstream::Nothing | Upstream::Loss => Ok(None),
        }
    }

    /// The output that a variable is, whose op is still to run: a gradient for any other would be lost.
    fn output<S: Stored>(&self, var: &Var<'s, S>) -> Result<Option<usize>> {
        check(var, self.op, self.tape)?;
        match var.output {
            Some(output) if output >= self.pending.len() => {
                Err(Error::misuse(self.op, "a variable made before the op that is run", "a later one"))
            }
            output => Ok(output),
        }
    }
}

/// Makes a gradient zero that nothing of this pass was written to.
fn zero_unless<'s>(written: bool, step: &Step<'s>, gradient: &mut LentMut<'_, 's>) -> Result<()> {
    if written { Ok(()) } else { ops::fill_into(step, gradient, 0.0) }
}
