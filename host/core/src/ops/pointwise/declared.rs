//! Pointwise ops that another package has declared with `kernels::pointwise_op!`.
//!
//! Invariant: the value and each gradient are one launch, apart from the sum over extents along
//! which an operand repeats.

use super::{Gradient, Term, apply};
use crate::error::Result;
use crate::ops::broadcast::{Operand, broadcast, layout};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{Stored, Target, Tensor};
use cuda_std::launch::Contract;
use kernels::pointwise_op::{Launch, PointwiseOp, WORDS};

/// Applies an op that `kernels::pointwise_op!` has declared to variables and numbers, which
/// broadcast.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) unless one of the operands is a variable and their
/// shapes broadcast; [`Error::ArenaFull`](crate::Error::ArenaFull); on a GPU, an error with the
/// kernel's name if the device was opened without the package's kernels.
#[track_caller]
pub fn pointwise_op<'s, S: Stored, P: PointwiseOp<N>, const N: usize>(
    _: P,
    operands: [Term<'s, S>; N],
) -> Result<Var<'s, S>> {
    let of = |number| if P::has_gradient(number) { Gradient::Of(gradient::<S, P, N>) } else { Gradient::None };
    apply(P::NAME, operands, value::<S, P, N>, std::array::from_fn(of))
}

fn value<'s, S: Stored, P: PointwiseOp<N>, const N: usize>(
    step: &Step<'s>,
    operands: [Operand<'_, 's, S>; N],
) -> Result<Tensor<'s, S>> {
    launched::<S, P, N>(step, None, operands, Operand::from(0.0))
}

fn gradient<'s, S: Stored, P: PointwiseOp<N>, const N: usize>(
    step: &Step<'s>,
    number: usize,
    operands: [Operand<'_, 's, S>; N],
    [_, dy]: [Operand<'_, 's, S>; 2],
) -> Result<Tensor<'s, S>> {
    launched::<S, P, N>(step, Some(number), operands, dy)
}

/// The operands of a launch: at most three, and the gradient of the result.
const OPERANDS: usize = 4;

fn launched<'s, S: Stored, P: PointwiseOp<N>, const N: usize>(
    step: &Step<'s>,
    gradient_of: Option<usize>,
    operands: [Operand<'_, 's, S>; N],
    dy: Operand<'_, 's, S>,
) -> Result<Tensor<'s, S>> {
    const { assert!(N < OPERANDS, "a pointwise op has one to three operands") };
    let mut all = [Operand::from(0.0); OPERANDS];
    all[..N].copy_from_slice(&operands);
    all[N] = dy;
    let shape = broadcast(P::NAME, &all.map(|operand| operand.shape()))?;
    let mut out = step.empty(shape)?;
    if shape.elements() > 0 {
        let layout: ([usize; WORDS], usize) = (layout(shape, &all), shape.elements());
        let slices = operands.map(|operand| operand.slice());
        let launched = P::launch(gradient_of, slices, dy.slice(), layout, out.out(), In(step));
        launched.expect("an operand with a gradient")?;
    }
    Ok(out)
}

/// The step in which a kernel is launched.
struct In<'r, 's>(&'r Step<'s>);

impl Launch for In<'_, '_> {
    type Result = Result<()>;

    #[track_caller]
    fn launch<K: Contract>(self, kernel: K) -> Result<()> {
        self.0.launch(kernel)
    }
}
