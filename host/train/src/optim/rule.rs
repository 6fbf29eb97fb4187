//! The rule-specific part of an optimizer: one trait for the library's rules and for user-defined
//! ones.
//!
//! Invariant: a rule has no state except its settings, and queues the same launches every time.
//! Everything that changes from update to update is on the device, in memory that
//! [`Optimizer`](super::Optimizer) owns.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use half::bf16;
use std::ops::Range;
use stepscope_core::{Error, Lent, LentMasters, LentMut, LentState, ParameterEntry, Result, Step, Tensor};

/// A rule by which an optimizer updates weights, with its settings: [`AdamW`](crate::AdamW),
/// [`Sgd`](crate::Sgd), or a struct of yours. [`Optimizer`](crate::Optimizer) does the rest.
///
/// ```
/// use stepscope::ops;
/// use stepscope::optim::{ParameterGroup, UpdateArguments, UpdateRule};
/// use stepscope::parameters::Initializer;
/// use stepscope::prelude::*;
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
/// # let mut spec = ParameterSpec::builder();
/// # let w = spec.add("w", [3], Initializer::ONE);
/// # let mut weights = Parameters::new(&device, &spec.build()?, 7)?;
/// # let mut gradients = Gradients::zeros(&weights)?;
/// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let mut optimizer = Optimizer::new(&weights, Descent { rate: 0.5 })?;
/// let ticket = optimizer.advance()?;
/// arena.step(|step| {
///     ops::fill_into(step, &mut gradients.lend_mut(step, w)?, 1.0)?;
///     optimizer.apply(ticket, step, &mut weights, &gradients)
/// })?;
/// assert_eq!(weights.read(w)?, [0.5; 3]);
/// # Ok(())
/// # }
/// ```
pub trait UpdateRule: 'static {
    /// The rule's name in errors and in checkpoints, such as `adamw`. An optimizer calls this,
    /// `state`, `has_groups`, `writes_copy` and `needs_whole_parameters` once, when it is made.
    fn name(&self) -> &'static str;

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Misuse`], which names the setting that is out of range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The names of the values that the rule keeps for each weight between updates, such as
    /// moments. Each name is a region with the weights' positions, zero before the first update. A
    /// checkpoint stores the region of parameter `w` under a name such as `adamw.first.w`.
    fn state(&self) -> &'static [&'static str] {
        &[]
    }

    /// True if [`UpdateRule::queue`] uses [`UpdateArguments::groups`], or
    /// [`WholeParameter::group`]. If false, there is only one group. If true and no launch reads
    /// the groups that were given, the update is [`Error::Misuse`].
    fn has_groups(&self) -> bool {
        false
    }

    /// True if [`UpdateRule::queue`] writes [`UpdateArguments::copy`]. If false, `queue` receives
    /// no copy, and [`Optimizer`](crate::Optimizer) queues another launch that rounds all weights.
    /// If true and a part is not written, the update is [`Error::Misuse`].
    fn writes_copy(&self) -> bool {
        false
    }

    /// True if [`UpdateRule::queue`] uses [`UpdateArguments::parameters`], because it updates a
    /// parameter as a whole. In a group of several ranks, each rank then updates whole parameters.
    /// Such an update may use matrix instructions, so ranks compare their compute capability.
    /// Gradients in BF16, which are updated in pieces, are refused.
    fn needs_whole_parameters(&self) -> bool {
        false
    }

    /// All settings in which two rules of this name may differ, as names and values. They are the
    /// ones that [`UpdateRule::settings`] and [`UpdateRule::queue`] use, including the whole
    /// schedule. The ranks of a group compare them before the first update. An `f32` formatted with
    /// `{:?}` is exact.
    ///
    /// `None` means that the rule does not provide them, and a group of several ranks rejects it.
    /// That is the default, unless the rule is a type without data, which has no settings.
    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        (size_of_val(self) == 0).then(Vec::new)
    }

    /// Returns the values that change from update to update, such as the rate, for update `number`,
    /// counted from 1, and a group. There is at least one value, the count is always the same, and
    /// all are finite. They are on the device when the update runs.
    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32>;

    /// Queues an update. It must do the same each time: in a captured step it is called once and
    /// replayed for each update. In a group of several ranks it is called for each slice of the
    /// weights that its rank updates, which has whole parameters only if
    /// [`UpdateRule::needs_whole_parameters`] is true.
    #[track_caller]
    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()>;

    /// Queues an update like [`UpdateRule::queue`], of weights or state that are not stored in f32.
    /// The default refuses them. Write all parts of the weights, a BF16 copy too.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a rule without this method.
    #[track_caller]
    fn queue_small<'s>(&self, _: &Step<'s>, arguments: SmallUpdateArguments<'_, 's>) -> Result<()> {
        let stored: Vec<_> = arguments.state.iter().map(LentState::stored).collect();
        let got = format!("{:?} masters and the state {stored:?}", arguments.weights.stored());
        Err(Error::misuse(self.name(), "weights and state in f32, because the rule has no `queue_small`", got))
    }
}

/// The memory that an update reads and writes, like [`UpdateArguments`], in any type.
#[derive(Debug)]
#[non_exhaustive]
pub struct SmallUpdateArguments<'b, 's> {
    /// All weights. Keep the padding between parameters zero.
    pub weights: LentMasters<'b, 's>,
    /// All gradients, before clipping.
    pub gradients: Lent<'b, 's>,
    /// The regions that [`UpdateRule::state`] names, in the same order.
    pub state: Vec<LentState<'b, 's>>,
    /// The settings of the update, as in [`UpdateArguments::settings`].
    pub settings: Lent<'b, 's>,
    /// The group of each run of 64 elements, if there are several groups.
    pub groups: Option<Lent<'b, 's, u32>>,
    /// The squared L2 norm of all gradients together, `[1]`.
    pub squared_norm: &'b Tensor<'s>,
}

/// The memory that an update reads and writes: flat regions of one parameter spec, and the values
/// of [`UpdateRule::settings`].
#[derive(Debug)]
#[non_exhaustive]
pub struct UpdateArguments<'b, 's> {
    /// All weights. Keep the padding between parameters zero.
    pub weights: LentMut<'b, 's>,
    /// The BF16 copy of the weights, if there is one and [`UpdateRule::writes_copy`] is true. Write
    /// each new weight to it, rounded.
    pub copy: Option<LentMut<'b, 's, bf16>>,
    /// True if the weights have a BF16 copy, which products read. In a group of ranks the rule does
    /// not write it.
    pub has_copy: bool,
    /// All gradients, before clipping.
    pub gradients: Lent<'b, 's>,
    /// The regions that [`UpdateRule::state`] names, in the same order.
    pub state: Vec<LentMut<'b, 's>>,
    /// The settings of the update: `[settings]`, or `[groups, settings]` if there are several
    /// groups.
    pub settings: Lent<'b, 's>,
    /// The group of each run of 64 elements, if there are several groups. A rule that needs whole
    /// parameters finds it in [`WholeParameter::group`] instead.
    pub groups: Option<Lent<'b, 's, u32>>,
    /// The squared L2 norm of all gradients together, `[1]`.
    /// [`ops::clip_factor`](stepscope_core::ops::clip_factor) turns it into the clipping factor.
    pub squared_norm: &'b Tensor<'s>,
    /// The parameters in these regions, ascending, if [`UpdateRule::needs_whole_parameters`] is
    /// true.
    pub parameters: Vec<WholeParameter<'b>>,
}

/// A parameter that is whole in the regions of an update.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WholeParameter<'b> {
    /// Its name and shape.
    pub entry: &'b ParameterEntry,
    /// The indices of its elements in the regions. The first is a multiple of 64, and zeros follow
    /// the last up to the next parameter.
    pub elements: Range<usize>,
    /// The number of its group, which is a row of the settings.
    pub group: usize,
}

impl<'s> UpdateArguments<'_, 's> {
    /// Lends the regions' elements in this range, without their groups and parameters.
    pub(super) fn part(&mut self, elements: Range<usize>) -> UpdateArguments<'_, 's> {
        UpdateArguments {
            weights: self.weights.part_mut(elements.clone()),
            copy: self.copy.as_mut().map(|copy| copy.part_mut(elements.clone())),
            has_copy: self.has_copy,
            gradients: self.gradients.part(elements.clone()),
            state: self.state.iter_mut().map(|state| state.part_mut(elements.clone())).collect(),
            settings: self.settings,
            groups: None,
            squared_norm: self.squared_norm,
            parameters: Vec::new(),
        }
    }
}

/// Returns the parts of a rule's state. A wrapping rule may have passed them on.
///
/// # Errors
/// [`Error::Misuse`] unless there are as many parts as the rule has.
pub(super) fn expect_state<S, const N: usize>(op: &'static str, names: &[&str], state: Vec<S>) -> Result<[S; N]> {
    state.try_into().map_err(|state: Vec<_>| {
        let expected = format!("the state {names:?}: a rule that wraps this one returns the same from `state`");
        Error::misuse(op, expected, format!("{} parts", state.len()))
    })
}
