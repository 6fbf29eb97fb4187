//! Muon: the orthogonalized momentum of each matrix, and AdamW for all other parameters.
//!
//! Invariant: every element of the regions is updated once, either as part of a matrix or by AdamW.

#![forbid(unsafe_code)]

use super::adamw::AdamW;
use super::parameter_groups::ParameterGroup;
use super::range::expect;
use super::rule::{UpdateArguments, UpdateRule, WholeParameter, expect_state};
use super::schedule::Schedule;
use super::sgd::Sgd;
use kernels::update::RUN;
use kernels::{adamw, sgd};
use std::ops::Range;
use stepscope_core::{Error, Lent, ParameterEntry, Result, Source, Step, Tensor, bf16, ops};

/// The root mean square of the change of a matrix for a rate of 1, which is that of AdamW's typical
/// updates.
const RMS: f32 = 0.2;

/// Muon (Jordan et al., 2024), scaled to AdamW's updates (Liu et al., 2025,
/// [arXiv 2502.16982](https://arxiv.org/abs/2502.16982)). An [`Optimizer`](crate::Optimizer)
/// applies it.
///
/// It updates each trained matrix W that is not a table as follows. G is the clipped gradient:
///
/// ```text
/// M = momentum M + G
/// D = G + momentum M                           D = M without Nesterov's momentum
/// O = 0.2 sqrt(max(rows, columns)) U V^T       about, where D = U S V^T
/// W = W (1 - rate weight_decay) - rate O
/// ```
/// [`ops::orthogonalize_assign`] computes O, by products of BF16 tensors if the weights have a BF16
/// copy, otherwise of f32, and states the order of its sums. A parameter that
/// consists of several matrices, such as q, k and v, has one O for each; see
/// [`ParameterSpecBuilder::matrices`](stepscope_core::ParameterSpecBuilder::matrices). AdamW updates
/// tables, parameters of another number of extents, and the matrices in `except`.
///
/// The rate, the weight decay, the clipping and the schedule of `adamw` apply to all parameters, so
/// the settings of a run with AdamW can be used. [`ParameterGroups`](crate::ParameterGroups) apply
/// too. The bits are the same in every run, and on different devices those of the products are as
/// [`matmul`](ops::matmul) promises.
///
/// ```
/// use stepscope::optim::Muon;
/// use stepscope::parameters::Initializer;
/// use stepscope::prelude::*;
///
/// # fn main() -> Result<()> {
/// # let device = Device::open(DeviceKind::Emulated)?;
/// # let mut spec = ParameterSpec::builder();
/// # spec.add("w", [4, 3], Initializer::fan_in(4));
/// # let weights = Parameters::new(&device, &spec.build()?, 7)?;
/// let adamw = AdamW { learning_rate: 2e-3, weight_decay: 0.1, ..AdamW::default() };
/// let optimizer = Optimizer::new(&weights, Muon { adamw, except: vec!["head.".into()], ..Muon::default() })?;
/// # Ok(())
/// # }
/// ```
///
/// The state of a matrix is M, in `first`. Its `second` stays zero. Split masters, state in 8 bits
/// and gradients in BF16 are refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Muon {
    /// The rule of the other parameters, whose rate, weight decay, clipping and schedule apply to
    /// matrices too.
    pub adamw: AdamW,
    /// The fraction of M that is kept from update to update.
    pub momentum: f32,
    /// True for Nesterov's momentum. It requires a momentum above 0.
    pub nesterov: bool,
    /// The beginnings of the names of matrices that AdamW updates, such as `head.`. A head that is
    /// a table needs no name here.
    pub except: Vec<String>,
}

impl Default for Muon {
    fn default() -> Self {
        Self { adamw: AdamW::default(), momentum: 0.95, nesterov: true, except: Vec::new() }
    }
}

impl Muon {
    /// Returns the rows and columns of a parameter that is updated as a matrix.
    fn matrix(&self, entry: &ParameterEntry) -> Option<[usize; 2]> {
        let is_excepted = || self.except.iter().any(|start| entry.name().starts_with(&**start));
        match *entry.shape().extents() {
            [rows, cols] if !entry.is_table() && !is_excepted() => Some([rows, cols]),
            _ => None,
        }
    }

    /// Returns the rule whose update of zeros by the gradient is D, and whose velocity is M.
    fn direction(&self) -> Sgd {
        let Self { adamw: AdamW { clip, .. }, momentum, nesterov, .. } = *self;
        let (weight_decay, schedule) = (0.0, Schedule::default());
        Sgd { learning_rate: -1.0, momentum, nesterov, weight_decay, clip, schedule }
    }

    /// Returns the rule that updates W by O as its gradient.
    fn step(&self) -> Sgd {
        let AdamW { learning_rate, weight_decay, schedule, .. } = self.adamw;
        Sgd { learning_rate, weight_decay, schedule, ..Sgd::default() }
    }
}

impl UpdateRule for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn check(&self) -> Result<()> {
        let Self { adamw, momentum, nesterov, except: _ } = self;
        adamw.check()?;
        expect("muon", "momentum", momentum, (0.0..1.0).contains(momentum), "in [0, 1)")?;
        expect("muon", "momentum", momentum, *momentum > 0.0 || !nesterov, "above 0 with `nesterov`")
    }

    fn state(&self) -> &'static [&'static str] {
        &["first", "second"]
    }

    fn has_groups(&self) -> bool {
        true
    }

    fn writes_copy(&self) -> bool {
        true
    }

    fn needs_whole_parameters(&self) -> bool {
        true
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        // Destructures every field, so that a new field does not compile until it is listed here.
        let Self { adamw, momentum, nesterov, except } = self;
        let mut all = adamw.configuration()?;
        all.extend([
            ("momentum", format!("{momentum:?}")),
            ("nesterov", format!("{nesterov:?}")),
            ("except", format!("{except:?}")),
        ]);
        Some(all)
    }

    /// Returns the settings of AdamW, of D and of the step, each in its place of a `Slot`.
    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        let direction = self.direction().settings(number, &ParameterGroup::default());
        let mut slot = vec![0.0; Slot::LEN];
        slot[Slot::ADAMW].copy_from_slice(&self.adamw.settings(number, group));
        slot[Slot::DIRECTION].copy_from_slice(&direction);
        slot[Slot::STEP].copy_from_slice(&self.step().settings(number, group));
        slot
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let parameters = std::mem::take(&mut arguments.parameters);
        let all = arguments.weights.shape().elements();
        let given: usize = parameters.iter().map(|whole| whole.elements.len().next_multiple_of(RUN)).sum();
        if given != all {
            let expected = "all parameters of the regions: a rule that wraps this one returns the same from \
                            `needs_whole_parameters`";
            return Err(Error::misuse("muon", expected, format!("those of {given} of {all} elements")));
        }
        // Neighbors of one group are updated by one launch of AdamW.
        let mut others: Option<(Range<usize>, usize)> = None;
        for WholeParameter { entry, elements, group } in parameters {
            let elements = elements.start..elements.end.next_multiple_of(RUN);
            match (self.matrix(entry), &mut others) {
                (None, Some((before, of_before))) if *of_before == group => before.end = elements.end,
                (matrix, before) => {
                    if let Some((before, group)) = before.take() {
                        self.queue_others(step, arguments.part(before), group)?;
                    }
                    match matrix {
                        None => *before = Some((elements, group)),
                        Some(shape) => {
                            let matrix = (shape, entry.matrices());
                            self.queue_matrix(step, arguments.part(elements), group, matrix)?;
                        }
                    }
                }
            }
        }
        others.map_or(Ok(()), |(others, group)| self.queue_others(step, arguments.part(others), group))
    }
}

impl Muon {
    /// Queues the update of parameters of this group that are no matrices.
    #[track_caller]
    fn queue_others<'s>(&self, step: &Step<'s>, of: UpdateArguments<'_, 's>, group: usize) -> Result<()> {
        let UpdateArguments { mut weights, mut copy, gradients, state, settings, squared_norm, .. } = of;
        let [mut first, mut second] = expect_state("muon", self.state(), state)?;
        let (first, second, copy) = (&mut first, &mut second, copy.as_mut());
        let (hyper, one_group) = (Slot(settings, group).part(Slot::ADAMW), None::<&Lent<'_, 's, u32>>);
        ops::adamw(step, &mut weights, copy, &gradients, first, second, &hyper, one_group, squared_norm)
    }

    /// Queues the update of a parameter of this group and shape, which consists of these matrices,
    /// and of the zeros after it.
    #[track_caller]
    fn queue_matrix<'s>(
        &self,
        step: &Step<'s>,
        of: UpdateArguments<'_, 's>,
        group: usize,
        (shape, matrices): ([usize; 2], &[usize]),
    ) -> Result<()> {
        let UpdateArguments { mut weights, mut copy, has_copy, gradients, state, settings, squared_norm, .. } = of;
        let [mut momentum, _] = expect_state("muon", self.state(), state)?;
        let (slot, one_group) = (Slot(settings, group), None::<&Lent<'_, 's, u32>>);
        let mut update = ops::fill(step, weights.shape(), 0.0)?;
        let (no_copy, hyper) = (None::<&mut Tensor<'s, bf16>>, slot.part(Slot::DIRECTION));
        ops::sgd(step, &mut update, no_copy, &gradients, &mut momentum, &hyper, one_group, squared_norm)?;
        if has_copy {
            ops::orthogonalize_assign::<bf16>(step, &mut update, shape, matrices, RMS)?;
        } else {
            ops::orthogonalize_assign::<f32>(step, &mut update, shape, matrices, RMS)?;
        }
        // The momentum of the step is 0.
        let mut velocity = ops::fill(step, weights.shape(), 0.0)?;
        let hyper = slot.part(Slot::STEP);
        ops::sgd(step, &mut weights, copy.as_mut(), &update, &mut velocity, &hyper, one_group, squared_norm)?;
        step.free(velocity);
        step.free(update);
        Ok(())
    }
}

/// The settings of all groups, and the number of a group. A group's settings have a part for each
/// kernel, which begins at a multiple of 16 bytes.
#[derive(Clone, Copy)]
struct Slot<'b, 's>(Lent<'b, 's>, usize);

impl<'b, 's> Slot<'b, 's> {
    /// The number of settings of a group.
    const LEN: usize = 24;
    /// The settings of AdamW.
    const ADAMW: Range<usize> = 0..adamw::slot::LEN;
    /// The settings of D.
    const DIRECTION: Range<usize> = 8..8 + sgd::slot::LEN;
    /// The settings of the step from W along O.
    const STEP: Range<usize> = 16..16 + sgd::slot::LEN;

    /// Returns a part of the group's settings.
    fn part(self, part: Range<usize>) -> Lent<'b, 's> {
        let Self(all, group) = self;
        all.part(group * Self::LEN + part.start..group * Self::LEN + part.end)
    }
}
