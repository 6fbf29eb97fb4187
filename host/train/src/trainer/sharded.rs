//! A group whose ranks keep slices of everything: weights, optimizer state and gradients.
//!
//! ```text
//! unit 1 of rank 0     gathered | forward | .. | gathered | backward | gradients sent
//! slices of rank 0     0: its weights                                  0: sums of its gradients
//! shard of rank        0   1          first pass: shards 0, 1 of the batch, a subtree
//!                      2   3          second pass: shards 2, 3, added to the sums of the first
//! ```
//! A unit is a block of the model, such as `blocks.3.`, or neighboring parameters of no block.
//! Before an op reads a unit's weights, all ranks gather it. As soon as a backward pass has all
//! gradients of a unit, the ranks exchange them. Each rank sums its slices over the ranks, and then
//! over its passes.
//!
//! Invariant: the sums have the bits of a group whose ranks keep all weights, because pass k of all
//! ranks has neighboring shards. No rank stores the weights or gradients of more than a few units
//! outside of its slices.

use super::agreement;
use super::layout::{Layout, Pieces};
use super::model::{Model, TrainState};
use super::ranks::Ranks;
use super::sums::{AnySums, Summed, Sums};
use super::sync::{CallSite, Ending, GradientSync, Metric, OwnParts, Updated};
use crate::checkpoint::{Checkpoint, ReadRegion};
use crate::optim::{Optimizer, State, UpdateRule, UpdateTicket};
use kernels::update::RUN;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use stepscope_core::internals::{self, GatherWeights, OfRank};
use stepscope_core::ops::{Cast, Precision};
use stepscope_core::{
    Arena, Buffer, Device, Element, Error, GradientConsumer, Gradients, Kept, Lent, LentMasters, Parameter,
    ParameterSpec, Parameters, Phase, Result, Step, bf16, ops,
};
use stepscope_group::{Group, Slices};

/// A rank of a group whose ranks keep slices.
#[derive(Debug)]
pub(super) struct Sharded {
    ranks: Ranks,
    layout: Arc<Layout>,
    units: AnyUnits,
    /// The squared norm of each chunk of the gradients.
    norms: Buffer<f32>,
    /// The number of this rank's shard whose gradients come next.
    pass: usize,
}

impl<M, R: UpdateRule> TrainState<M, R> {
    /// Creates a train state like [`TrainState::new`] in a group whose ranks keep slices of the
    /// weights, of the optimizer's state and of the gradients (ZeRO-3). The weights after an update
    /// have the bits of [`TrainState::in_group`] with as many shards.
    ///
    /// Each block of the model is gathered before it is used, and replaced after it. A block is the
    /// parameters whose names are equal up to their first number, such as `blocks.3.`. Neighboring
    /// parameters without a number are one block too. Each batch has one part for each shard. Rank
    /// r computes the shards r, r + ranks, and so on.
    ///
    /// Only eager steps are possible. Everything that reads weights gathers them, so all ranks must
    /// do it together: evaluations, [`Parameters::read`] and [`Parameters::sha256`]. A group of one
    /// rank keeps everything, as in [`TrainState::in_group`].
    ///
    /// Memory: a rank keeps its share of the weights, state and gradients, and for each doubling of
    /// its shards one more share of the gradients. In addition it has two of the largest block's
    /// weights, and the gradients of the blocks whose backward pass runs.
    ///
    /// # Errors
    /// The errors of [`TrainState::new`] and [`TrainState::in_group`].
    /// [`Error::Misuse`] for a rule that needs whole parameters.
    #[track_caller]
    pub fn sharded<S: Cast>(
        device: &Device,
        model: M,
        spec: &ParameterSpec,
        seed: u64,
        rule: R,
        group: &Group,
        shards: usize,
    ) -> Result<Self>
    where
        M: Model<S>,
    {
        let site = Location::caller();
        if group.ranks() == 1 {
            return Self::new(device, model, spec, seed, rule)?.in_group(group, shards);
        }
        let layout = Arc::new(Layout::new(group, spec));
        let kept = layout.kept[group.rank()].clone();
        let made = || {
            let gather = Arc::clone(&layout) as Arc<dyn GatherWeights>;
            let parameters = Parameters::sharded(device, spec, seed, kept, layout.units.clone(), gather)?;
            let parameters = if <S as Element>::NAME == bf16::NAME { parameters.with_bf16_copy()? } else { parameters };
            let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, rule)?);
            if optimizer.needs_whole_parameters() {
                let expected = "a rule that updates each weight by itself, because ranks keep slices: use `in_group`";
                return Err(Error::misuse("sharded", expected, format!("`{}`", optimizer.name())));
            }
            Ok((parameters, gradients, optimizer))
        };
        let (parameters, gradients, optimizer) = group.broadcast_error(made())?;
        let ranks = Ranks::new("sharded", (group.clone(), shards), &parameters, &optimizer, site)?;
        let sync = group.broadcast_error(Sharded::new(ranks, layout, &parameters))?;
        Ok(Self {
            model,
            parameters,
            gradients,
            optimizer,
            precision: Precision::default(),
            generator: None,
            monitored: None,
            sync: Box::new(sync),
        })
    }
}

/// The gradients of units, in the type in which gradients are stored.
#[derive(Debug)]
enum AnyUnits {
    F32(UnitGradients<f32>),
    Bf16(UnitGradients<bf16>),
}

/// The gradients of the units of which a backward pass has computed a part, and the sums.
#[derive(Debug)]
struct UnitGradients<S: Summed> {
    device: Device,
    slots: Vec<Slot<S>>,
    sums: Sums<S>,
}

/// Memory for the gradients of a unit.
#[derive(Debug)]
struct Slot<S: Summed> {
    values: Buffer<S>,
    /// The unit, and the number of its parameters whose gradients are still to come.
    open: Option<(usize, usize)>,
}

impl<S: Summed> UnitGradients<S> {
    fn new(device: &Device, sums: Sums<S>) -> Self {
        Self { device: device.clone(), slots: Vec::new(), sums }
    }

    /// Receives the gradient of elements of a unit. When the unit is complete, exchanges it, and
    /// adds the sum over ranks to those of earlier passes.
    fn consume<'s>(
        &mut self,
        step: &Step<'s>,
        (layout, pass): (&Layout, usize),
        elements: &Range<usize>,
        gradient: &Lent<'_, 's>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let number = layout.units.partition_point(|unit| unit.end <= elements.start);
        let Some(unit) = layout.units.get(number).filter(|unit| elements.end <= unit.end) else {
            let expected = "gradients of one block at a time, because ranks keep slices: stack only its parameters";
            return Err(Error::misuse("backward", expected, format!("elements {elements:?}, of several blocks")));
        };
        let count =
            |range: &Range<usize>| layout.spec.entries().iter().filter(|entry| range.contains(&entry.start())).count();
        let at = self.slot(step, layout, number, count(unit))?;
        let slot = &mut self.slots[at];
        let all = [slot.values.len()];
        let part = elements.start - unit.start..elements.end - unit.start;
        S::round_into(step, gradient, &mut step.lend_mut(&mut slot.values, all)?.part(part))?;
        let left = slot.open.map_or(0, |(_, left)| left).saturating_sub(count(elements));
        slot.open = (left > 0).then_some((number, left));
        if left > 0 {
            return Ok(());
        }
        layout.agree("sum_gradients", unit.end)?;
        let (own, ranks) = (layout.own(), layout.kept.len());
        let mine = own.places(unit);
        let region = S::any(&self.slots[at].values);
        let of_unit =
            |(part, _): (Range<usize>, usize)| region.words_of(part.start - unit.start..part.end - unit.start);
        let to_rank = |to: usize| layout.kept[to].within(unit).map(move |part| (to, of_unit(part)));
        let sends: Vec<OfRank> = (0..ranks).flat_map(to_rank).collect();
        let parts = S::any(&self.sums.parts[0]);
        let from_rank = |from: usize| {
            let first = from * layout.pitch;
            let place =
                |(part, at): (Range<usize>, usize)| first + at - mine.start..first + at - mine.start + part.len();
            own.within(unit).map(|part| (from, parts.words_of(place(part)))).collect::<Vec<_>>()
        };
        let receives: Vec<OfRank> = (0..ranks).flat_map(from_rank).collect();
        // SAFETY: the slots and the parts are buffers of this train state, which a device frees in
        // stream order.
        unsafe { layout.group.exchange(&sends, &receives)? };
        if mine.is_empty() {
            return Ok(());
        }
        let mut sum = gradients.lend_flat_mut::<S>(step)?.part(mine.clone());
        S::sum_ranks_into(step, &mut self.sums.parts[0], [ranks, layout.pitch], &mut sum)?;
        self.sums.fold(step, gradients, pass, mine)
    }

    /// Returns the number of the slot of a unit that has this many parameters. An empty slot begins with zeros,
    /// which stay in the padding.
    fn slot(&mut self, step: &Step<'_>, layout: &Layout, unit: usize, parameters: usize) -> Result<usize> {
        let open = |slot: &Slot<S>| slot.open.is_some_and(|(number, _)| number == unit);
        let found = self.slots.iter().position(open);
        let at = match found.or_else(|| self.slots.iter().position(|slot| slot.open.is_none())) {
            Some(at) => at,
            None => {
                let most = layout.units.iter().map(Range::len).max().unwrap_or(RUN);
                self.slots.push(Slot { values: Buffer::zeros(&self.device, most)?, open: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[at];
        if slot.open.is_none() {
            let all = [slot.values.len()];
            ops::fill_into(step, &mut step.lend_mut(&mut slot.values, all)?, 0.0)?;
            slot.open = Some((unit, parameters));
        }
        Ok(at)
    }

    /// Writes the squared norms of the chunks of this rank's sums.
    fn norms_into(step: &Step<'_>, own: &Kept, gradients: &mut Gradients, norms: &mut Buffer<f32>) -> Result<()> {
        let chunks = [norms.len()];
        let mut place = 0;
        for slice in own.ranges() {
            let sum = gradients.lend_flat_mut::<S>(step)?.part(place..place + slice.len());
            let mut norms = step.lend_mut(norms, chunks)?.part(Slices::chunks_in(slice));
            internals::squared_norms_into(step, &sum, &mut norms)?;
            place += slice.len();
        }
        Ok(())
    }
}

/// The consumer of the gradients of a shard.
struct Consumer<'c> {
    sharded: &'c mut Sharded,
    gradients: &'c mut Gradients,
}

impl GradientConsumer for Consumer<'_> {
    fn consume<'s>(
        &mut self,
        step: &Step<'s>,
        elements: Range<usize>,
        _: Option<LentMasters<'_, 's>>,
        gradient: Lent<'_, 's>,
    ) -> Result<()> {
        let Sharded { layout, units, pass, .. } = &mut *self.sharded;
        let at = (&**layout, *pass);
        match units {
            AnyUnits::F32(units) => units.consume(step, at, &elements, &gradient, self.gradients),
            AnyUnits::Bf16(units) => units.consume(step, at, &elements, &gradient, self.gradients),
        }
    }
}

impl Sharded {
    fn new(ranks: Ranks, layout: Arc<Layout>, parameters: &Parameters) -> Result<Self> {
        let parts = [layout.kept.len() * layout.pitch];
        let units = match AnySums::zeros(parameters, ranks.own_shards(), &parts)? {
            AnySums::F32(sums) => AnyUnits::F32(UnitGradients::new(parameters.device(), sums)),
            AnySums::Bf16(sums) => AnyUnits::Bf16(UnitGradients::new(parameters.device(), sums)),
        };
        let norms = Buffer::zeros(parameters.device(), layout.chunks)?;
        Ok(Self { ranks, layout, units, norms, pass: 0 })
    }
}

impl<R: UpdateRule> GradientSync<R> for Sharded {
    fn is_group(&self) -> bool {
        true
    }

    fn ranks(&self) -> usize {
        self.layout.kept.len()
    }

    fn agree_on_settings(
        &self,
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        settings: &dyn Fn(usize) -> Result<agreement::WeightSettings>,
        site: CallSite,
    ) -> Result<()> {
        optimizer.check_kept(parameters.kept())?;
        self.ranks.agree_on_settings(settings, site)
    }

    fn own_parts(
        &mut self,
        optimizer: &Optimizer<R>,
        lens: &[usize],
        ending: Ending,
        site: CallSite,
    ) -> Result<OwnParts> {
        let (shards, ranks) = (self.ranks.shards, self.layout.kept.len());
        if lens.len() != shards {
            let expected = format!(
                "a batch of {shards} parts, one for each shard, because ranks keep slices of gradients: \
                 use as many shards as parts"
            );
            return Err(Error::misuse("update", expected, format!("{} parts", lens.len())));
        }
        let stop = self.ranks.agree_on_update(optimizer, lens, ending, site)?;
        self.pass = 0;
        // An update that failed may have left some.
        match &mut self.units {
            AnyUnits::F32(units) => units.slots.iter_mut().for_each(|slot| slot.open = None),
            AnyUnits::Bf16(units) => units.slots.iter_mut().for_each(|slot| slot.open = None),
        }
        let own = (self.ranks.group.rank()..shards).step_by(ranks).map(|shard| shard..shard + 1);
        Ok(OwnParts { shards: own.collect(), stop })
    }

    fn consumer<'c>(&'c mut self, gradients: &'c mut Gradients) -> Option<Box<dyn GradientConsumer + 'c>> {
        Some(Box::new(Consumer { sharded: self, gradients }))
    }

    fn shard_ready(&mut self, _: &mut Arena, _: &mut Gradients, _: usize, _: bool) -> Result<()> {
        self.pass += 1;
        Ok(())
    }

    /// The sums are already on the ranks that keep them. Each rank gets the squared norms of all
    /// chunks.
    fn finish(&mut self, arena: &mut Arena, gradients: &mut Gradients, wanted: Option<Range<usize>>) -> Result<()> {
        if wanted.is_some() {
            let expected = "an update, because no rank has all gradients: use `in_group` to inspect them";
            return Err(Error::misuse("accumulate", expected, "gradients of whole parameters"));
        }
        let Self { layout, units, norms, .. } = self;
        arena.step(|step| {
            let _phase = step.enter(Phase::Optimizer);
            match units {
                AnyUnits::F32(_) => UnitGradients::<f32>::norms_into(step, layout.own(), gradients, norms),
                AnyUnits::Bf16(_) => UnitGradients::<bf16>::norms_into(step, layout.own(), gradients, norms),
            }
        })?;
        let norms = norms.memory();
        let chunks = |slice: &Range<usize>| {
            let chunks = Slices::chunks_in(slice);
            norms.part(chunks.start, chunks.len())
        };
        // SAFETY: the norms are a buffer of this train state, which a device frees in stream order.
        unsafe { layout.group.gather(|rank| layout.kept[rank].ranges().iter().map(chunks).collect()) }
    }

    /// Each rank updates its own slices. They are gathered when an op reads them.
    fn update(
        &self,
        arena: &mut Arena,
        ticket: UpdateTicket,
        Updated { parameters, gradients, optimizer }: Updated<'_, R>,
        _: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()> {
        arena.step(|step| {
            let _phase = step.enter(Phase::Optimizer);
            let norm = ops::sum(step, &step.lend(&self.norms, [self.norms.len()])?)?;
            optimizer.apply_slices(ticket, step, parameters, gradients, &norm)?;
            metric(step, &norm)
        })
    }

    fn losses(&self, own: &[f32], norms: &[f32], site: CallSite) -> Result<Vec<f32>> {
        let of_ranks = self.ranks.losses(own, norms, site)?;
        let values = own.len() / self.ranks.own_shards();
        let passes = (0..self.ranks.own_shards()).map(|pass| pass * values..(pass + 1) * values);
        Ok(passes.flat_map(|pass| of_ranks.iter().flat_map(move |values| values[pass.clone()].to_vec())).collect())
    }

    fn on_error(&self, error: Error) -> Error {
        self.ranks.on_error(error)
    }

    /// Rank 0 writes, and the other ranks send it their slices piece by piece.
    fn save(
        &self,
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        write: &dyn Fn(&[State], &dyn ReadRegion) -> Result<()>,
        site: CallSite,
    ) -> Result<()> {
        let group = &self.ranks.group;
        group.agree("checkpoint", self.layout.spec.elements(), &[], site)?;
        let device = parameters.device();
        group.broadcast_error(write(optimizer.kept_state(), &Pieces { layout: &self.layout, device }))?;
        // All ranks wait here until the file exists.
        group.agree("checkpoint written", self.layout.spec.elements(), &[], site).map(drop)
    }

    fn restore(&mut self, checkpoint: &Checkpoint, site: CallSite) -> Result<()> {
        self.ranks.restore(checkpoint, site)
    }
}
