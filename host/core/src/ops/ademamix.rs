//! The AdEMAMix update, for one parameter group and for several. The rule `AdEmaMix` drives it.

use super::same_shape;
use super::shapes::check_rows;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;
use kernels::ademamix as kernel;

/// One AdEMAMix update, in place: that of [`adamw`](super::adamw()) with another momentum,
/// `slow = slow + (1 - beta3) (g - slow)`, and `first + alpha correction1 slow` instead of `first`
/// in the step of the weights.
///
/// `weights`, `gradients` and the three moments, `first`, `slow` and `second`: one shape. `hyper`:
/// `[groups, 10]`, the settings of each parameter group, indexed by `kernels::ademamix::slot`.
/// `groups`, `squared_norm` and `copy` are those of [`adamw`](super::adamw()). Queued, one launch;
/// no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ.
/// [`Error::Contract`](crate::Error::Contract) when `groups` or `hyper` has a different number of
/// elements.
///
/// Source: Pagliardini, Ablin and Grangier, 2024, arXiv:2409.03137.
#[track_caller]
pub fn ademamix<'s>(
    step: &Step<'s>,
    weights: &mut impl Target<'s, f32>,
    mut copy: Option<&mut impl Target<'s, bf16>>,
    gradients: &impl Source<'s, f32>,
    [first, slow, second]: [&mut impl Target<'s, f32>; 3],
    hyper: &impl Source<'s, f32>,
    groups: Option<&impl Source<'s, u32>>,
    squared_norm: &impl Source<'s, f32>,
) -> Result<()> {
    for shape in [gradients.shape(), first.shape(), slow.shape(), second.shape()] {
        same_shape("ademamix", weights.shape(), shape)?;
    }
    if let Some(copy) = &copy {
        same_shape("ademamix", weights.shape(), copy.shape())?;
    }
    check_rows("ademamix", "hyper", kernel::slot::LEN, hyper)?;
    step.launch(kernel::ademamix {
        weights: weights.out(),
        has_bf16: u32::from(copy.is_some()),
        copy: copy.as_mut().map_or_else(PointerMut::empty, |copy| copy.out()),
        gradients: gradients.slice(),
        m: first.out(),
        slow: slow.out(),
        v: second.out(),
        hyper: hyper.slice(),
        groups: groups.map_or_else(Slice::empty, Source::slice),
        squared_norm: squared_norm.slice(),
    })
}
