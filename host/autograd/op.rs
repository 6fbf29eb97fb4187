//! An op on its way to a tape.
//!
//! Invariant: whatever an op of the library does to a tape it does through this, as an op of another package does.

use super::backward::{Backward, Record, Upstream};
use super::tape::Tape;
use super::var::{AnyVar, Var, check};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::{Parameter, Stack};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, Saved, Shape, Stored, Tensor};
use std::fmt;
use std::panic::Location;

/// An op whose variables were found to be the tape's: lends weights, and records what backward must do. See [`Tape::op`].
pub struct Op<'o, 't, 's> {
    tape: &'o Tape<'t, 's>,
    name: &'static str,
    /// The line that memory of its backward pass is accounted to.
    site: &'static Location<'static>,
}

impl<'t, 's> Tape<'t, 's> {
    /// Begins an op of these variables; its errors will have its name.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a variable of another tape.
    #[track_caller]
    pub fn op<const N: usize>(&self, name: &'static str, of: [&dyn AnyVar; N]) -> Result<Op<'_, 't, 's>> {
        of.into_iter().try_for_each(|var| check(var, name, self.identity))?;
        Ok(Op { tape: self, name, site: Location::caller() })
    }
}

impl fmt::Debug for Op<'_, '_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op `{}`", self.name)
    }
}

impl<'t, 's> Op<'_, 't, 's> {
    /// The weights of a parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device than the step, or the handle is another layout's.
    pub fn weights(&self, parameter: Parameter) -> Result<Lent<'t, 's>> {
        self.weights_as(parameter)
    }

    /// The weights of a parameter as S stores them: of BF16, from the copy that [`Parameters::with_bf16_copy`](crate::Parameters::with_bf16_copy) makes.
    ///
    /// # Errors
    /// As for [`Op::weights`]; [`Error::Misuse`] when there is no copy.
    pub fn weights_as<S: Stored>(&self, parameter: Parameter) -> Result<Lent<'t, 's, S>> {
        self.tape.parameters.lend_as(self.tape.step, parameter).map_err(|error| error.in_op(self.name))
    }

    /// A stack's weights from the first member's start to the last one's end, flat; [`Op::stack`] tells where each stands.
    ///
    /// # Errors
    /// As for [`Op::weights`]; [`Error::Misuse`] for a stack without members.
    pub fn stack_weights(&self, stack: &Stack) -> Result<Lent<'t, 's>> {
        self.stack_weights_as(stack)
    }

    /// A stack's weights as S stores them, flat.
    ///
    /// # Errors
    /// As for [`Op::stack_weights`]; [`Error::Misuse`] when there is no copy.
    pub fn stack_weights_as<S: Stored>(&self, stack: &Stack) -> Result<Lent<'t, 's, S>> {
        self.tape.parameters.lend_stack_as(self.tape.step, stack).map_err(|error| error.in_op(self.name))
    }

    /// The shape of each member of a stack, and the elements from one's start to the next one's.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's, or has no members.
    pub fn stack(&self, stack: &Stack) -> Result<(Shape, usize)> {
        self.tape.parameters.layout().stack(stack).map_err(|error| error.in_op(self.name))
    }

    /// Puts the op's output on the tape. `backward` gets the output's gradient and gives variables theirs, by
    /// [`Backward::add`], and parameters, by [`Backward::gradient`]. It does not run where the loss does not depend on the output.
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

    /// Puts the op's outputs on the tape. `backward` gets the gradient of each, none for one on which the loss does not depend; it does
    /// not run where that is so of all.
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

    /// Puts an output of one element on the tape by its `derivative` by x, of x's shape, which is made in the backward pass. Where the
    /// output is the loss itself, that is x's gradient; nothing multiplies it.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a value of more or fewer elements.
    pub fn record_scalar<S: Stored>(
        self,
        value: Saved<'s>,
        x: &Var<'s, S>,
        derivative: impl FnOnce(&Step<'s>) -> Result<Tensor<'s, S>> + 't,
    ) -> Result<Var<'s>> {
        if value.shape().elements() != 1 {
            return Err(Error::misuse(self.name, "an output of one element", value.shape().to_string()));
        }
        let x = *x;
        let [var] = self.push([value], move |back, [upstream]| {
            let derivative = derivative(back.step())?;
            let gradient = match upstream {
                Upstream::Sum(AnyTensor::F32(factor)) => {
                    let scaled = ops::scale_by(back.step(), &derivative, &factor.reshape([1])?)?;
                    back.step().give_back(derivative);
                    scaled
                }
                _ => derivative,
            };
            back.add(&x, gradient)
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
        let Self { tape, name: op, site } = self;
        let shape = values.first().map_or_else(|| [0].into(), Saved::shape);
        let mut output = tape.push(N, |first| Record { op, site, first, shape, backward: Box::new(backward) })..;
        values.map(|value| Var { value, tape: tape.identity, output: output.next() })
    }
}
