//! Updates of weights, by any rule.
//!
//! Invariant: what changes from step to step lies in a device slot that is written before the kernels are queued, so
//! the queued work is the same every time and can be recorded. Each update is set up once and made once.

#![forbid(unsafe_code)]

use super::parameter_groups::{ParameterGroup, ParameterGroups};
use super::rule::{UpdateArguments, UpdateRule};
use crate::digest::hex;
use crate::error::{Error, Result};
use crate::finite::is_finite;
use crate::memory::{Buffer, Turns};
use crate::ops;
use crate::params::{Gradients, Layout, LayoutEntry, Parameters};
use crate::report::Phase;
use crate::step::Step;
use crate::tensor::{Memory, Source, Tensor};
use cuda_std::float_mode;
use cuda_std::launch::Extent;
use half::bf16;
use kernels::update::RUN;
use sha2::{Digest, Sha256};
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
    declared: Declared,
    rule: R,
}

/// Declarations of a rule, read once when its optimizer is made.
#[derive(Clone, Copy, Debug)]
struct Declared {
    name: &'static str,
    state: &'static [&'static str],
    has_groups: bool,
    writes_copy: bool,
}

impl Declared {
    /// # Errors
    /// [`Error::Misuse`] for no name, and when two parts of the state would have one name in a
    /// checkpoint.
    fn of(rule: &impl UpdateRule) -> Result<Self> {
        let (name, state) = (rule.name(), rule.state());
        let is_used = |(place, part): (usize, &&str)| part.is_empty() || state[..place].contains(part);
        if name.is_empty() || state.iter().enumerate().any(is_used) {
            let expected = "a name for the rule, and another one for each part of its state";
            return Err(Error::misuse("optimizer", expected, format!("`{name}` with the state {state:?}")));
        }
        Ok(Self { name, state, has_groups: rule.has_groups(), writes_copy: rule.writes_copy() })
    }
}

impl<R: UpdateRule> Optimizer<R> {
    /// An optimiser for `parameters` that has made no update.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range; [`Error::DeviceMemory`] when there is no room for the state.
    pub fn new(parameters: &Parameters, rule: R) -> Result<Self> {
        rule.check()?;
        let declared = Declared::of(&rule)?;
        let (device, layout) = (parameters.flat().device(), parameters.layout().clone());
        let groups = vec![ParameterGroup::default()];
        let settings = Buffer::from_slice(device, &settings_of(&rule, 1, &groups)?)?;
        let state = declared.state.iter().map(|_| Buffer::zeros(device, layout.elements())).collect::<Result<_>>()?;
        let turns = Arc::new(Turns::new(declared.name));
        let slices = std::iter::once(0..layout.elements()).collect();
        Ok(Self { layout, turns, groups, runs: None, settings, state, slices, declared, rule })
    }

    /// The same with rates and weight decay by group, in place of what groups it had: its updates are as many launches as before. What
    /// was set up must be set up anew, and a step that was captured with it before makes no update any more.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range, a group without a parameter, and a rule that knows no groups.
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        let name = self.name();
        let (groups, runs) = groups.of(&self.layout)?;
        if groups.len() > 1 && !self.declared.has_groups {
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
        let settings = self.settings_of_update(number)?;
        if settings.len() != self.settings.len() {
            let expected = format!("{} settings for each update", self.settings.len());
            return Err(Error::misuse(self.name(), expected, format!("{} for update {number}", settings.len())));
        }
        self.settings.write(0, &settings)?;
        self.turns.set_up();
        Ok(number)
    }

    /// The rule's settings for an update, by group.
    pub(crate) fn settings_of_update(&self, number: u64) -> Result<Vec<f32>> {
        settings_of(&self.rule, number, &self.groups)
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
        let writes_copy = self.declared.writes_copy;
        let queued = self.queue(step, parameters, gradients, &norm, writes_copy);
        // A rule that failed may have queued a part of its launches.
        let copied = if writes_copy && queued.is_ok() { Ok(()) } else { parameters.queue_copy(step) };
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
            let settings = match self.groups.len() {
                1 => step.lend(&self.settings, [self.settings.len()])?,
                groups => step.lend(&self.settings, [groups, self.settings.len() / groups])?,
            };
            let runs = slice.start / RUN..slice.end.div_ceil(RUN);
            let all_runs = self.runs.as_ref().map(|all| step.lend(all, [all.len()])).transpose()?;
            let groups = all_runs.map(|all| all.part(runs));
            let promised =
                Promised { copy: copy.as_ref().map(Source::memory), groups: groups.as_ref().map(Source::memory) };
            let arguments = UpdateArguments { weights, copy, gradients, state, settings, groups, squared_norm };
            let (queued, extents) = step.region().launches().watch(|| self.rule.queue(step, arguments));
            queued?;
            promised.check(self.declared.name, &extents)?;
        }
        Ok(())
    }
}

/// Memory that a rule has said it uses.
struct Promised {
    copy: Option<Memory<bf16>>,
    groups: Option<Memory<u32>>,
}

impl Promised {
    /// An error unless launches that use these extents keep what the rule has said.
    fn check(&self, name: &'static str, extents: &[Extent]) -> Result<()> {
        let range = |extent: &Extent| extent.address..extent.address + extent.bytes() as u64;
        if let Some(copy) = self.copy {
            let end = copy.address() + copy.bytes().len() as u64;
            let mut written: Vec<_> = extents.iter().filter(|extent| extent.written).map(range).collect();
            written.sort_by_key(|written| written.start);
            let reached = written.iter().fold(copy.address(), |reached, written| {
                if written.start <= reached { reached.max(written.end) } else { reached }
            });
            if reached < end {
                let expected = format!(
                    "a rule that writes all {} elements of the BF16 copy: its `writes_copy` returned true",
                    copy.len()
                );
                let got = format!("{} of them written", (reached - copy.address()) as usize / size_of::<bf16>());
                return Err(Error::misuse(name, expected, got));
            }
        }
        if let Some(groups) = self.groups.filter(|groups| groups.len() > 0) {
            let all = groups.address()..groups.address() + groups.bytes().len() as u64;
            if !extents.iter().map(range).any(|used| used.start < all.end && all.start < used.end) {
                let expected = "a rule whose launches read `UpdateArguments::groups`: its `has_groups` returned true";
                return Err(Error::misuse(name, expected, "none that does"));
            }
        }
        Ok(())
    }
}

impl<R: UpdateRule + ?Sized> Optimizer<R> {
    /// The rule's name.
    pub fn name(&self) -> &'static str {
        self.declared.name
    }

    /// Names and values of all that the next updates depend on, but for the state; none where the
    /// rule does not give its own. Waits.
    pub(crate) fn configuration(&self) -> Result<Option<Vec<(String, String)>>> {
        let Some(of_rule) = self.rule.configuration() else { return Ok(None) };
        let mut all = vec![("optimizer".to_owned(), self.name().to_owned())];
        all.extend(of_rule.into_iter().map(|(name, value)| (format!("optimizer.{name}"), value)));
        all.push(("optimizer's state".into(), format!("{:?}", self.declared.state)));
        let runs = self.runs.as_ref().map(Buffer::read).transpose()?.unwrap_or_default();
        let group_of = |entry: &LayoutEntry| runs.get(entry.start() / RUN).map_or(0, |&group| group as usize);
        for (number, ParameterGroup { rate, weight_decay }) in self.groups.iter().enumerate() {
            let entries = self.layout.entries().iter().filter(|entry| group_of(entry) == number);
            let names: Vec<&str> = entries.map(LayoutEntry::name).collect();
            let value = format!("rate {rate:?}, weight decay {weight_decay:?}, {} parameters: {names:?}", names.len());
            all.push((format!("parameter group {number}"), value));
        }
        Ok(Some(all))
    }

    /// The SHA-256 of the state, in hexadecimal; none where no update has changed it, and of slices, which other ranks
    /// have not. Waits.
    pub(crate) fn state_sha256(&self) -> Result<Option<String>> {
        if self.updates() == 0 || self.whole_state().is_err() {
            return Ok(None);
        }
        let mut hash = Sha256::new();
        self.state.iter().try_for_each(|state| state.hash_into(&mut hash, 0..state.len()))?;
        Ok(Some(hex(&hash.finalize())))
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
        self.declared.state.iter().map(|state| format!("{}.{state}.", self.name())).collect()
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
    for (group, settings) in all.iter().enumerate() {
        if let Some(place) = settings.iter().position(|&value| !is_finite(value)) {
            let expected = "finite settings: a rate, times the schedule's factor and the group's rate, that fits f32";
            let got = format!("{} as setting {place} of group {group} in update {number}", settings[place]);
            return Err(Error::misuse(rule.name(), expected, got));
        }
    }
    let len = all[0].len();
    match all.iter().map(Vec::len).find(|&other| other != len || other == 0) {
        None => Ok(all.concat()),
        Some(0) => Err(Error::misuse(rule.name(), "at least one setting", "none")),
        Some(other) => Err(Error::misuse(rule.name(), format!("{len} settings for each group"), other.to_string())),
    }
}
