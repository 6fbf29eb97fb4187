//! Updates of weights, by any rule.
//!
//! Invariant: what changes from step to step lies in a device slot that is written before the kernels are queued, so
//! the queued work is the same every time and can be recorded. Each update is set up once and made once.

#![forbid(unsafe_code)]

use super::parameter_groups::{ParameterGroup, ParameterGroups};
use super::rule::{UpdateArguments, UpdateRule};
use crate::error::{Error, Result};
use crate::finite::is_finite;
use crate::memory::{Buffer, Turns};
use crate::ops;
use crate::params::{Gradients, Layout, Parameters};
use crate::report::Phase;
use crate::step::Step;
use crate::tensor::Tensor;
use cuda_std::float_mode;
use kernels::update::RUN;
use std::ops::Range;
use std::sync::Arc;

/// Updates weights by a rule `R`, whose state is on the device: [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) are two.
#[derive(Debug)]
pub struct Optimizer<R: ?Sized> {
    layout: Layout,
    turns: Arc<Turns>,
    groups: Vec<ParameterGroup>,
    /// The group of each run of elements, if there are several.
    runs: Option<Buffer<u32>>,
    /// The settings of the update that is set up, by group.
    settings: Buffer<f32>,
    state: Vec<Buffer<f32>>,
    /// The elements that the state is of, and that an update changes, ascending: all, unless ranks of a group share them out.
    slices: Vec<Range<usize>>,
    rule: R,
}

impl<R: UpdateRule> Optimizer<R> {
    /// An optimiser for `parameters` that has made no update.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range; [`Error::DeviceMemory`] when there is no room for the state.
    pub fn new(parameters: &Parameters, rule: R) -> Result<Self> {
        rule.check()?;
        let (device, layout) = (parameters.flat().device(), parameters.layout().clone());
        let groups = vec![ParameterGroup::default()];
        let settings = Buffer::from_slice(device, &settings_of(&rule, 1, &groups)?)?;
        let state = rule.state().iter().map(|_| Buffer::zeros(device, layout.elements())).collect::<Result<_>>()?;
        let turns = Arc::new(Turns::new(rule.name()));
        let slices = std::iter::once(0..layout.elements()).collect();
        Ok(Self { layout, turns, groups, runs: None, settings, state, slices, rule })
    }

    /// The same with rates and weight decay by group, in place of what groups it had: its updates are as many launches as before. What
    /// was set up must be set up anew, and a step that was captured with it before makes no update any more.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range, a group without a parameter, and a rule that knows no groups.
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        let name = self.name();
        let (groups, runs) = groups.of(&self.layout)?;
        if groups.len() > 1 && !self.rule.has_groups() {
            return Err(Error::misuse(
                name,
                "one group: the rule's `has_groups` says that it heeds no others",
                groups.len().to_string(),
            ));
        }
        let device = self.settings.device();
        let settings = Buffer::from_slice(device, &settings_of(&self.rule, 1, &groups)?)?;
        let runs = if groups.len() > 1 { Some(Buffer::from_slice(device, &runs)?) } else { None };
        // What was captured asks the turns of before, which nobody sets up any more.
        let (made, turns) = (self.updates(), Turns::new(name));
        self.turns.reset(made);
        turns.reset(made);
        Ok(Self { groups, runs, settings, turns: Arc::new(turns), ..self })
    }

    /// How it updates.
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// Sets up the next update: its rate and corrections go to the device. Returns its number, counted from 1. Call it before each
    /// [`Optimizer::apply`] and before each replay of one; called again before that, it sets up the same update again.
    ///
    /// # Errors
    /// [`Error::Misuse`] after 2^64 - 1 updates; those of the driver.
    pub fn advance(&mut self) -> Result<u64> {
        let made = self.updates();
        let Some(number) = made.checked_add(1) else {
            return Err(Error::misuse(self.name(), "an update whose number fits 64 bits", format!("one after {made}")));
        };
        // If the slot is not written, nothing is set up.
        self.turns.reset(made);
        let settings = settings_of(&self.rule, number, &self.groups)?;
        if settings.len() != self.settings.len() {
            let expected = format!("{} settings for each update", self.settings.len());
            return Err(Error::misuse(self.name(), expected, format!("{} for update {number}", settings.len())));
        }
        self.settings.write(0, &settings)?;
        self.turns.set_up();
        Ok(number)
    }

    /// Queues the update that [`Optimizer::advance`] has set up: the squared norm of all gradients, then what the rule queues, for those
    /// of the library one launch over all weights. In a step that is captured, each replay makes the update that was set up before it.
    ///
    /// A norm that is not finite is not looked at here. With clipping, an infinite norm makes the
    /// gradients zero; otherwise the weights are worthless. [`Optimizer::update`] and a
    /// [`Trainer`](crate::Trainer) report it; [`Optimizer::apply_with_norm`] returns it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when parameters, gradients and state do not belong together, and when no update is set up: then the replay's
    /// error, where this is captured.
    #[track_caller]
    pub fn apply(&mut self, step: &Step<'_>, parameters: &mut Parameters, gradients: &Gradients) -> Result<()> {
        self.apply_with_norm(step, parameters, gradients).map(drop)
    }

    /// [`Optimizer::apply`], and the squared norm of all gradients, `[1]`, before clipping.
    ///
    /// # Errors
    /// As for [`Optimizer::apply`].
    #[track_caller]
    pub fn apply_with_norm<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<Tensor<'s>> {
        self.check_layout(parameters.layout())?;
        self.check_layout(gradients.layout())?;
        self.whole_state()?;
        let turn = self.take_turn(step)?;
        let queued = step.launched(self.queue_whole(step, parameters, gradients));
        Turns::end(&turn, queued.is_ok());
        queued
    }

    /// The update of all weights, behind the squared norm of all gradients.
    #[track_caller]
    fn queue_whole<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<Tensor<'s>> {
        let _phase = step.enter(Phase::Optimizer);
        let norm = ops::squared_norm(step, &step.lend(gradients.flat(), [gradients.flat().len()])?)?;
        let writes_copy = self.rule.writes_copy();
        let queued = self.queue(step, parameters, gradients, &norm, writes_copy);
        // A rule that failed may have queued a part of its launches.
        let copied = if writes_copy { Ok(()) } else { parameters.queue_copy(step) };
        queued.and(copied).map(|()| norm)
    }

    /// [`Optimizer::apply`] to the slices whose state is here, with a norm that the caller knows. Whoever brings the other slices rounds all
    /// weights to their copy.
    #[track_caller]
    pub(crate) fn apply_slices<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
        squared_norm: &Tensor<'s>,
    ) -> Result<()> {
        self.check_layout(parameters.layout())?;
        self.check_layout(gradients.layout())?;
        let turn = self.take_turn(step)?;
        let queued = step.launched(self.queue(step, parameters, gradients, squared_norm, false));
        Turns::end(&turn, queued.is_ok());
        queued
    }

    /// Takes the update that is set up, to make it now: [`Turns::end`] must follow. In a step that is recorded each replay takes its own.
    fn take_turn(&self, step: &Step<'_>) -> Result<Vec<Arc<Turns>>> {
        let turn = step.makes(&self.turns)?.to_vec();
        Turns::take(&turn)?;
        Ok(turn)
    }

    #[track_caller]
    fn queue<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
        squared_norm: &Tensor<'s>,
        writes_copy: bool,
    ) -> Result<()> {
        let elements = [self.layout.elements()];
        for (slice, start) in with_places(&self.slices) {
            let gradients = step.lend(gradients.flat(), elements)?.part(slice.clone());
            let (weights, copy) = parameters.lend_flat_mut(step)?;
            let weights = weights.part(slice.clone());
            let copy = copy.filter(|_| writes_copy).map(|copy| copy.part(slice.clone()));
            let kept = self.state.iter_mut().map(|state| {
                let all = [state.len()];
                Ok(step.lend_mut(state, all)?.part(start..start + slice.len()))
            });
            let state = kept.collect::<Result<_>>()?;
            let settings = step.lend(&self.settings, [self.settings.len()])?;
            let runs = slice.start / RUN..slice.end.div_ceil(RUN);
            let all_runs = self.runs.as_ref().map(|all| step.lend(all, [all.len()])).transpose()?;
            let groups = all_runs.map(|all| all.part(runs));
            self.rule
                .queue(step, UpdateArguments { weights, copy, gradients, state, settings, groups, squared_norm })?;
        }
        Ok(())
    }
}

impl<R: UpdateRule + ?Sized> Optimizer<R> {
    /// The rule's name.
    pub fn name(&self) -> &'static str {
        self.rule.name()
    }

    /// Updates made so far: those that were queued by [`Optimizer::apply`] or by a replay.
    pub fn updates(&self) -> u64 {
        self.turns.made()
    }

    /// What the rule keeps for each weight, in the order of [`UpdateRule::state`]: flat, in the parameters' layout; in a group, of the slices
    /// that this rank updates, one behind the other.
    pub fn state(&self) -> &[Buffer<f32>] {
        &self.state
    }

    /// The state, if it is that of all weights.
    pub(crate) fn whole_state(&self) -> Result<&[Buffer<f32>]> {
        if self.slices == std::slice::from_ref(&(0..self.layout.elements())) {
            return Ok(&self.state);
        }
        let expected = "the state of all weights: in a group the trainer updates, saves and restores";
        Err(Error::misuse(self.name(), expected, format!("that of elements {:?}", self.slices)))
    }

    /// The elements whose state is here, ascending.
    pub(crate) fn slices(&self) -> &[Range<usize>] {
        &self.slices
    }

    /// Keeps the state of these elements, ascending, whole runs of a group, and updates them alone; of what was not kept before it is zero.
    pub(crate) fn keep(&mut self, slices: Vec<Range<usize>>) -> Result<()> {
        if slices == self.slices {
            // Recorded steps know where the state is.
            return Ok(());
        }
        let elements = slices.iter().map(Range::len).sum::<usize>();
        for state in &mut self.state {
            let mut kept = Buffer::zeros(state.device(), elements.max(1))?;
            for (new, to) in with_places(&slices) {
                for (old, from) in with_places(&self.slices) {
                    let both = old.start.max(new.start)..old.end.min(new.end);
                    if !both.is_empty() {
                        let known = state.read_range(from + both.start - old.start, both.len())?;
                        kept.write(to + both.start - new.start, &known)?;
                    }
                }
            }
            *state = kept;
        }
        self.slices = slices;
        Ok(())
    }

    /// What stands before a parameter's name in the names of its state, by part of the state.
    pub(crate) fn prefixes(&self) -> Vec<String> {
        self.rule.state().iter().map(|state| format!("{}.{state}.", self.name())).collect()
    }

    /// An error unless the state is that of parameters of `layout`.
    pub(crate) fn check_layout(&self, layout: &Layout) -> Result<()> {
        if self.layout.same(layout) {
            return Ok(());
        }
        Err(Error::misuse(self.name(), "parameters, gradients and state of one layout", "another layout's"))
    }

    /// The state, to be overwritten by that of `updates` updates.
    pub(crate) fn restore(&mut self, updates: u64) -> &mut [Buffer<f32>] {
        self.turns.reset(updates);
        &mut self.state
    }
}

/// Slices, and where the state of each begins.
fn with_places(slices: &[Range<usize>]) -> impl Iterator<Item = (&Range<usize>, usize)> {
    slices.iter().scan(0, |end, slice| Some((slice, std::mem::replace(end, *end + slice.len()))))
}

/// The settings of an update, by group, computed in IEEE 754's default mode.
fn settings_of(rule: &impl UpdateRule, number: u64, groups: &[ParameterGroup]) -> Result<Vec<f32>> {
    let settings = || groups.iter().map(|group| rule.settings(number, group)).collect();
    let all: Vec<Vec<f32>> = float_mode::in_default(settings);
    if let Some(value) = all.iter().flatten().find(|&&value| !is_finite(value)) {
        let expected = "finite settings: a rate, times the schedule's factor and the group's rate, that fits f32";
        return Err(Error::misuse(rule.name(), expected, format!("{value} for update {number}")));
    }
    let len = all[0].len();
    match all.iter().map(Vec::len).find(|&other| other != len || other == 0) {
        None => Ok(all.concat()),
        Some(0) => Err(Error::misuse(rule.name(), "at least one setting", "none")),
        Some(other) => Err(Error::misuse(rule.name(), format!("{len} settings for each group"), other.to_string())),
    }
}
