//! Updates of weights, by any rule.
//!
//! Invariant: values that change from step to step are in a device slot that is written before the
//! kernels are queued. The queued work is therefore the same every time and can be recorded.

#![forbid(unsafe_code)]

use super::parameter_groups::{ParameterGroup, ParameterGroups};
use super::rule::{SmallUpdateArguments, UpdateArguments, UpdateRule, WholeParameter};
use super::state::State;
use super::ticket::{UpdateTicket, Updates};
use cuda_std::float_mode;
use cuda_std::launch::Extent;
use half::bf16;
use kernels::update::RUN;
use std::ops::Range;
use std::sync::Arc;
use stepscope_core::internals::{Memory, is_finite, watch_launches};
use stepscope_core::{
    AnyBuffer, Buffer, Error, GradientConsumer, GradientType, Gradients, Lent, LentMasters, LentState, ParameterSpec,
    Parameters, Phase, Result, Source, Step, Tape, Tensor, Var, ops,
};

/// An optimizer that updates weights by a rule `R` and keeps the rule's state on the device.
/// [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) are two rules.
#[derive(Debug)]
pub struct Optimizer<R: ?Sized> {
    spec: ParameterSpec,
    updates: Arc<Updates>,
    groups: Vec<ParameterGroup>,
    /// The group of each parameter.
    group_of: Vec<u32>,
    /// The group of each run of elements, if there are several groups and the rule does not need
    /// whole parameters.
    runs: Option<Buffer<u32>>,
    /// The settings of the prepared update, by group.
    settings: Buffer<f32>,
    state: Vec<State>,
    /// The squared norm of the gradients so far, if they are released.
    released_norm: Option<Buffer<f32>>,
    /// The elements that the state covers and that an update changes, in ascending order: all
    /// elements, unless the ranks of a group divide them.
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
    needs_whole_parameters: bool,
}

impl Declared {
    /// Reads a rule's declarations.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an empty name, and when two parts of the state would have the same
    /// name in a checkpoint.
    fn of(rule: &impl UpdateRule) -> Result<Self> {
        let (name, state) = (rule.name(), rule.state());
        let is_used = |(place, part): (usize, &&str)| part.is_empty() || state[..place].contains(part);
        if name.is_empty() || state.iter().enumerate().any(is_used) {
            let expected = "a name for the rule, and a different name for each part of its state";
            return Err(Error::misuse("optimizer", expected, format!("`{name}` with the state {state:?}")));
        }
        let (has_groups, writes_copy) = (rule.has_groups(), rule.writes_copy());
        Ok(Self { name, state, has_groups, writes_copy, needs_whole_parameters: rule.needs_whole_parameters() })
    }
}

impl<R: UpdateRule> Optimizer<R> {
    /// Makes an optimizer for `parameters` that has made no update.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range, and for gradients in BF16 with a rule that
    /// needs whole parameters. [`Error::DeviceMemory`] when the device has no room for the state.
    pub fn new(parameters: &Parameters, rule: R) -> Result<Self> {
        rule.check()?;
        let declared = Declared::of(&rule)?;
        let (device, spec) = (parameters.device(), parameters.spec().clone());
        if declared.needs_whole_parameters && spec.gradients() != GradientType::F32 {
            let expected = "gradients in f32, because the rule updates whole parameters: leave out \
                            `ParameterSpec::with_gradients`";
            return Err(Error::misuse(declared.name, expected, format!("{:?}", spec.gradients())));
        }
        let groups = vec![ParameterGroup::default()];
        let settings = Buffer::from_slice(device, &settings_of(&rule, 1, &groups)?)?;
        let zeros = |_| State::zeros(device, spec.state(), spec.elements());
        let state = declared.state.iter().map(zeros).collect::<Result<_>>()?;
        let updates = Arc::new(Updates::new(declared.name, 0));
        let slices = std::iter::once(0..spec.elements()).collect();
        let is_released = spec.gradients() == GradientType::Released;
        let released_norm = is_released.then(|| Buffer::zeros(device, 1)).transpose()?;
        let group_of = vec![0; spec.entries().len()];
        Ok(Self { spec, updates, groups, group_of, runs: None, settings, state, released_norm, slices, declared, rule })
    }

    /// Sets rates and weight decay by parameter group, replacing any previous groups. The number of
    /// launches per update stays the same. A prepared update must be prepared again. A step that
    /// was captured with this optimizer before can make no more updates.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range, a group without parameters, and a rule that
    /// does not support groups.
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        let name = self.name();
        let (groups, runs) = groups.of(&self.spec)?;
        if groups.len() > 1 && !self.declared.has_groups {
            return Err(Error::misuse(
                name,
                "one parameter group, because the rule's `has_groups` returns false",
                groups.len().to_string(),
            ));
        }
        let device = self.settings.device();
        let settings = Buffer::from_slice(device, &settings_of(&self.rule, 1, &groups)?)?;
        let group_of = self.spec.entries().iter().map(|entry| runs[entry.start() / RUN]).collect();
        let runs = match groups.len() > 1 && !self.declared.needs_whole_parameters {
            true => Some(Buffer::from_slice(device, &runs)?),
            false => None,
        };
        // Captured steps require the previous updates, which are never prepared again.
        self.updates.retire();
        let updates = Arc::new(Updates::new(name, self.updates.made()));
        Ok(Self { groups, group_of, runs, settings, updates, ..self })
    }

    /// The rule.
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// Prepares the next update: writes its rate and corrections to the device. Returns the ticket
    /// for one [`Optimizer::apply`], or for one replay of it
    /// ([`UpdateTicket::leave_to_replay`]). Calling it again before that prepares the same update
    /// again, and withdraws the earlier ticket.
    ///
    /// # Errors
    /// [`Error::Misuse`] after 2^64 - 1 updates.
    pub fn advance(&mut self) -> Result<UpdateTicket> {
        let made = self.updates();
        let Some(number) = made.checked_add(1) else {
            return Err(Error::misuse(
                self.name(),
                "an update whose number fits 64 bits",
                format!("the update after {made}"),
            ));
        };
        // If writing the slot fails, no update is prepared.
        self.updates.reset(made);
        let settings = self.settings_of_update(number)?;
        if settings.len() != self.settings.len() {
            let expected = format!("{} settings for each update", self.settings.len());
            return Err(Error::misuse(self.name(), expected, format!("{} for update {number}", settings.len())));
        }
        self.settings.write(0, &settings)?;
        Ok(self.updates.issue(number))
    }

    /// Returns the rule's settings for an update, by group.
    pub(crate) fn settings_of_update(&self, number: u64) -> Result<Vec<f32>> {
        settings_of(&self.rule, number, &self.groups)
    }

    /// Queues the update that [`Optimizer::advance`] has prepared: the squared norm of all
    /// gradients, then the rule's launches. For AdamW and SGD this is one launch over all weights.
    /// `ticket` is the one that `advance` returned, or [`UpdateTicket::each_replay`] in a
    /// captured step. A dry run makes no update but consumes the ticket.
    ///
    /// This does not check that the norm is finite. If clipping is on, an infinite norm makes the
    /// gradients zero. Otherwise the weights become worthless. [`Optimizer::update`] and a
    /// [`Trainer`](crate::Trainer) report such a norm, and [`Optimizer::apply_with_norm`] returns
    /// it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when parameters, gradients and state do not belong together. The same for
    /// a ticket of another optimizer, and for one from before a later `advance`, new parameter
    /// groups or a restored checkpoint. After an error, `advance` prepares the same update again.
    #[track_caller]
    pub fn apply(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'_>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<()> {
        self.apply_with_norm(ticket, step, parameters, gradients).map(drop)
    }

    /// Queues the update like [`Optimizer::apply`], and returns the squared norm of all gradients
    /// before clipping, `[1]`.
    #[track_caller]
    pub fn apply_with_norm<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<Tensor<'s>> {
        self.check_spec(parameters.spec())?;
        self.check_spec(gradients.spec())?;
        self.whole_state()?;
        self.updates.accept(ticket, step)?;
        let queued = self.queue_whole(step, parameters, gradients);
        self.updates.count(step, queued)
    }

    /// Queues the squared norm of all gradients, then the update of all weights.
    #[track_caller]
    fn queue_whole<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<Tensor<'s>> {
        let _phase = step.enter(Phase::Optimizer);
        let norm = gradients.squared_norm(step, None)?;
        let writes_copy = self.declared.writes_copy;
        let queued = self.queue(step, parameters, gradients, &norm, writes_copy);
        // A rule that failed may have queued some of its launches.
        let copied = if writes_copy && queued.is_ok() { Ok(()) } else { parameters.queue_copy(step) };
        queued.and(copied).map(|()| norm)
    }

    /// Applies the update to the slices whose state is on this rank, with a norm that the caller
    /// supplies. The caller that collects the other slices rounds all weights to their copy.
    #[cfg(feature = "group")]
    #[track_caller]
    pub(crate) fn apply_slices<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
        squared_norm: &Tensor<'s>,
    ) -> Result<()> {
        self.check_spec(parameters.spec())?;
        self.check_spec(gradients.spec())?;
        self.updates.accept(ticket, step)?;
        let queued = self.queue(step, parameters, gradients, squared_norm, false);
        self.updates.count(step, queued)
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
        let piece = match self.spec.gradients() {
            GradientType::F32 => usize::MAX,
            GradientType::Bf16 | GradientType::Released => GradientType::CONVERTED,
        };
        let in_pieces = |(slice, start): (&Range<usize>, usize)| {
            let Range { start: first, end } = *slice;
            (first..end).step_by(piece).map(move |at| (at..end.min(at.saturating_add(piece)), start + at - first))
        };
        let pieces: Vec<_> = with_places(&self.slices).flat_map(in_pieces).collect();
        for (slice, start) in pieces {
            let lent = gradients.lend(step, slice.clone())?;
            let weights = parameters.lend_masters(step)?.part(slice.clone());
            self.queue_slice(step, (slice, start), (weights, writes_copy), lent.lent(), squared_norm)?;
            lent.free(step);
        }
        Ok(())
    }

    /// Queues the update of a slice of the weights, of which the state begins at `start`.
    #[track_caller]
    fn queue_slice<'s>(
        &mut self,
        step: &Step<'s>,
        (slice, start): (Range<usize>, usize),
        (mut weights, writes_copy): (LentMasters<'_, 's>, bool),
        gradients: Lent<'_, 's>,
        squared_norm: &Tensor<'s>,
    ) -> Result<()> {
        let mut has_copy = false;
        if let LentMasters::F32 { copy, .. } = &mut weights {
            has_copy = copy.is_some();
            copy.take_if(|_| !writes_copy);
        }
        let kept = self.state.iter_mut().map(|state| state.lend_mut(step, start..start + slice.len()));
        let state = kept.collect::<Result<Vec<_>>>()?;
        let settings = match self.groups.len() {
            1 => step.lend(&self.settings, [self.settings.len()])?,
            groups => step.lend(&self.settings, [groups, self.settings.len() / groups])?,
        };
        let runs = slice.start / RUN..slice.end.div_ceil(RUN);
        let all_runs = self.runs.as_ref().map(|all| step.lend(all, [all.len()])).transpose()?;
        let groups = all_runs.map(|all| all.part(runs));
        let copy = match &weights {
            LentMasters::F32 { copy, .. } => copy.as_ref().map(Source::memory),
            LentMasters::Split { .. } => None,
        };
        let promised = Promised { copy, groups: groups.as_ref().map(Source::memory) };
        let is_small = state.iter().any(|state| matches!(state, LentState::Bits8(_)));
        let entries = self.spec.entries().iter().zip(&self.group_of);
        let own = entries.filter(|(entry, _)| slice.contains(&entry.start()));
        let own = own.filter(|_| self.declared.needs_whole_parameters);
        let parameters = own.map(|(entry, &group)| {
            let elements = entry.start() - slice.start..entry.range().end - slice.start;
            WholeParameter { entry, elements, group: group as usize }
        });
        let (queued, extents) = watch_launches(step, || match weights {
            LentMasters::F32 { weights, copy } if !is_small => {
                let in_f32 = |state| if let LentState::F32(state) = state { Some(state) } else { None };
                let state = state.into_iter().filter_map(in_f32).collect();
                let parameters = parameters.collect();
                let arguments = UpdateArguments {
                    weights,
                    copy,
                    has_copy,
                    gradients,
                    state,
                    settings,
                    groups,
                    squared_norm,
                    parameters,
                };
                self.rule.queue(step, arguments)
            }
            weights => {
                let arguments = SmallUpdateArguments { weights, gradients, state, settings, groups, squared_norm };
                self.rule.queue_small(step, arguments)
            }
        });
        queued?;
        promised.check(self.declared.name, &extents)
    }

    /// Runs a tape backwards and updates each parameter as soon as its gradient is final, so that
    /// no gradient is stored; see [`GradientType::Released`]. The weights are those of the tape. A
    /// rule that clips limits the norm of each parameter's gradient, not that of all. Returns the
    /// squared norm of all gradients, `[1]`, the sum over the parameters in the order of their
    /// updates. See [`Optimizer::apply`] for `ticket`.
    ///
    /// # Errors
    /// As [`Optimizer::apply`] and [`Tape::backward_consumed`]; [`Error::Misuse`] unless the spec's
    /// gradients are [`GradientType::Released`], and for a rule that does not write a BF16 copy.
    #[track_caller]
    pub fn apply_in_backward<'s>(
        &mut self,
        ticket: UpdateTicket,
        tape: Tape<'_, 's>,
        loss: &Var<'s>,
    ) -> Result<Tensor<'s>> {
        self.check_spec(tape.spec())?;
        self.whole_state()?;
        let step = tape.step();
        let Some(norm) = &mut self.released_norm else {
            let expected = "a spec with `GradientType::Released`";
            return Err(Error::misuse(self.name(), expected, format!("{:?}", self.spec.gradients())));
        };
        ops::fill_into(step, &mut step.lend_mut(norm, [1])?, 0.0)?;
        self.updates.accept(ticket, step)?;
        let queued = tape.backward_consumed(loss, &mut InBackward(self));
        self.updates.count(step, queued)?;
        let norm = self.released_norm.as_ref().expect("it was there before");
        ops::copy(step, &step.lend(norm, [1])?)
    }
}

/// The updates of an optimizer during a backward pass.
struct InBackward<'o, R>(&'o mut Optimizer<R>);

impl<R: UpdateRule> GradientConsumer for InBackward<'_, R> {
    fn consume<'s>(
        &mut self,
        step: &Step<'s>,
        elements: Range<usize>,
        weights: LentMasters<'_, 's>,
        gradient: Lent<'_, 's>,
    ) -> Result<()> {
        let Self(optimizer) = self;
        let _phase = step.enter(Phase::Optimizer);
        if let (LentMasters::F32 { copy: Some(_), .. }, false) = (&weights, optimizer.declared.writes_copy) {
            let expected = "a rule whose `writes_copy` returns true, because gradients are released";
            return Err(Error::misuse(optimizer.declared.name, expected, "false"));
        }
        let squared_norm = ops::squared_norm(step, &gradient)?;
        let norm = optimizer.released_norm.as_mut().expect("`apply_in_backward` has checked it");
        ops::add_assign(step, &mut step.lend_mut(norm, [1])?, &squared_norm)?;
        let start = elements.start;
        optimizer.queue_slice(step, (elements, start), (weights, true), gradient, &squared_norm)?;
        step.free(squared_norm);
        Ok(())
    }
}

/// Memory that a rule has declared to use.
///
/// A false declaration would give wrong numbers without an error: products that read an old BF16
/// copy, or one group's rate for all parameters. The type of a rule cannot exclude that, so the
/// launches are checked.
struct Promised {
    copy: Option<Memory<bf16>>,
    groups: Option<Memory<u32>>,
}

impl Promised {
    /// Returns an error unless launches with these extents use the memory as the rule declared.
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
                return Err(Error::misuse(name, expected, "launches that do not read it"));
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

    /// Returns the names and values of everything that the next updates depend on except the state.
    /// `None` if the rule does not provide its own.
    pub(crate) fn configuration(&self) -> Option<Vec<(String, String)>> {
        let of_rule = self.rule.configuration()?;
        let mut all = vec![("optimizer".to_owned(), self.name().to_owned())];
        all.extend(of_rule.into_iter().map(|(name, value)| (format!("optimizer.{name}"), value)));
        all.push(("optimizer's state".into(), format!("{:?}", self.declared.state)));
        for (number, ParameterGroup { rate, weight_decay }) in self.groups.iter().enumerate() {
            let entries = self.spec.entries().iter().zip(&self.group_of);
            let own = entries.filter(|&(_, &group)| group as usize == number);
            let names: Vec<&str> = own.map(|(entry, _)| entry.name()).collect();
            let value = format!("rate {rate:?}, weight decay {weight_decay:?}, {} parameters: {names:?}", names.len());
            all.push((format!("parameter group {number}"), value));
        }
        Some(all)
    }

    /// True if the rule updates whole parameters.
    pub(crate) fn needs_whole_parameters(&self) -> bool {
        self.declared.needs_whole_parameters
    }

    /// The number of updates made so far, queued by [`Optimizer::apply`] or by a replay.
    pub fn updates(&self) -> u64 {
        self.updates.made()
    }

    /// The rule's state for each weight, in the order of [`UpdateRule::state`]. Each part is flat,
    /// in the parameters' order, and stored as [`ParameterSpec::state`] states. In a group it
    /// covers the slices that this rank updates, one after another.
    pub fn state(&self) -> Vec<AnyBuffer<'_>> {
        self.state.iter().map(State::buffer).collect()
    }

    /// Returns the state if it covers all weights.
    pub(crate) fn whole_state(&self) -> Result<&[State]> {
        if self.slices == std::slice::from_ref(&(0..self.spec.elements())) {
            return Ok(&self.state);
        }
        let expected = "the state of all weights: in a group, leave updates, saves and restores to the trainer";
        Err(Error::misuse(self.name(), expected, format!("the state of elements {:?}", self.slices)))
    }

    /// The state of the slices that are here.
    pub(crate) fn kept_state(&self) -> &[State] {
        &self.state
    }

    /// The elements whose state is here, in ascending order.
    pub(crate) fn slices(&self) -> &[Range<usize>] {
        &self.slices
    }

    /// Restricts the state and the updates to these elements, which are ascending whole runs of a
    /// group. State that was not kept before starts at zero.
    pub(crate) fn keep(&mut self, slices: Vec<Range<usize>>) -> Result<()> {
        if slices == self.slices {
            // Recorded steps hold the state's address.
            return Ok(());
        }
        let elements = slices.iter().map(Range::len).sum::<usize>();
        for state in &mut self.state {
            let mut kept = State::zeros(self.settings.device(), self.spec.state(), elements)?;
            for (new, to) in with_places(&slices) {
                for (old, from) in with_places(&self.slices) {
                    let both = old.start.max(new.start)..old.end.min(new.end);
                    if !both.is_empty() {
                        let place = from + both.start - old.start;
                        kept.copy(to + both.start - new.start, state, place..place + both.len())?;
                    }
                }
            }
            *state = kept;
        }
        self.slices = slices;
        Ok(())
    }

    /// Returns the prefixes of parameter names in the names of their state, one for each part of
    /// the state.
    pub(crate) fn prefixes(&self) -> Vec<String> {
        self.declared.state.iter().map(|state| format!("{}.{state}.", self.name())).collect()
    }

    /// Returns an error unless the state belongs to parameters of `spec`.
    pub(crate) fn check_spec(&self, spec: &ParameterSpec) -> Result<()> {
        if self.spec.same(spec) {
            return Ok(());
        }
        Err(Error::misuse(
            self.name(),
            "parameters, gradients and state of one parameter spec",
            "parameters, gradients and state of different specs",
        ))
    }

    /// Returns the state, to be overwritten with the state after `updates` updates.
    pub(crate) fn restore(&mut self, updates: u64) -> &mut [State] {
        self.updates.reset(updates);
        &mut self.state
    }
}

/// Iterates over slices, each with the start of its state.
fn with_places(slices: &[Range<usize>]) -> impl Iterator<Item = (&Range<usize>, usize)> {
    slices.iter().scan(0, |end, slice| Some((slice, std::mem::replace(end, *end + slice.len()))))
}

/// Computes the settings of an update, by group, in IEEE 754's default mode.
fn settings_of(rule: &impl UpdateRule, number: u64, groups: &[ParameterGroup]) -> Result<Vec<f32>> {
    let settings = || groups.iter().map(|group| rule.settings(number, group)).collect();
    let all: Vec<Vec<f32>> = float_mode::in_default(settings);
    for (group, settings) in all.iter().enumerate() {
        if let Some(place) = settings.iter().position(|&value| !is_finite(value)) {
            let expected = "finite settings: the rate times the schedule's factor and the group's rate must fit f32";
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
