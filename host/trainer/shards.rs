//! One update by all ranks of a group: the gradients of shards, their sum in one tree, each rank's slice of the update.
//!
//! ```text
//! shards             0     1     2     3          made alone, by the rank that has them
//! rank 0 waiting     0  ->  0+1
//! rank 1 waiting                 2  ->  2+3
//! slice 0            (0+1) + (2+3)                 of each bucket: on rank 0, which updates these weights
//! slice 1            (0+1) + (2+3)                 on rank 1
//! weights            0 | 1 | 0 | 1 | ..            gathered by all
//! ```
//! Gradients travel in buckets, in one order on all ranks: of captured steps each as soon as the
//! last shard's backward pass will not use it again, concurrently with the rest of the pass; else after
//! it.
//!
//! Invariant: the tree is over the shards, so the bits are those of one rank that has all of them. No kernel sums across the boundary
//! of a shard, a chunk of the norm or an element of the update.

#![forbid(unsafe_code)]

use super::agreement;
use crate::error::{Error, Result};
use crate::group::agreement::{Settings, expect_same, understood};
use crate::group::{Group, Slices};
use crate::memory::{Arena, Buffer};
use crate::ops;
use crate::optim::{Optimizer, UpdateRule};
use crate::params::{Gradients, LayoutEntry, Parameter, Parameters};
use crate::report::Phase;
use crate::shortage::MemoryShortage;
use crate::step::Eager;
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most ranks of a group: what one launch sums.
const MOST_RANKS: usize = 64;

/// Ends a metric of an update: reads it, or has it copied to where it lands.
pub(super) type Metric<'m> = dyn for<'s> FnMut(&Eager<'s>, &Tensor<'s>) -> Result<()> + 'm;

/// Of which elements all ranks get the sums of the gradients, beside their own slices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// Those of the watched parameter.
    Watched,
    /// All.
    All,
}

/// What a learner of a group has beside its weights: which shards of each batch are its own, and memory for their sums.
#[derive(Debug)]
pub struct Shards {
    group: Group,
    shards: usize,
    slices: Slices,
    /// The sums of 1, 2, 4, .. shards that wait for their neighbours.
    waiting: Vec<Buffer<f32>>,
    among: Option<Among>,
    /// The digest of the optimiser's state before it was cut into slices; none where that was all
    /// zero, or is a checkpoint's, which was compared as a whole.
    state: Option<String>,
    /// Whether all ranks have compared all that decides the weights since anything of it could
    /// change.
    agreed: AtomicBool,
}

/// The message of a rank to the others before an update.
#[derive(Serialize, Deserialize)]
struct BeforeUpdate {
    /// True if training stops after the update.
    stop: bool,
    short: Option<MemoryShortage>,
    settings: Settings,
}

/// What several ranks need.
#[derive(Debug)]
struct Among {
    /// This rank's slice of each rank's sum, `[ranks, pitch]`, of each bucket.
    parts: Vec<Buffer<f32>>,
    /// The squared norm of each chunk of the gradients.
    norms: Buffer<f32>,
    /// How many buckets travel already in this update.
    travelling: usize,
}

impl Shards {
    /// Shares out the batch in so many shards, and the optimiser's state in a slice for each rank.
    #[track_caller]
    pub(super) fn new<R: UpdateRule>(
        group: Group,
        shards: usize,
        parameters: &Parameters,
        optimizer: &mut Optimizer<R>,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.ranks());
        if !shards.is_power_of_two() || !shards.is_multiple_of(ranks) || ranks > MOST_RANKS {
            let expected = format!("shards: a power of two that the ranks divide, at most {MOST_RANKS} of these");
            return Err(Error::misuse("in_group", expected, format!("{shards} shards of {ranks} ranks")));
        }
        let device = parameters.flat().device();
        let elements = parameters.layout().elements();
        let state = if ranks > 1 {
            let state = group.told(optimizer.state_sha256())?;
            let settings = group.told(agreement::of_weights(shards, parameters, optimizer))?;
            group.compare("in_group", &with_state(settings, state.as_deref()), Location::caller())?;
            state
        } else {
            None
        };
        let starts = parameters.layout().entries().iter().map(LayoutEntry::start);
        let slices = Slices::new(starts, elements, ranks);
        let own = shards / ranks;
        let waiting = (0..own.ilog2()).map(|_| Buffer::zeros(device, elements)).collect::<Result<_>>()?;
        let among = if ranks == 1 {
            None
        } else {
            optimizer.keep(slices.of(rank))?;
            let of_bucket = |bucket| Buffer::zeros(device, ranks * slices.pitch(bucket));
            let parts = (0..slices.buckets().len()).map(of_bucket).collect::<Result<_>>()?;
            Some(Among { parts, norms: Buffer::zeros(device, slices.chunks())?, travelling: 0 })
        };
        Ok(Self { group, shards, slices, waiting, among, state, agreed: AtomicBool::new(ranks == 1) })
    }

    /// The number of shards.
    pub(super) fn count(&self) -> usize {
        self.shards
    }

    /// Compares `settings` on all ranks, unless that was done since the last [`Shards::restored`].
    #[track_caller]
    pub(super) fn agree(&self, settings: impl FnOnce() -> Result<Settings>) -> Result<()> {
        if !self.agreed.load(Ordering::Relaxed) {
            let settings = with_state(settings()?, self.state.as_deref());
            self.group.compare("agree_on_settings", &settings, Location::caller())?;
            self.agreed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Weights and state are those of a checkpoint now, which all ranks have alike: before the next
    /// update the ranks compare all settings anew.
    pub(super) fn restored(&mut self) {
        (self.state, self.agreed) = (None, AtomicBool::new(self.group.ranks() == 1));
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// An error unless these are the shards of a learner of such parameters and such an optimiser.
    pub(super) fn check<R: UpdateRule>(&self, parameters: &Parameters, optimizer: &Optimizer<R>) -> Result<()> {
        let all = 0..self.slices.elements();
        let fits = match &self.among {
            Some(_) => optimizer.slices() == self.slices.of(self.group.rank()),
            None => optimizer.slices() == std::slice::from_ref(&all),
        };
        if parameters.layout().elements() == all.end && fits {
            return Ok(());
        }
        let expected = "a learner with the shards and the optimiser that `in_group` has made for it";
        Err(Error::misuse("update", expected, "another learner's"))
    }

    /// The own shards' parts of a batch, whose parts have these lengths: none for some, where the batch has fewer samples than shards.
    pub(super) fn own(&self, lens: &[usize]) -> Result<Vec<Range<usize>>> {
        let (parts, shards) = (lens.len(), self.shards);
        if parts < shards && lens.iter().any(|&samples| samples > 1) {
            let expected = format!("a batch of at least {shards} parts, as there are shards, or parts of one sample");
            return Err(Error::misuse("update", expected, format!("{parts} parts of {lens:?} samples")));
        }
        Ok(self.group.own_parts(shards, parts))
    }

    /// Agrees with all ranks on an update by so many samples. Whether one of them is to stop behind it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] when the ranks have other settings for the update.
    /// [`Error::MemoryShortage`] on all ranks when one of them says that it is short: nobody makes the update.
    #[track_caller]
    pub(super) fn agree_on_update(
        &mut self,
        samples: usize,
        settings: Settings,
        (stop, short): (bool, Option<MemoryShortage>),
    ) -> Result<bool> {
        if let Some(among) = &mut self.among {
            among.travelling = 0;
        }
        let rank = Some(self.group.rank());
        let short = short.map(|shortage| MemoryShortage { rank, ..shortage });
        let word = serde_json::to_vec(&BeforeUpdate { stop, short, settings }).expect("texts and figures");
        let words = self.group.agree("update", samples, &word, Location::caller())?;
        let words = words.iter().map(|word| understood("update", word)).collect::<Result<Vec<BeforeUpdate>>>()?;
        let shortage = words.iter().find_map(|word| word.short.clone());
        let stop = words.iter().any(|word| word.stop);
        expect_same(&words.into_iter().map(|word| word.settings).collect::<Vec<_>>())?;
        match shortage {
            Some(shortage) => Err(Error::MemoryShortage(Box::new(shortage))),
            None => Ok(stop),
        }
    }

    /// The losses of all parts of a batch in its order, of which these are the own ones. `norms` must be the same on all ranks, bit for
    /// bit.
    #[track_caller]
    pub(super) fn losses_of_all(&self, losses: &[f32], norms: &[f32]) -> Result<Vec<f32>> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let own = bytes(norms);
        let words =
            self.group.agree("metrics", norms.len(), &[&own[..], &bytes(losses)].concat(), Location::caller())?;
        if let Some(rank) = words.iter().position(|word| !word.starts_with(&own)) {
            let expected = format!("the same squared norms of the gradients on all ranks, {norms:?} here");
            let got = format!("other bits on rank {rank}: distrust its device, or this one");
            return Err(Error::misuse("group", expected, got));
        }
        let losses = words.iter().flat_map(|word| word[own.len()..].as_chunks().0);
        Ok(losses.map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// The gradients that travel together, in the order of their travel: none where there is one rank.
    pub(super) fn buckets(&self) -> &[Range<usize>] {
        self.among.as_ref().map_or(&[], |_| self.slices.buckets())
    }

    /// Adds the gradients of this rank's shard `number`, zero if it `is_empty`, to those of its neighbours before it, as far as the tree goes, and
    /// keeps what must wait for a neighbour behind it. What travels already has been added.
    pub(super) fn fold(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        (number, is_empty): (usize, bool),
    ) -> Result<()> {
        let rest = match &self.among {
            Some(Among { travelling: travelling @ 1.., .. }) => self.slices.buckets()[travelling - 1].start,
            _ => self.slices.elements(),
        };
        if is_empty {
            arena.step(|step| {
                let _phase = step.enter(Phase::Backward);
                gradients.zero(step)
            })?;
        }
        self.fold_part(arena, gradients, number, 0..rest)
    }

    /// The same of a part of the gradients.
    fn fold_part(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        number: usize,
        part: Range<usize>,
    ) -> Result<()> {
        let own = self.shards / self.group.ranks();
        if own == 1 || part.is_empty() {
            return Ok(());
        }
        arena.step(|step| {
            let _phase = step.enter(Phase::Backward);
            let elements = [self.slices.elements()];
            let mut gradients = gradients.lend_flat_mut(step)?.part(part.clone());
            let ready = number.trailing_ones() as usize;
            for waiting in &self.waiting[..ready.min(self.waiting.len())] {
                let waiting = step.lend(waiting, elements)?.part(part.clone());
                ops::add_assign(step, &mut gradients, &waiting)?;
            }
            match self.waiting.get_mut(ready) {
                Some(waiting) if number + 1 < own => {
                    let mut waiting = step.lend_mut(waiting, elements)?.part(part.clone());
                    ops::copy_into(step, &gradients, &mut waiting)
                }
                _ => Ok(()),
            }
        })
    }

    /// Has the first `complete` buckets of the last shard travel, as far as they do not yet, each when its neighbours have been added. What is
    /// queued next, up to the sum, runs concurrently and neither writes nor reads them, nor `parts`.
    pub(super) fn travel(&mut self, arena: &mut Arena, gradients: &mut Gradients, complete: usize) -> Result<()> {
        let last = self.shards / self.group.ranks() - 1;
        let travelling = self.among.as_ref().map_or(complete, |among| among.travelling);
        for number in travelling..complete {
            let bucket = self.buckets()[number].clone();
            self.fold_part(arena, gradients, last, bucket)?;
            self.exchange(gradients, number)?;
        }
        Ok(())
    }

    /// Queues the exchange of a bucket, the next one: of each rank's slice in it to that rank.
    fn exchange(&mut self, gradients: &Gradients, number: usize) -> Result<()> {
        let Self { group, slices, among, .. } = self;
        let Some(Among { parts, travelling, .. }) = among else { return Ok(()) };
        let (flat, parts, ranks) = (gradients.flat().memory(), parts[number].memory(), 0..group.ranks());
        let part = |to: usize| {
            let slice = slices.of_bucket(number, to);
            (to, flat.part(slice.start, slice.len()))
        };
        let sends: Vec<_> = ranks.clone().map(part).collect();
        let own = slices.of_bucket(number, group.rank()).len();
        let receives: Vec<_> = ranks.map(|from| (from, parts.part(from * slices.pitch(number), own))).collect();
        group.exchange_beside(&sends, &receives)?;
        *travelling = number + 1;
        Ok(())
    }

    /// Sums all ranks' gradients: each gets its slices of the sum, and the squared norms of all chunks. `wanted` are elements whose sums
    /// all ranks get.
    pub(super) fn sum(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        wanted: Option<Range<usize>>,
    ) -> Result<()> {
        // All have been added to their neighbours.
        let travelling = self.among.as_ref().map_or(0, |among| among.travelling);
        (travelling..self.buckets().len()).try_for_each(|number| self.exchange(gradients, number))?;
        let Self { group, slices, among, .. } = self;
        let Some(Among { parts, norms, .. }) = among else { return Ok(()) };
        group.follow()?;
        let (rank, ranks, chunks) = (group.rank(), group.ranks(), [norms.len()]);
        arena.step(|step| {
            let _phase = step.enter(Phase::Optimizer);
            for (bucket, parts) in parts.iter().enumerate() {
                let own = slices.of_bucket(bucket, rank);
                if own.is_empty() {
                    continue;
                }
                let mut sum = gradients.lend_flat_mut(step)?.part(own.clone());
                let parts = step.lend(parts, [ranks, slices.pitch(bucket)])?;
                ops::sum_parts_into(step, &parts, &mut sum)?;
                let mut norms = step.lend_mut(norms, chunks)?.part(Slices::chunks_in(&own));
                ops::squared_norms_into(step, &sum, &mut norms)?;
            }
            Ok(())
        })?;
        let flat = gradients.flat().memory();
        group.gather(norms.memory(), |rank| slices.of(rank).iter().map(Slices::chunks_in).collect())?;
        wanted.map_or(Ok(()), |wanted| group.gather(flat, |rank| slices.within(&wanted, rank)))
    }

    /// Makes the update that is set up, each rank that of its slices, and gathers the weights. The squared norm of all gradients goes to
    /// `metric`, behind it that of the watched parameter's.
    pub(super) fn update<R: UpdateRule>(
        &self,
        arena: &mut Arena,
        (parameters, gradients): (&mut Parameters, &mut Gradients),
        optimizer: &mut Optimizer<R>,
        watched: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()> {
        arena.step(|step| {
            let watched = watched.map(|watched| {
                let _phase = step.enter(Phase::Backward);
                ops::squared_norm(step, &gradients.lend_mut(step, watched)?)
            });
            let watched = watched.transpose()?;
            let norm = match &self.among {
                None => optimizer.apply_with_norm(step, parameters, gradients)?,
                Some(Among { norms, .. }) => {
                    let _phase = step.enter(Phase::Optimizer);
                    let norm = ops::sum(step, &step.lend(norms, [norms.len()])?)?;
                    optimizer.apply_slices(step, parameters, gradients, &norm)?;
                    norm
                }
            };
            metric(step, &norm)?;
            watched.map_or(Ok(()), |watched| metric(step, &watched))
        })?;
        if self.among.is_some() {
            self.group.gather(parameters.flat().memory(), |rank| self.slices.of(rank))?;
            arena.step(|step| parameters.queue_copy(step))?;
        }
        Ok(())
    }

    /// Writes a checkpoint: rank 0, by `write`, with the optimiser's state of all slices. All ranks end as it does.
    #[track_caller]
    pub(super) fn save<R: UpdateRule>(
        &self,
        optimizer: &Optimizer<R>,
        write: impl FnOnce(&[Buffer<f32>]) -> Result<()>,
    ) -> Result<()> {
        let location = Location::caller();
        self.group.agree("checkpoint", self.slices.elements(), &[], location)?;
        let whole: Vec<Buffer<f32>> = match &self.among {
            None => Vec::new(),
            Some(_) => optimizer.state().iter().map(|state| self.whole(state)).collect::<Result<_>>()?,
        };
        if self.group.rank() == 0 {
            self.group.told(write(if self.among.is_some() { &whole } else { optimizer.state() }))?;
        }
        // Nobody goes on before the file is there.
        self.group.agree("checkpoint written", self.slices.elements(), &[], location).map(drop)
    }

    /// A part of the optimiser's state, of all slices.
    fn whole(&self, state: &Buffer<f32>) -> Result<Buffer<f32>> {
        let Self { group, slices, .. } = self;
        let (ranks, mut start) = (0..group.ranks(), 0);
        let whole = Buffer::zeros(state.device(), slices.elements())?;
        let of_slice = |slice: Range<usize>| {
            start += slice.len();
            state.memory().part(start - slice.len(), slice.len())
        };
        let own: Vec<_> = slices.of(group.rank()).into_iter().map(of_slice).collect();
        let sends: Vec<_> = ranks.clone().flat_map(|to| own.iter().map(move |&part| (to, part))).collect();
        let place = |from: usize, slice: Range<usize>| (from, whole.memory().part(slice.start, slice.len()));
        let of_rank = |from: usize| slices.of(from).into_iter().map(move |slice| place(from, slice));
        let receives: Vec<_> = ranks.flat_map(of_rank).collect();
        group.exchange(&sends, &receives)?;
        Ok(whole)
    }
}

/// The settings, and the digest of the optimiser's state.
fn with_state(mut settings: Settings, state: Option<&str>) -> Settings {
    state.into_iter().for_each(|state| settings.add("digest of the optimizer's state", state));
    settings
}
