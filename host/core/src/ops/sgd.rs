//! The update of SGD with momentum, for one parameter group and for several. The rule `Sgd` drives
//! it.

use super::same_shape;
use super::shapes::check_rows;
use crate::error::Result;
use crate::params::{LentMasters, LentState, MasterArguments};
use crate::step::Step;
use crate::tensor::{Source, Target};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;
use kernels::sgd as kernel;

/// One update of SGD with momentum, in place: `velocity = momentum velocity + g`,
/// `w = w - rate velocity` or, with Nesterov's momentum, `w = w - rate (g + momentum velocity)`,
/// with `g = gradients * min(1, max_norm / (sqrt(squared_norm) + 1e-6)) + decay w`.
///
/// `weights`, `gradients`, `velocity`: one shape. `hyper`: `[groups, 5]`, the settings of each
/// parameter group, indexed by `kernels::sgd::slot`. `groups`: `[ceil(n / 64)]`, the group of each
/// run of 64 elements; `None` for one group. A group number out of range gives NaN.
/// `squared_norm`: `[1]`. `copy`, of the weights' shape, receives the new weights, each rounded
/// once to BF16. Queued, one launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ.
/// [`Error::Contract`](crate::Error::Contract) when `groups` or `hyper` has a different number of
/// elements.
///
/// Source: PyTorch's SGD with a dampening of 0.
#[track_caller]
pub fn sgd<'s>(
    step: &Step<'s>,
    weights: &mut impl Target<'s, f32>,
    mut copy: Option<&mut impl Target<'s, bf16>>,
    gradients: &impl Source<'s, f32>,
    velocity: &mut impl Target<'s, f32>,
    hyper: &impl Source<'s, f32>,
    groups: Option<&impl Source<'s, u32>>,
    squared_norm: &impl Source<'s, f32>,
) -> Result<()> {
    for shape in [gradients.shape(), velocity.shape()] {
        same_shape("sgd", weights.shape(), shape)?;
    }
    if let Some(copy) = &copy {
        same_shape("sgd", weights.shape(), copy.shape())?;
    }
    check_rows("sgd", "hyper", kernel::slot::LEN, hyper)?;
    step.launch(kernel::sgd {
        weights: weights.out(),
        has_bf16: u32::from(copy.is_some()),
        copy: copy.as_mut().map_or_else(PointerMut::empty, |copy| copy.out()),
        gradients: gradients.slice(),
        velocity: velocity.out(),
        hyper: hyper.slice(),
        groups: groups.map_or_else(Slice::empty, Source::slice),
        squared_norm: squared_norm.slice(),
    })
}

/// One update like [`sgd`], of weights or a velocity that are stored in fewer bytes; see
/// [`MasterType`](crate::MasterType) and [`StateType`](crate::StateType). All regions have whole
/// runs of 64 elements. If both are f32, this is [`sgd`].
///
/// # Errors
/// [`Error::Contract`](crate::Error::Contract) when lengths differ.
#[track_caller]
pub fn sgd_small<'s>(
    step: &Step<'s>,
    weights: LentMasters<'_, 's>,
    gradients: &impl Source<'s, f32>,
    velocity: LentState<'_, 's>,
    hyper: &impl Source<'s, f32>,
    groups: Option<&impl Source<'s, u32>>,
    squared_norm: &impl Source<'s, f32>,
) -> Result<()> {
    let (mut weights, mut velocity) = match (weights, velocity) {
        (LentMasters::F32 { mut weights, mut copy }, LentState::F32(mut velocity)) => {
            let velocity = &mut velocity;
            return sgd(step, &mut weights, copy.as_mut(), gradients, velocity, hyper, groups, squared_norm);
        }
        others => others,
    };
    check_rows("sgd", "hyper", kernel::slot::LEN, hyper)?;
    let formats = (weights.stored(), velocity.stored());
    let MasterArguments { weights, has_bf16, halves, corrections } = weights.arguments();
    step.launch(kernel::sgd_small {
        formats,
        weights,
        has_bf16,
        halves,
        corrections,
        gradients: gradients.slice(),
        velocity: velocity.words().out(),
        hyper: hyper.slice(),
        groups: groups.map_or_else(Slice::empty, Source::slice),
        squared_norm: squared_norm.slice(),
    })
}
