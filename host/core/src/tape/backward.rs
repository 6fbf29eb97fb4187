//! The backward pass in progress.
//!
//! Invariant: a gradient passed to the pass is never lost. A gradient is rejected if the output's
//! op has already run, if its shape differs, or if the variable belongs to another tape. An op that
//! takes a variable's gradient and does not return it fails.

use super::var::{Var, check};
use crate::elementary;
use crate::error::{Error, Result, short};
use crate::params::{
    GradientConsumer, GradientParts, Gradients, MatrixWeights, Parameter, Parameters, StackedParameters,
};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, LentMut, Memory, Shape, Source, Stored, Target, Tensor};
use cuda_std::float_mode;
use half::bf16;
use kernels::cast::{cast_to_bf16, cast_to_f32};
use kernels::update::RUN;
use std::fmt;
use std::ops::Range;
use std::panic::Location;

/// The gradient of an output.
pub(super) enum Upstream<'s> {
    /// No gradient: so far, the loss does not depend on the output.
    Nothing,
    /// The output is the loss. Its gradient is this number, which is one unless the tape records a
    /// part of a batch.
    Loss(f64),
    /// The sum of the gradients from later ops, stored in the output's type.
    Sum(AnyTensor<'s>),
}

impl<'s> Upstream<'s> {
    /// Returns the gradient as a tensor of the output's shape.
    pub(super) fn into_tensor<S: Stored>(self, step: &Step<'s>, shape: Shape) -> Result<Option<Tensor<'s, S>>> {
        match self {
            Self::Nothing => Ok(None),
            Self::Loss(share) => {
                let mut gradient = step.empty(shape)?;
                let share = float_mode::in_default(|| share as f32);
                elementary::fill_into(step, &mut gradient, share).map(|()| Some(gradient))
            }
            Self::Sum(gradient) => Ok(Some(of_output(gradient))),
        }
    }
}

/// Restores a gradient's type, which is its variable's.
fn of_output<S: Stored>(gradient: AnyTensor<'_>) -> Tensor<'_, S> {
    S::restore(gradient).expect("the gradient of an output has its type")
}

/// Turns the gradients of an op's outputs into gradients of its inputs and parameters.
type Closure<'t, 's> = Box<dyn FnOnce(&mut Backward<'_, 't, 's>, Vec<Upstream<'s>>) -> Result<()> + 't>;

/// The record of one op for the backward pass.
pub(super) struct Record<'t, 's> {
    pub(super) op: &'static str,
    /// The line of the forward pass that recorded the op.
    pub(super) site: &'static Location<'static>,
    /// The number of its first output. The next op's numbers follow its last.
    pub(super) first: usize,
    /// The extents of the first output.
    pub(super) shape: Shape,
    pub(super) backward: Closure<'t, 's>,
}

/// The place of the parameters' gradients.
pub(super) enum Destination<'b> {
    Stored(&'b mut Gradients),
    /// No gradient is stored. Each is consumed when it is final.
    Consumed(&'b mut dyn GradientConsumer),
}

/// The uses of trained parameters by records that have yet to run.
struct Uses {
    /// For each parameter, a number that is at most that of the first record that uses it.
    first: Vec<usize>,
    /// True for each parameter that a record of an enclosing tape uses, which has yet to run.
    outside: Vec<bool>,
    /// The records from this number on have run.
    from: usize,
}

impl Uses {
    /// True if no record uses the parameter of this index that has yet to run.
    fn are_over(&self, index: usize) -> bool {
        !self.outside[index] && self.first[index] >= self.from
    }
}

/// The backward pass in progress, as the running op's closure receives it. The closure gives it the
/// gradients of the op's inputs and parameters.
pub struct Backward<'b, 't, 's> {
    step: &'t Step<'s>,
    parameters: &'t Parameters,
    /// The identity of the running tape.
    tape: u64,
    /// The name of the running op.
    op: &'static str,
    gradients: Destination<'b>,
    uses: Uses,
    /// Gradients that are not final and not stored, with their elements of the flat region.
    held: Vec<(Range<usize>, Tensor<'s>)>,
    /// Gradients in f32 of which BF16 is stored, and where. They are rounded when the op ends.
    unrounded: Vec<(Memory<bf16>, Tensor<'s>)>,
    /// True for each parameter whose gradient is valid. Otherwise the next contribution overwrites
    /// it.
    written: Vec<bool>,
    /// The gradient so far of each output whose op has not run.
    pub(super) pending: Vec<Upstream<'s>>,
    /// The outputs whose gradients the running op has taken and not returned.
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
        gradients: Destination<'b>,
        first_uses: Vec<usize>,
        written: Vec<bool>,
        outputs: usize,
    ) -> Self {
        let pending = (0..outputs).map(|_| Upstream::Nothing).collect();
        Self {
            step,
            parameters,
            tape,
            op: "backward",
            gradients,
            uses: Uses { outside: vec![false; first_uses.len()], first: first_uses, from: usize::MAX },
            held: Vec::new(),
            unrounded: Vec::new(),
            written,
            pending,
            taken: Vec::new(),
        }
    }

    /// Sets the loss's gradient.
    pub(super) fn begin(&mut self, loss: &Var<'s>, gradient: f64) {
        if let Some(output) = loss.output {
            self.pending[output] = Upstream::Loss(gradient);
        }
    }

    /// Runs records in reverse.
    pub(super) fn run_all(&mut self, records: Vec<Record<'t, 's>>) -> Result<()> {
        let mut records = records.into_iter().rev().peekable();
        while let Some(record) = records.next() {
            // What nested records consume, this record and those before it do not use.
            self.uses.from = record.first;
            self.run(record)?;
            self.uses.from = records.peek().map_or(0, |next| next.first + 1);
            self.consume()?;
        }
        Ok(())
    }

    /// Runs the last op that has not run, if the loss depends on it.
    fn run(&mut self, record: Record<'t, 's>) -> Result<()> {
        let Record { op, site, first, backward, .. } = record;
        let upstream = self.pending.split_off(first);
        if upstream.iter().all(|upstream| matches!(upstream, Upstream::Nothing)) {
            return Ok(());
        }
        self.step.region().attribute(Some(site));
        self.op = op;
        backward(self, upstream)?;
        self.round()?;
        if self.taken.is_empty() {
            return Ok(());
        }
        Err(Error::misuse(
            op,
            "`add` for each gradient that was taken",
            format!("{} gradients not returned", self.taken.len()),
        ))
    }

    /// Runs the records of a nested tape over the same parameters, from its outputs' gradients so
    /// far. Returns the gradients of the outputs that belong to no record.
    pub(super) fn run_within<'x, 'i>(
        &mut self,
        step: &'x Step<'i>,
        tape: u64,
        pending: Vec<Upstream<'i>>,
        (records, first_uses): (Vec<Record<'x, 'i>>, Vec<usize>),
    ) -> Result<Vec<Upstream<'i>>>
    where
        't: 'x,
    {
        let (written, unrounded, taken) = (std::mem::take(&mut self.written), Vec::new(), Vec::new());
        let (parameters, op, held) = (self.parameters, self.op, Vec::new());
        let outside = (0..first_uses.len()).map(|index| !self.uses.are_over(index)).collect();
        let uses = Uses { first: first_uses, outside, from: usize::MAX };
        let gradients = match &mut self.gradients {
            Destination::Stored(gradients) => Destination::Stored(gradients),
            Destination::Consumed(consumer) => Destination::Consumed(&mut **consumer),
        };
        let mut inner =
            Backward { step, parameters, tape, op, gradients, uses, held, unrounded, written, pending, taken };
        inner.run_all(records)?;
        let Backward { written, pending, held, .. } = inner;
        self.written = written;
        match held.first() {
            None => Ok(pending),
            Some((range, _)) => {
                let name = short(parameters.spec().entries()[parameters.spec().indices(range).start].name());
                let expected = "parameters of one recomputed part each, because their gradients are not stored";
                Err(Error::misuse(op, expected, format!("`{name}`, which is used outside of the part too")))
            }
        }
    }

    /// Zeroes the gradients that received no contribution.
    pub(super) fn finish(&mut self) -> Result<()> {
        let spec = self.parameters.spec();
        for parameter in spec.trained_parameters() {
            if !self.written[spec.index(parameter)?] {
                self.gradient(parameter)?;
                self.round()?;
                self.consume()?;
            }
        }
        Ok(())
    }

    /// Passes the gradients on that are final and not stored.
    fn consume(&mut self) -> Result<()> {
        let Destination::Consumed(consumer) = &mut self.gradients else { return Ok(()) };
        let (spec, step) = (self.parameters.spec(), self.step);
        for (range, gradient) in std::mem::take(&mut self.held) {
            if spec.indices(&range).all(|index| self.uses.are_over(index)) {
                let weights = self.parameters.lend_to_pass(step)?.part(range.clone());
                let lent = Lent::new(gradient.memory(), [range.len()].into());
                consumer.consume(step, range, weights, lent)?;
                step.free(gradient);
            } else {
                self.held.push((range, gradient));
            }
        }
        Ok(())
    }

    /// Returns memory of the step for gradients that are not stored: that which is held, or zeros
    /// in the padding.
    fn hold(&mut self, elements: Range<usize>, written: bool) -> Result<Memory<f32>> {
        let range = elements.start..elements.end.next_multiple_of(RUN);
        let (step, elements) = (self.step, elements.len());
        let overlaps = |held: &&(Range<usize>, Tensor<'s>)| held.0.start < range.end && range.start < held.0.end;
        match self.held.iter().find(overlaps) {
            Some((held, gradient)) if *held == range => return Ok(gradient.memory().part(0, elements)),
            None if !written => {}
            _ => {
                let name = short(self.parameters.spec().entries()[self.parameters.spec().indices(&range).start].name());
                let expected = "gradients of which each is added to by all ops before it is final, in the same parts";
                return Err(Error::misuse(self.op, expected, format!("another gradient of `{name}`")));
            }
        }
        let mut gradient = step.empty([range.len()])?;
        // A stack has padding between its members too.
        if range.len() > elements || self.parameters.spec().indices(&range).len() > 1 {
            elementary::fill_into(step, &mut gradient, 0.0)?;
        }
        let memory = gradient.memory().part(0, elements);
        self.held.push((range, gradient));
        Ok(memory)
    }

    /// Rounds the gradients that have been lent in f32 to BF16, which is stored.
    fn round(&mut self) -> Result<()> {
        for (stored, gradient) in self.unrounded.drain(..) {
            let mut stored = LentMut::new(stored, gradient.shape());
            self.step.launch(cast_to_bf16 { x: gradient.slice(), out: stored.out() })?;
            self.step.free(gradient);
        }
        Ok(())
    }

    /// Lends parts of the gradients in f32. If BF16 is stored, they are memory of the step, with
    /// the stored gradient if it is written.
    fn lend(&mut self, parts: GradientParts, written: &[bool]) -> Result<Vec<LentMut<'_, 's>>> {
        // What was lent before is no longer borrowed.
        self.round()?;
        let parts = match parts {
            GradientParts::F32(parts) => parts,
            GradientParts::Unstored(parts) => {
                let hold = |((range, shape), &written)| self.hold(range, written).map(|memory| (memory, shape));
                parts.into_iter().zip(written).map(hold).collect::<Result<_>>()?
            }
            GradientParts::Bf16(parts) => {
                let step = self.step;
                let mut in_f32 = |((stored, shape), &written): ((Memory<bf16>, Shape), &bool)| {
                    let mut gradient = step.empty(shape)?;
                    if written {
                        let stored = Lent::new(stored, shape);
                        step.launch(cast_to_f32 { x: stored.slice(), out: gradient.out() })?;
                    }
                    let memory = gradient.memory();
                    self.unrounded.push((stored, gradient));
                    Ok((memory, shape))
                };
                parts.into_iter().zip(written).map(&mut in_f32).collect::<Result<_>>()?
            }
        };
        Ok(parts.into_iter().map(|(memory, shape)| LentMut::new(memory, shape)).collect())
    }

    /// The step that the pass belongs to.
    pub fn step(&self) -> &'t Step<'s> {
        self.step
    }

    /// Lends the weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on a different device than the step, or the handle belongs
    /// to another parameter spec.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.weights_as(parameter)
    }

    /// Lends the weights of a parameter as S stores them. BF16 comes from the copy that
    /// [`Parameters::with_bf16_copy`] makes.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy.
    pub fn weights_as<S: Stored>(&self, parameter: Parameter) -> Result<Lent<'t, 's, S>> {
        self.parameters.lend_as(self.step, parameter).map_err(|error| error.in_op(self.op))
    }

    /// Lends the weights of a parameter as S; see [`Op::matrix`](super::Op::matrix).
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy; [`Error::ArenaFull`] when converted weights have no
    /// room.
    #[track_caller]
    pub fn matrix<S: Stored>(&self, parameter: Parameter) -> Result<MatrixWeights<'t, 's, S>> {
        self.parameters.matrix(self.step, parameter).map_err(|error| error.in_op(self.op))
    }

    /// Lends a stack's weights, flat; see [`Op::stack_weights`](super::Op::stack_weights).
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub fn stack_weights(&self, stack: &StackedParameters) -> Result<Lent<'t, 's>> {
        self.stack_weights_as(stack)
    }

    /// Lends a stack's weights as S stores them, flat.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy.
    pub fn stack_weights_as<S: Stored>(&self, stack: &StackedParameters) -> Result<Lent<'t, 's, S>> {
        self.parameters.lend_stack_as(self.step, stack).map_err(|error| error.in_op(self.op))
    }

    /// True if a parameter is trained. A frozen parameter has no gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn trains(&self, parameter: Parameter) -> Result<bool> {
        let entry = self.parameters.spec().entry(parameter).map_err(|error| error.in_op(self.op))?;
        Ok(entry.frozen().is_none())
    }

    /// True if the parameters of a stack are trained; see [`Backward::trains`].
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub fn trains_stack(&self, stack: &StackedParameters) -> Result<bool> {
        let head = self.parameters.spec().head(stack).map_err(|error| error.in_op(self.op))?;
        Ok(head.frozen().is_none())
    }

    /// Lends a parameter's gradient, with a flag. The caller must add to the gradient when the flag
    /// is true, and overwrite it when the flag is false. The contributions of several ops to one
    /// parameter thus add up, in the reverse of the order in which the ops were recorded. The
    /// gradient holds this pass's sum so far, or zeros when the flag is false, so an op may also
    /// read it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on a different device than the step, when the handle belongs to
    /// another parameter spec, or when the parameter is frozen; see [`Backward::trains`].
    pub fn gradient(&mut self, parameter: Parameter) -> Result<(LentMut<'_, 's>, bool)> {
        let step = self.step;
        let (mut gradient, written) = self.gradient_uninit(parameter)?;
        zero_unless(written, step, &mut gradient)?;
        Ok((gradient, written))
    }

    /// Lends the gradients of several parameters at once, each like [`Backward::gradient`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when a parameter appears twice.
    pub fn gradients<const N: usize>(
        &mut self,
        parameters: [Parameter; N],
    ) -> Result<([LentMut<'_, 's>; N], [bool; N])> {
        let step = self.step;
        let (mut gradients, written) = self.gradients_uninit(parameters)?;
        gradients.iter_mut().zip(written).try_for_each(|(gradient, written)| zero_unless(written, step, gradient))?;
        Ok((gradients, written))
    }

    /// Lends a stack's gradients as one tensor, flat like its weights, like [`Backward::gradient`].
    /// The padding between members must stay zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub fn stack_gradient(&mut self, stack: &StackedParameters) -> Result<(LentMut<'_, 's>, bool)> {
        let step = self.step;
        let (mut gradient, written) = self.stack_gradient_uninit(stack)?;
        zero_unless(written, step, &mut gradient)?;
        Ok((gradient, written))
    }

    /// Lends a gradient like [`Backward::gradient`], for an op that overwrites all of it when the
    /// flag is false. The gradient is then not zeroed, and still holds the values of an earlier
    /// update.
    pub fn gradient_uninit(&mut self, parameter: Parameter) -> Result<(LentMut<'_, 's>, bool)> {
        let ([gradient], [written]) = self.gradients_uninit([parameter])?;
        Ok((gradient, written))
    }

    /// Makes a tensor of the op, after `finish` has completed it, the memory of a parameter's
    /// gradient. Returns the tensor unchanged if the gradient has other memory: where gradients are
    /// stored in f32, or for a parameter that has one already.
    pub(crate) fn adopt_gradient(
        &mut self,
        parameter: Parameter,
        mut gradient: Tensor<'s>,
        finish: impl FnOnce(&mut Tensor<'s>) -> Result<()>,
    ) -> Result<Option<Tensor<'s>>> {
        let op = self.op;
        let place = self.parameters.spec().index(parameter).map_err(|error| error.in_op(op))?;
        if self.written[place] {
            return Ok(Some(gradient));
        }
        self.round()?;
        match &mut self.gradients {
            Destination::Stored(gradients) => {
                let GradientParts::Bf16(parts) = gradients.parts(self.step, [parameter])? else {
                    return Ok(Some(gradient));
                };
                finish(&mut gradient)?;
                self.unrounded.extend(parts.into_iter().map(|(stored, _)| stored).zip([gradient]));
            }
            Destination::Consumed(_) => {
                let range = self.parameters.spec().entries()[place].range();
                if !range.len().is_multiple_of(RUN) {
                    return Ok(Some(gradient));
                }
                finish(&mut gradient)?;
                self.held.push((range, gradient));
            }
        }
        self.written[place] = true;
        Ok(None)
    }

    /// Lends a gradient like [`Backward::gradient_uninit`], or returns `None` for a frozen
    /// parameter.
    pub(crate) fn gradient_if_trained(&mut self, parameter: Parameter) -> Result<Option<(LentMut<'_, 's>, bool)>> {
        if self.trains(parameter)? { self.gradient_uninit(parameter).map(Some) } else { Ok(None) }
    }

    /// Lends a stack's gradient like [`Backward::stack_gradient_uninit`], or returns `None` for
    /// frozen parameters.
    pub(crate) fn stack_gradient_if_trained(
        &mut self,
        stack: &StackedParameters,
    ) -> Result<Option<(LentMut<'_, 's>, bool)>> {
        if self.trains_stack(stack)? { self.stack_gradient_uninit(stack).map(Some) } else { Ok(None) }
    }

    /// Lends gradients like [`Backward::gradients`], without zeroing them.
    pub(crate) fn gradients_uninit<const N: usize>(
        &mut self,
        parameters: [Parameter; N],
    ) -> Result<([LentMut<'_, 's>; N], [bool; N])> {
        let op = self.op;
        let spec = self.parameters.spec();
        let places = parameters.iter().map(|&parameter| spec.index(parameter)).collect::<Result<Vec<_>>>();
        let places = places.map_err(|error| error.in_op(op))?;
        let parts = match &mut self.gradients {
            Destination::Stored(gradients) => gradients.parts(self.step, parameters),
            Destination::Consumed(_) => GradientParts::unstored(spec, parameters),
        };
        let parts = parts.map_err(|error| error.in_op(op))?;
        let mut places = places.into_iter();
        let mut write =
            || std::mem::replace(&mut self.written[places.next().expect("there is a place for each output")], true);
        let written = [(); N].map(|()| write());
        let mut gradients = self.lend(parts, &written)?.into_iter();
        Ok((parameters.map(|_| gradients.next().expect("there is a part for each parameter")), written))
    }

    /// Lends a stack's gradient like [`Backward::stack_gradient`], for an op that overwrites all of
    /// it when the flag is false, like [`Backward::gradient_uninit`].
    pub fn stack_gradient_uninit(&mut self, stack: &StackedParameters) -> Result<(LentMut<'_, 's>, bool)> {
        let op = self.op;
        // One write covers all members, so if some are already written, the others are zeroed
        // first.
        let spec = self.parameters.spec();
        let places = stack.members().iter().map(|member| spec.index(*member)).collect::<Result<Vec<_>>>();
        let places = places.map_err(|error| error.in_op(op))?;
        let written = places.iter().any(|&place| self.written[place]);
        for (member, place) in stack.members().iter().zip(places) {
            if written {
                self.gradient(*member)?;
            }
            self.written[place] = true;
        }
        let (part, loads) = match &mut self.gradients {
            // The padding between members is loaded too.
            Destination::Stored(gradients) => (gradients.stack_part(self.step, stack), true),
            Destination::Consumed(_) => (GradientParts::unstored_stack(spec, stack), written),
        };
        let gradient = self.lend(part.map_err(|error| error.in_op(op))?, &[loads])?.remove(0);
        Ok((gradient, written))
    }

    /// Adds `gradient` to the gradient of `var`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when shapes differ, when the variable belongs to another tape, or when it
    /// was made after the running op.
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
                elementary::add_assign(self.step, &mut sum, &gradient)?;
                self.step.free(gradient);
                sum
            }
            // The loss's own op is the first to run.
            Upstream::Nothing | Upstream::Loss(_) => gradient,
        };
        self.pending[output] = Upstream::Sum(S::erase(sum));
        Ok(())
    }

    /// Adds `gradient` to the gradients of two variables, which may be the same.
    pub fn add_to_both<S: Stored>(&mut self, a: &Var<'s, S>, b: &Var<'s, S>, gradient: Tensor<'s, S>) -> Result<()> {
        // There is one gradient tensor. The second variable gets it. The first gets a copy, unless
        // it can add the gradient to its own.
        let (first, second) = if b.wants_gradient() { (a, b) } else { (b, a) };
        if first.wants_gradient() {
            let sum = match self.take(first)? {
                Some(mut grad_in) => elementary::add_assign(self.step, &mut grad_in, &gradient).map(|()| grad_in)?,
                None => elementary::copy(self.step, &gradient)?,
            };
            self.add(first, sum)?;
        }
        self.add(second, gradient)
    }

    /// Takes the gradient of `var` so far, if there is one, for an op whose kernel adds to it in
    /// place. The op must return it with [`Backward::add`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when it was already taken and not returned.
    pub fn take<S: Stored>(&mut self, var: &Var<'s, S>) -> Result<Option<Tensor<'s, S>>> {
        let Some(output) = self.output(var)? else { return Ok(None) };
        if self.taken.contains(&output) {
            return Err(Error::misuse(
                self.op,
                "`add` before a variable's gradient is taken again",
                "the gradient was not returned",
            ));
        }
        match std::mem::replace(&mut self.pending[output], Upstream::Nothing) {
            Upstream::Sum(sum) => {
                self.taken.push(output);
                Ok(Some(of_output(sum)))
            }
            Upstream::Nothing | Upstream::Loss(_) => Ok(None),
        }
    }

    /// Returns an error of the running op unless the variable belongs to the running tape.
    pub(super) fn check<S: Stored>(&self, var: &Var<'s, S>) -> Result<()> {
        check(var, self.op, self.tape)
    }

    /// The variable's output number. Its op must still be to run, or the gradient would be lost.
    fn output<S: Stored>(&self, var: &Var<'s, S>) -> Result<Option<usize>> {
        self.check(var)?;
        match var.output {
            Some(output) if output >= self.pending.len() => {
                Err(Error::misuse(self.op, "a variable made before the running op", "a later variable"))
            }
            output => Ok(output),
        }
    }
}

/// Zeroes a gradient unless this pass has written it.
fn zero_unless<'s>(written: bool, step: &Step<'s>, gradient: &mut LentMut<'_, 's>) -> Result<()> {
    if written { Ok(()) } else { elementary::fill_into(step, gradient, 0.0) }
}
