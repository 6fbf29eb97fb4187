//! An op that is about to be recorded on a tape.
//!
//! Invariant: ops of this library change a tape only through this interface, the same one that
//! other packages use.

use super::backward::{Backward, Record, Upstream};
use super::record::Tape;
use super::var::{AnyVar, Dependence, Var, check};
use crate::elementary;
use crate::error::{Error, Result};
use crate::params::{FrozenType, MatrixWeights, Parameter, StackedParameters};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, Saved, Shape, Stored, Tensor};
use cuda_std::float_mode;
use std::cell::Cell;
use std::fmt;
use std::panic::Location;

/// An op whose variables belong to the tape. It lends weights, and records what the backward pass
/// must do. See [`Tape::op`].
pub struct Op<'o, 't, 's> {
    tape: &'o Tape<'t, 's>,
    name: &'static str,
    /// The line to which memory of its backward pass is attributed.
    site: &'static Location<'static>,
    /// The dependence of its variables and of the weights lent so far.
    dependence: Cell<Dependence>,
}

impl<'t, 's> Tape<'t, 's> {
    /// Begins an op of these variables. Its errors carry its name.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape.
    #[track_caller]
    pub fn op<const N: usize>(&self, name: &'static str, of: [&dyn AnyVar; N]) -> Result<Op<'_, 't, 's>> {
        self.op_of(name, &of)
    }

    /// Begins an op of any number of variables.
    #[track_caller]
    pub(crate) fn op_of(&self, name: &'static str, of: &[&dyn AnyVar]) -> Result<Op<'_, 't, 's>> {
        of.iter().try_for_each(|&var| check(var, name, self.identity))?;
        let dependence = of.iter().map(|var| var.dependence()).max().unwrap_or(Dependence::Unknown);
        Ok(Op { tape: self, name, site: Location::caller(), dependence: Cell::new(dependence) })
    }
}

impl fmt::Debug for Op<'_, '_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op `{}`", self.name)
    }
}

impl<'t, 's> Op<'_, 't, 's> {
    /// Lends the weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on a different device than the step, or the handle belongs
    /// to another parameter spec.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.weights_as(parameter)
    }

    /// Lends the weights of a parameter as S stores them. BF16 comes from the copy that
    /// [`Parameters::with_bf16_copy`](crate::Parameters::with_bf16_copy) makes.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy.
    pub fn weights_as<S: Stored>(&self, parameter: Parameter) -> Result<Lent<'t, 's, S>> {
        let lent = self.tape.parameters.lend_as(self.tape.step, parameter).map_err(|error| error.in_op(self.name))?;
        self.depend_on(&[parameter])?;
        Ok(lent)
    }

    /// Lends the weights of a parameter as S, like [`Op::weights_as`], to an op that passes them to
    /// [`MatrixWeights::free`] when it has queued its launches.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy; [`Error::ArenaFull`] when converted weights have no
    /// room.
    #[track_caller]
    pub fn matrix<S: Stored>(&self, parameter: Parameter) -> Result<MatrixWeights<'t, 's, S>> {
        let matrix = self.tape.parameters.matrix(self.tape.step, parameter).map_err(|error| error.in_op(self.name))?;
        self.depend_on(&[parameter])?;
        Ok(matrix)
    }

    /// Lends a stack's weights from the first member's start to the last member's end, flat.
    /// [`Op::stack`] returns each member's position.
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
        let lent = self.tape.parameters.lend_stack_as(self.tape.step, stack).map_err(|error| error.in_op(self.name))?;
        self.depend_on(stack.members())?;
        Ok(lent)
    }

    /// Notes that the result depends on parameters, all trained or all frozen.
    fn depend_on(&self, parameters: &[Parameter]) -> Result<()> {
        let spec = self.tape.parameters.spec();
        for &parameter in parameters {
            let is_trained = spec.entry(parameter)?.frozen().is_none();
            if is_trained {
                self.tape.note_use(spec.index(parameter)?);
            }
            let by = if is_trained { Dependence::Trained } else { Dependence::Constant };
            self.dependence.set(self.dependence.get().max(by));
        }
        Ok(())
    }

    /// The extents of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn shape(&self, parameter: Parameter) -> Result<Shape> {
        let entry = self.tape.parameters.spec().entry(parameter).map_err(|error| error.in_op(self.name))?;
        Ok(entry.shape())
    }

    /// The type in which a parameter is stored if it is frozen. `None` for a trained parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn frozen(&self, parameter: Parameter) -> Result<Option<FrozenType>> {
        let entry = self.tape.parameters.spec().entry(parameter).map_err(|error| error.in_op(self.name))?;
        Ok(entry.frozen())
    }

    /// True if the weights of a parameter are stored as BF16; see [`ParameterSpec::is_bf16`](crate::ParameterSpec::is_bf16).
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn is_bf16(&self, parameter: Parameter) -> Result<bool> {
        self.tape.parameters.spec().is_bf16(parameter).map_err(|error| error.in_op(self.name))
    }

    /// True unless the op depends on frozen parameters, and on nothing that has a gradient. Then
    /// it is not recorded, its result is a constant, and its backward pass does not run.
    pub(crate) fn is_recorded(&self) -> bool {
        self.dependence.get() != Dependence::Constant
    }

    /// Puts the result of an op without a backward pass on the tape: a constant if it depends on
    /// frozen parameters, and otherwise an input.
    pub(crate) fn unrecorded<S: Stored>(&self, value: Saved<'s, S>) -> Var<'s, S> {
        Var { constant: !self.is_recorded(), ..self.tape.input(value) }
    }

    /// The shape of each member of a stack, and the number of elements from the start of one member
    /// to the start of the next.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec, or the stack has no
    /// members.
    pub fn stack(&self, stack: &StackedParameters) -> Result<(Shape, usize)> {
        self.tape.parameters.spec().stack(stack).map_err(|error| error.in_op(self.name))
    }

    /// Puts the op's output on the tape. `backward` receives the output's gradient. It passes
    /// gradients on to variables with [`Backward::add`] and to parameters with
    /// [`Backward::gradient`]. It does not run if the loss does not depend on the output, or if
    /// nothing that the op depends on has a gradient. The tape knows the op's variables, and the
    /// parameters whose weights the op has lent.
    pub fn record<S: Stored>(
        self,
        value: Saved<'s, S>,
        backward: impl FnOnce(&mut Backward<'_, 't, 's>, Tensor<'s, S>) -> Result<()> + 't,
    ) -> Var<'s, S> {
        let [var] = self.record_all([value], move |back, [gradient]| match gradient {
            Some(gradient) => backward(back, gradient),
            None => Ok(()),
        });
        var
    }

    /// Puts the op's outputs on the tape. `backward` receives the gradient of each, or `None` for
    /// an output on which the loss does not depend. It does not run if the loss depends on none of
    /// them.
    pub fn record_all<S: Stored, const N: usize>(
        self,
        values: [Saved<'s, S>; N],
        backward: impl FnOnce(&mut Backward<'_, 't, 's>, [Option<Tensor<'s, S>>; N]) -> Result<()> + 't,
    ) -> [Var<'s, S>; N] {
        self.push(values, move |back, upstream| {
            let mut gradients = [const { None }; N];
            for ((gradient, upstream), value) in gradients.iter_mut().zip(upstream).zip(values) {
                *gradient = upstream.into_tensor(back.step(), value.shape())?;
            }
            backward(back, gradients)
        })
    }

    /// Puts an output of one element on the tape, with its `derivative` by x, of x's shape, which
    /// is computed in the backward pass. If the output is the loss itself, the derivative is x's
    /// gradient without a multiply.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless the value has one element.
    pub fn record_scalar<S: Stored>(
        self,
        value: Saved<'s>,
        x: &Var<'s, S>,
        derivative: impl FnOnce(&Step<'s>) -> Result<Tensor<'s, S>> + 't,
    ) -> Result<Var<'s>> {
        if value.shape().elements() != 1 {
            return Err(Error::misuse(self.name, "an output of one element", value.shape().to_string()));
        }
        self.record_loss(value, x, 1.0, derivative)
    }

    /// Records a scalar like [`Op::record_scalar`], whose derivative already includes the factor
    /// `included`: that of the tape's [`Tape::of_part`]. If the scalar is the tape's loss, as it
    /// usually is, nothing remains to be multiplied.
    pub fn record_loss<S: Stored>(
        self,
        value: Saved<'s>,
        x: &Var<'s, S>,
        included: f64,
        derivative: impl FnOnce(&Step<'s>) -> Result<Tensor<'s, S>> + 't,
    ) -> Result<Var<'s>> {
        let x = *x;
        let [var] = self.push([value], move |back, [upstream]| {
            let step = back.step();
            let mut derivative = derivative(step)?;
            let scaled = match upstream {
                Upstream::Loss(share) if share == included => None,
                Upstream::Loss(share) => {
                    Some(elementary::scale(step, &derivative, float_mode::in_default(|| (share / included) as f32))?)
                }
                Upstream::Sum(AnyTensor::F32(factor)) => {
                    let factor = factor.reshape([1])?;
                    let factor = match included == 1.0 {
                        true => factor,
                        false => elementary::scale(step, &factor, float_mode::in_default(|| (1.0 / included) as f32))?,
                    };
                    Some(elementary::scale_by(step, &derivative, &factor)?)
                }
                _ => None,
            };
            if let Some(scaled) = scaled {
                step.free(std::mem::replace(&mut derivative, scaled));
            }
            back.add(&x, derivative)
        });
        Ok(var)
    }

    fn push<S: Stored, const N: usize>(
        self,
        values: [Saved<'s, S>; N],
        backward: impl FnOnce(&mut Backward<'_, 't, 's>, [Upstream<'s>; N]) -> Result<()> + 't,
    ) -> [Var<'s, S>; N] {
        let backward = move |back: &mut Backward<'_, 't, 's>, upstream: Vec<Upstream<'s>>| {
            let Ok(upstream) = upstream.try_into() else { unreachable!("as many as there are outputs") };
            backward(back, upstream)
        };
        if !self.is_recorded() {
            return values.map(|value| self.unrecorded(value));
        }
        let Self { tape, name: op, site, .. } = self;
        let shape = values.first().map_or_else(|| [0].into(), Saved::shape);
        let mut output = tape.push(N, |first| Record { op, site, first, shape, backward: Box::new(backward) })..;
        values.map(|value| tape.var(value, output.next()))
    }
}
