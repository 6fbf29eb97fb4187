//! Updates the weights by all ranks of a group: the gradients of each shard, their sum in one tree,
//! and each rank's slice of the update.
//!
//! ```text
//! shards             0     1     2     3          computed by the rank that owns them
//! rank 0 waiting     0  ->  0+1
//! rank 1 waiting                 2  ->  2+3
//! slice 0            (0+1) + (2+3)                 of each bucket: on rank 0, which updates its weights
//! slice 1            (0+1) + (2+3)                 on rank 1
//! weights            0 | 1 | 0 | 1 | ..            gathered by all
//! ```
//! Gradients travel in buckets, in the same order on all ranks. In captured steps, each bucket
//! starts as soon as the last shard's backward pass is done with it. It then travels concurrently
//! with the rest of the pass. Otherwise the buckets travel after it.
//!
//! Invariant: the tree is defined over the shards, so the bits equal those of one rank that owns
//! all shards. No kernel sums across the boundary of a shard, of a norm's chunk or of an update's
//! element.

use super::agreement;
use crate::optim::{Optimizer, UpdateRule};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use stepscope_core::arena::{Arena, Buffer};
use stepscope_core::error::{Error, Result};
use stepscope_core::ops;
use stepscope_core::params::{Gradients, Parameter, ParameterEntry, Parameters};
use stepscope_core::report::Phase;
use stepscope_core::shortage::MemoryShortage;
use stepscope_core::step::EagerStep;
use stepscope_core::tensor::Tensor;
use stepscope_group::agreement::{Settings, expect_same, understood};
use stepscope_group::{Group, Slices};

/// The largest number of ranks in a group, limited by what one launch can sum.
const MOST_RANKS: usize = 64;

/// Consumes a metric of an update: reads it, or queues its copy to the readback.
pub(super) type Metric<'m> = dyn for<'s> FnMut(&EagerStep<'s>, &Tensor<'s>) -> Result<()> + 'm;

/// The elements whose gradient sums every rank receives, in addition to its own slices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// The elements of the monitored parameter.
    Watched,
    /// All elements.
    All,
}

/// The group part of a train state: the shards of each batch that this rank owns, and memory for
/// their sums.
#[derive(Debug)]
pub struct Shards {
    group: Group,
    shards: usize,
    slices: Slices,
    /// The sums of 1, 2, 4, .. shards that wait for their neighbors.
    waiting: Vec<Buffer<f32>>,
    among: Option<PeerBuffers>,
    /// The digest of the optimizer's state before it was cut into slices. None if the state was all
    /// zero, or came from a checkpoint, which is compared as a whole.
    state: Option<String>,
    /// True if all ranks have compared everything that decides the weights since any of it could
    /// change.
    agreed: AtomicBool,
}

/// The message that each rank sends to the others before an update.
#[derive(Serialize, Deserialize)]
struct BeforeUpdate {
    /// True if training stops after the update.
    stop: bool,
    short: Option<MemoryShortage>,
    settings: Settings,
}

/// The buffers that only groups of several ranks need.
#[derive(Debug)]
struct PeerBuffers {
    /// This rank's slice of each rank's sum, `[ranks, pitch]`, one per bucket.
    parts: Vec<Buffer<f32>>,
    /// The squared norm of each chunk of the gradients.
    norms: Buffer<f32>,
    /// The number of buckets whose exchange has begun in this update.
    travelling: usize,
}

impl Shards {
    /// Splits the batch into `shards` shards, and the optimizer's state into one slice per rank.
    #[track_caller]
    pub(super) fn new<R: UpdateRule>(
        group: Group,
        shards: usize,
        parameters: &Parameters,
        optimizer: &mut Optimizer<R>,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.ranks());
        if !shards.is_power_of_two() || !shards.is_multiple_of(ranks) || ranks > MOST_RANKS {
            let expected = format!("shards: a power of two and a multiple of the ranks, of which at most {MOST_RANKS}");
            return Err(Error::misuse("in_group", expected, format!("{shards} shards for {ranks} ranks")));
        }
        let device = parameters.flat().device();
        let elements = parameters.layout().elements();
        let state = if ranks > 1 {
            let state = group.broadcast_error(optimizer.state_sha256())?;
            let settings = group.broadcast_error(agreement::of_weights(shards, parameters, optimizer))?;
            group.compare("in_group", &with_state(settings, state.as_deref()), Location::caller())?;
            state
        } else {
            None
        };
        let starts = parameters.layout().entries().iter().map(ParameterEntry::start);
        let slices = Slices::new(starts, elements, ranks);
        let own = shards / ranks;
        let waiting = (0..own.ilog2()).map(|_| Buffer::zeros(device, elements)).collect::<Result<_>>()?;
        let among = if ranks == 1 {
            None
        } else {
            optimizer.keep(slices.of(rank))?;
            let of_bucket = |bucket| Buffer::zeros(device, ranks * slices.pitch(bucket));
            let parts = (0..slices.buckets().len()).map(of_bucket).collect::<Result<_>>()?;
            Some(PeerBuffers { parts, norms: Buffer::zeros(device, slices.chunks())?, travelling: 0 })
        };
        Ok(Self { group, shards, slices, waiting, among, state, agreed: AtomicBool::new(ranks == 1) })
    }

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

    /// Records that weights and state now come from a checkpoint, which is equal on all ranks. The
    /// ranks compare all settings again before the next update.
    pub(super) fn restored(&mut self) {
        (self.state, self.agreed) = (None, AtomicBool::new(self.group.ranks() == 1));
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// Returns an error unless these shards were made for these parameters and this optimizer.
    pub(super) fn check<R: UpdateRule>(&self, parameters: &Parameters, optimizer: &Optimizer<R>) -> Result<()> {
        let all = 0..self.slices.elements();
        let fits = match &self.among {
            Some(_) => optimizer.slices() == self.slices.of(self.group.rank()),
            None => optimizer.slices() == std::slice::from_ref(&all),
        };
        if parameters.layout().elements() == all.end && fits {
            return Ok(());
        }
        let expected = "a train state with the shards and the optimizer that `in_group` has made for it";
        Err(Error::misuse("update", expected, "those of another train state"))
    }

    /// Returns the parts of a batch that each of this rank's shards owns. `lens` are the lengths of
    /// the parts. A shard's range is empty if the batch has fewer samples than shards.
    pub(super) fn own(&self, lens: &[usize]) -> Result<Vec<Range<usize>>> {
        let (parts, shards) = (lens.len(), self.shards);
        if parts < shards && lens.iter().any(|&samples| samples > 1) {
            let expected = format!("a batch of at least {shards} parts, one for each shard, or parts of one sample");
            return Err(Error::misuse("update", expected, format!("{parts} parts of {lens:?} samples")));
        }
        Ok(self.group.own_parts(shards, parts))
    }

    /// Agrees with all ranks on an update by `samples` samples. Returns true if a rank wants to
    /// stop after it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks have different settings for the update.
    /// [`Error::MemoryShortage`] on all ranks if any rank reports a shortage. No rank then makes
    /// the update.
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

    /// Returns the losses of all parts of a batch in its order. `losses` are this rank's own parts.
    /// `norms` must be bit-identical on all ranks.
    #[track_caller]
    pub(super) fn losses_of_all(&self, losses: &[f32], norms: &[f32]) -> Result<Vec<f32>> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let own = bytes(norms);
        let words =
            self.group.agree("metrics", norms.len(), &[&own[..], &bytes(losses)].concat(), Location::caller())?;
        if let Some(rank) = words.iter().position(|word| !word.starts_with(&own)) {
            let expected = format!("the same squared norms of the gradients on all ranks, {norms:?} here");
            let got = format!("different bits on rank {rank}: its device, or this one, is unreliable");
            return Err(Error::misuse("group", expected, got));
        }
        let losses = words.iter().flat_map(|word| word[own.len()..].as_chunks().0);
        Ok(losses.map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// Returns the buckets of gradients in the order in which they travel. Empty with one rank.
    pub(super) fn buckets(&self) -> &[Range<usize>] {
        self.among.as_ref().map_or(&[], |_| self.slices.buckets())
    }

    /// Adds the gradients of this rank's shard `number` to those of its earlier neighbors, as far
    /// up the tree as they are complete. If `is_empty`, the gradients are zero. Keeps sums that
    /// must wait for a later neighbor. Buckets that already travel have been added before.
    pub(super) fn fold(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        (number, is_empty): (usize, bool),
    ) -> Result<()> {
        let rest = match &self.among {
            Some(PeerBuffers { travelling: travelling @ 1.., .. }) => self.slices.buckets()[travelling - 1].start,
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

    /// Folds a part of the gradients.
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

    /// Starts the exchange of the first `complete` buckets of the last shard, except those already
    /// traveling. Each bucket is first added to its neighbors. Work that is queued next, up to the
    /// sum, runs concurrently, and must neither read nor write these buckets or `parts`.
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

    /// Queues the exchange of the next bucket, which sends each rank its slice.
    fn exchange(&mut self, gradients: &Gradients, number: usize) -> Result<()> {
        let Self { group, slices, among, .. } = self;
        let Some(PeerBuffers { parts, travelling, .. }) = among else { return Ok(()) };
        let (flat, parts, ranks) = (gradients.flat().memory(), parts[number].memory(), 0..group.ranks());
        let part = |to: usize| {
            let slice = slices.of_bucket(number, to);
            (to, flat.part(slice.start, slice.len()))
        };
        let sends: Vec<_> = ranks.clone().map(part).collect();
        let own = slices.of_bucket(number, group.rank()).len();
        let receives: Vec<_> = ranks.map(|from| (from, parts.part(from * slices.pitch(number), own))).collect();
        // SAFETY: gradients and parts are buffers of this learner, which a device frees in stream
        // order. Until the link is followed, only an update whose gradients travel goes on. It
        // launches the folding of those that do not yet, and replays, which ask for the lends. What
        // an exchange receives is read by the sum, which follows the link. The update before has
        // read what it received by then, for an exchange runs after all work queued before.
        unsafe { group.exchange_beside(&sends, &receives)? };
        *travelling = number + 1;
        Ok(())
    }

    /// Sums the gradients of all ranks. Each rank gets its slices of the sum, and the squared norms
    /// of all chunks. All ranks get the sums of the `wanted` elements.
    pub(super) fn sum(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        wanted: Option<Range<usize>>,
    ) -> Result<()> {
        // All remaining buckets have been added to their neighbors.
        let travelling = self.among.as_ref().map_or(0, |among| among.travelling);
        (travelling..self.buckets().len()).try_for_each(|number| self.exchange(gradients, number))?;
        let Self { group, slices, among, .. } = self;
        let Some(PeerBuffers { parts, norms, .. }) = among else { return Ok(()) };
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
        // SAFETY: norms and gradients are buffers of this learner, which a device frees in stream
        // order.
        unsafe {
            group.gather(norms.memory(), |rank| slices.of(rank).iter().map(Slices::chunks_in).collect())?;
            wanted.map_or(Ok(()), |wanted| group.gather(flat, |rank| slices.within(&wanted, rank)))
        }
    }

    /// Makes the prepared update, each rank for its own slices, and gathers the weights. `metric`
    /// receives the squared norm of all gradients and then that of the monitored parameter.
    pub(super) fn update<R: UpdateRule>(
        &self,
        arena: &mut Arena,
        (parameters, gradients): (&mut Parameters, &mut Gradients),
        optimizer: &mut Optimizer<R>,
        monitored: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()> {
        arena.step(|step| {
            let monitored = monitored.map(|monitored| {
                let _phase = step.enter(Phase::Backward);
                ops::squared_norm(step, &gradients.lend_mut(step, monitored)?)
            });
            let monitored = monitored.transpose()?;
            let norm = match &self.among {
                None => optimizer.apply_with_norm(step, parameters, gradients)?,
                Some(PeerBuffers { norms, .. }) => {
                    let _phase = step.enter(Phase::Optimizer);
                    let norm = ops::sum(step, &step.lend(norms, [norms.len()])?)?;
                    optimizer.apply_slices(step, parameters, gradients, &norm)?;
                    norm
                }
            };
            metric(step, &norm)?;
            monitored.map_or(Ok(()), |monitored| metric(step, &monitored))
        })?;
        if self.among.is_some() {
            // SAFETY: the weights are a buffer of this learner, which a device frees in stream
            // order.
            unsafe { self.group.gather(parameters.flat().memory(), |rank| self.slices.of(rank)) }?;
            arena.step(|step| parameters.queue_copy(step))?;
        }
        Ok(())
    }

    /// Writes a checkpoint. Rank 0 calls `write` with the optimizer's state of all slices. All
    /// ranks return its result.
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
            self.group.broadcast_error(write(if self.among.is_some() { &whole } else { optimizer.state() }))?;
        }
        // All ranks wait here until the file exists.
        self.group.agree("checkpoint written", self.slices.elements(), &[], location).map(drop)
    }

    /// Gathers one part of the optimizer's state from all slices.
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
        // SAFETY: the state and the new buffer are freed in stream order.
        unsafe { group.exchange(&sends, &receives)? };
        Ok(whole)
    }
}

/// Returns the settings with the digest of the optimizer's state added.
fn with_state(mut settings: Settings, state: Option<&str>) -> Settings {
    state.into_iter().for_each(|state| settings.add("digest of the optimizer's state", state));
    settings
}
