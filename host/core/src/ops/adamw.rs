//! The AdamW update, for one parameter group and for several. The rule `AdamW` drives it.

use super::same_shape;
use super::shapes::check_rows;
use crate::error::Result;
use crate::params::{LentMasters, LentState, MasterArguments};
use crate::step::Step;
use crate::tensor::{Source, Target};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;
use kernels::adamw as kernel;

/// One AdamW update, in place: `first = first + (1 - beta1) (g - first)`,
/// `second = beta2 second + (1 - beta2) g^2`, `w = w (1 - rate decay) - rate / correction1 * first
/// / (sqrt(second) / sqrt(correction2) + epsilon)`, with
/// `g = gradients * min(1, max_norm / (sqrt(squared_norm) + 1e-6))`.
///
/// `weights`, `gradients`, `first`, `second`: one shape. `hyper`: `[groups, 8]`, the settings of
/// each parameter group, indexed by `kernels::adamw::slot`. `groups`: `[ceil(n / 64)]`, the group
/// of each run of 64 elements; `None` for one group. A group number out of range gives NaN.
/// `squared_norm`: `[1]`. `copy`, of the weights' shape, receives the new weights, each rounded
/// once to BF16. Queued, one launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ.
/// [`Error::Contract`](crate::Error::Contract) when `groups` or `hyper` has a different number of
/// elements.
///
/// Source: Loshchilov and Hutter, 2019, as PyTorch computes it.
#[track_caller]
pub fn adamw<'s>(
    step: &Step<'s>,
    weights: &mut impl Target<'s, f32>,
    mut copy: Option<&mut impl Target<'s, bf16>>,
    gradients: &impl Source<'s, f32>,
    first: &mut impl Target<'s, f32>,
    second: &mut impl Target<'s, f32>,
    hyper: &impl Source<'s, f32>,
    groups: Option<&impl Source<'s, u32>>,
    squared_norm: &impl Source<'s, f32>,
) -> Result<()> {
    for shape in [gradients.shape(), first.shape(), second.shape()] {
        same_shape("adamw", weights.shape(), shape)?;
    }
    if let Some(copy) = &copy {
        same_shape("adamw", weights.shape(), copy.shape())?;
    }
    check_rows("adamw", "hyper", kernel::slot::LEN, hyper)?;
    step.launch(kernel::adamw {
        weights: weights.out(),
        has_bf16: u32::from(copy.is_some()),
        copy: copy.as_mut().map_or_else(PointerMut::empty, |copy| copy.out()),
        gradients: gradients.slice(),
        m: first.out(),
        v: second.out(),
        hyper: hyper.slice(),
        groups: groups.map_or_else(Slice::empty, Source::slice),
        squared_norm: squared_norm.slice(),
    })
}

/// One AdamW update like [`adamw`], of weights or moments that are stored in fewer bytes; see
/// [`MasterType`](crate::MasterType) and [`StateType`](crate::StateType). Both moments have one
/// type. All regions have whole runs of 64 elements. If weights and moments are f32, this is
/// [`adamw`].
///
/// # Errors
/// [`Error::Contract`](crate::Error::Contract) when lengths differ.
#[track_caller]
pub fn adamw_small<'s>(
    step: &Step<'s>,
    weights: LentMasters<'_, 's>,
    gradients: &impl Source<'s, f32>,
    [first, second]: [LentState<'_, 's>; 2],
    hyper: &impl Source<'s, f32>,
    groups: Option<&impl Source<'s, u32>>,
    squared_norm: &impl Source<'s, f32>,
) -> Result<()> {
    let (mut weights, mut first, mut second) = match (weights, first, second) {
        (LentMasters::F32 { mut weights, mut copy }, LentState::F32(mut first), LentState::F32(mut second)) => {
            let (first, second) = (&mut first, &mut second);
            return adamw(step, &mut weights, copy.as_mut(), gradients, first, second, hyper, groups, squared_norm);
        }
        others => others,
    };
    check_rows("adamw", "hyper", kernel::slot::LEN, hyper)?;
    let formats = (weights.stored(), first.stored());
    let MasterArguments { weights, has_bf16, halves, corrections } = weights.arguments();
    step.launch(kernel::adamw_small {
        formats,
        weights,
        has_bf16,
        halves,
        corrections,
        gradients: gradients.slice(),
        m: first.words().out(),
        v: second.words().out(),
        hyper: hyper.slice(),
        groups: groups.map_or_else(Slice::empty, Source::slice),
        squared_norm: squared_norm.slice(),
    })
}
