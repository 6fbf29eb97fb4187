//! What an optimiser does of its own: one trait, for those of the library and for anyone's.
//!
//! Invariant: a rule has no state but its settings, and queues the same launches whenever it is asked: all that changes from update to
//! update lies on the device, in memory that [`Optimizer`](super::Optimizer) owns.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Tensor};
use half::bf16;

/// How an optimiser updates weights. Its settings implement it: [`AdamWConfig`](crate::AdamWConfig), [`SgdConfig`](crate::SgdConfig), or
/// a struct of yours; [`Optimizer`](crate::Optimizer) does the rest.
///
/// ```
/// use stepscope::*;
///
/// /// Gradient descent, made of ops.
/// struct Descent {
///     rate: f32,
/// }
///
/// impl UpdateRule for Descent {
///     fn name(&self) -> &'static str {
///         "descent"
///     }
///
///     fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
///         Some(vec![("rate", format!("{:?}", self.rate))])
///     }
///
///     fn settings(&self, number: u64, _: &ParameterGroup) -> Vec<f32> {
///         vec![-self.rate / (number as f32).sqrt()]
///     }
///
///     fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
///         let change = ops::scale_by(step, &arguments.gradients, &arguments.settings)?;
///         ops::add_assign(step, &mut arguments.weights, &change)
///     }
/// }
/// # fn main() -> Result<()> {
/// # let device = Device::open(DeviceKind::Emulated)?;
/// # let mut layout = Layout::builder();
/// # let w = layout.add("w", [3], Initializer::ONE);
/// # let mut weights = Parameters::new(&device, &layout.build()?, 7)?;
/// # let mut gradients = Gradients::zeros(&weights)?;
/// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let mut optimizer = Optimizer::new(&weights, Descent { rate: 0.5 })?;
/// optimizer.advance()?;
/// arena.step(|step| {
///     ops::fill_into(step, &mut gradients.lend_mut(step, w)?, 1.0)?;
///     optimizer.apply(step, &mut weights, &gradients)
/// })?;
/// assert_eq!(weights.read(w)?, [0.5; 3]);
/// # Ok(())
/// # }
/// ```
pub trait UpdateRule: 'static {
    /// What it is called in errors and in checkpoints: `adamw`. An optimiser calls this, `state`,
    /// `has_groups` and `writes_copy` once, when it is made.
    fn name(&self) -> &'static str;

    /// An error for a setting out of range.
    ///
    /// # Errors
    /// [`Error::Misuse`] that names the setting.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The names of what it keeps for each weight from update to update, as moments are: regions of the weights' layout, zero before
    /// the first update. A checkpoint has the one of parameter `w` as `adamw.first.w`.
    fn state(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether [`UpdateRule::queue`] heeds [`UpdateArguments::groups`]. If not, there is one group.
    /// If this is true and no launch reads them, the update is [`Error::Misuse`].
    fn has_groups(&self) -> bool {
        false
    }

    /// Whether [`UpdateRule::queue`] writes [`UpdateArguments::copy`]. If not, it gets none, and [`Optimizer`](crate::Optimizer) queues a
    /// launch behind it that rounds all weights. If this is true and a part is not written, the
    /// update is [`Error::Misuse`].
    fn writes_copy(&self) -> bool {
        false
    }

    /// All settings by which two rules of this name may differ, as names and values: those that
    /// [`UpdateRule::settings`] and [`UpdateRule::queue`] use, with the whole schedule. The ranks
    /// of a group compare them before the first update. Values of `f32` that `{:?}` writes are as
    /// exact as the number.
    ///
    /// None: the rule does not give them, and a group of several ranks refuses it. That is the
    /// default, unless the rule is a type without data, which has no settings.
    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        (size_of_val(self) == 0).then(Vec::new)
    }

    /// What changes from update to update, such as the rate, for update `number`, counted from 1,
    /// of a group: at least one number, always as many, and all finite. They are on the device when
    /// the update runs.
    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32>;

    /// Queues an update. It does the same each time: where it is captured, it is called once and replayed for each update. In a group of
    /// several ranks it is called for each slice of the weights that its rank updates.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()>;
}

/// What an update reads and writes: flat regions of one layout, and what [`UpdateRule::settings`] has said of it.
#[derive(Debug)]
#[non_exhaustive]
pub struct UpdateArguments<'b, 's> {
    /// All weights: keep the space between parameters zero.
    pub weights: LentMut<'b, 's>,
    /// The BF16 copy of the weights, if these have one and [`UpdateRule::writes_copy`] is true: write each new weight to it, rounded.
    pub copy: Option<LentMut<'b, 's, bf16>>,
    /// All gradients, not clipped.
    pub gradients: Lent<'b, 's>,
    /// What [`UpdateRule::state`] names, in its order.
    pub state: Vec<LentMut<'b, 's>>,
    /// The settings of the update: `[settings]`; if there are several groups,
    /// `[groups, settings]`.
    pub settings: Lent<'b, 's>,
    /// The group of each run of 64 elements, if there are several groups.
    pub groups: Option<Lent<'b, 's, u32>>,
    /// The squared L2 norm of all gradients together, `[1]`. [`ops::clip_factor`](crate::ops::clip_factor) makes of it what clips them.
    pub squared_norm: &'b Tensor<'s>,
}

/// The state that a rule queues its updates with, which may be that of another rule around it.
///
/// # Errors
/// [`Error::Misuse`] for another number of parts than the rule has.
pub(super) fn expect_state<'b, 's, const N: usize>(
    op: &'static str,
    names: &[&str],
    state: Vec<LentMut<'b, 's>>,
) -> Result<[LentMut<'b, 's>; N]> {
    state.try_into().map_err(|state: Vec<_>| {
        let expected = format!("the state {names:?}: a rule that wraps this one returns the same from `state`");
        Error::misuse(op, expected, format!("{} parts", state.len()))
    })
}
