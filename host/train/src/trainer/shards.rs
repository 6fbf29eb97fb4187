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
//! A rule that needs whole parameters has other slices for its update, which begin with a
//! parameter. Each rank then also receives the sums of its own parameters from the ranks that have
//! computed them.
//!
//! Invariant: the tree is defined over the shards, so the bits equal those of one rank that owns
//! all shards. No kernel sums across the boundary of a shard, of a norm's chunk or of an update's
//! element. If the rule needs whole parameters, its sums are within a parameter.

use super::agreement;
use super::model::TrainState;
use super::sums::AnySums;
use super::sync::{CallSite, Ending, GradientSync, Metric, OwnParts, Updated};
use crate::checkpoint::Checkpoint;
use crate::optim::{Optimizer, State, UpdateRule, UpdateTicket, words};
use kernels::update::RUN;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use stepscope_core::internals::{self, Memory, hex};
use stepscope_core::{
    Arena, Buffer, Error, Gradients, MemoryShortage, Parameter, ParameterEntry, Parameters, Phase, Result, ops,
};
use stepscope_group::agreement::{Settings, expect_same};
use stepscope_group::{Group, Slices};

/// The largest number of ranks in a group, limited by what one launch can sum.
const MOST_RANKS: usize = 64;

/// A rank of a group: the shards of each batch that it owns, and memory for their sums.
#[derive(Debug)]
pub(super) struct Shards {
    group: Group,
    shards: usize,
    slices: Slices,
    /// The elements that each rank updates: its slices, or whole parameters.
    updated: Vec<Vec<Range<usize>>>,
    sums: AnySums,
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
    /// The squared norm of each chunk of the gradients.
    norms: Buffer<f32>,
    /// The number of buckets whose exchange has begun in this update.
    travelling: usize,
}

impl<M, R: UpdateRule> TrainState<M, R> {
    /// Distributes training over all ranks of a group. Each rank gets the same number of the
    /// `shards`, adjacent in the batch. It also gets the optimizer state for one slice of each
    /// bucket of the weights. Call it last. The weights after an update depend on the number of
    /// shards but not on the number of ranks, and are equal on all ranks.
    ///
    /// Every rank is given the whole batch, in at least as many parts as there are shards. It reads
    /// the values only of its own parts (see [`Group::own_parts`]). Shard s starts at part
    /// `s * parts / shards`. Each shard's gradients are computed separately and accumulated over
    /// its parts as without a group. One binary tree then sums the shards.
    ///
    /// The optimizer's rule sees only this rank's slices, one after another, so it must update each
    /// weight from only its own gradient and state. A rule that
    /// [needs whole parameters](UpdateRule::needs_whole_parameters) sees those of this rank instead.
    /// [`TrainState::gradients`] holds the sums in
    /// this rank's slices, and unspecified values elsewhere unless
    /// [`Trainer::accumulate`](super::Trainer::accumulate) computed them. After an error on any
    /// rank, all ranks end. Resume from a checkpoint, with any number of ranks.
    ///
    /// Memory: one buffer the size of the gradients, plus one more for each doubling of the shards
    /// per rank. All have the type of the gradients, to which each sum of two shards is rounded.
    ///
    /// All ranks must have the same parameters, optimizer and shards. They compare these here.
    /// Before the first update they compare everything that decides the weights: these again, the
    /// weights, the precision and the dropout seed. Only the program can access some properties,
    /// such as the data. Compare those with [`Group::agree_on`].
    ///
    /// # Errors
    /// [`Error::Misuse`](stepscope_core::Error::Misuse) if the number of shards is not a power of
    /// two or not a multiple of the number of ranks. The same if the rule returns no
    /// [`UpdateRule::configuration`], and for released gradients.
    /// [`Error::Disagreement`](stepscope_core::Error::Disagreement) if ranks differ.
    /// [`Error::Rank`](stepscope_core::Error::Rank) if a rank does not arrive.
    /// [`Error::DeviceMemory`](stepscope_core::Error::DeviceMemory) if memory runs out.
    #[track_caller]
    pub fn in_group(mut self, group: &Group, shards: usize) -> Result<Self> {
        self.sync = Box::new(Shards::new(group.clone(), shards, &self.parameters, &mut self.optimizer)?);
        Ok(self)
    }
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
        let device = parameters.device();
        let elements = parameters.spec().elements();
        let state = if ranks > 1 {
            let state = group.broadcast_error(state_sha256(optimizer))?;
            let settings = group.broadcast_error(agreement::of_optimizer(shards, parameters, optimizer))?;
            group.compare("in_group", &with_state(settings, state.as_deref()), Location::caller())?;
            state
        } else {
            None
        };
        let starts: Vec<usize> = parameters.spec().entries().iter().map(ParameterEntry::start).collect();
        let slices = Slices::new(starts.iter().copied(), elements, ranks);
        let updated: Vec<Vec<Range<usize>>> = match optimizer.needs_whole_parameters() {
            false => (0..ranks).map(|rank| slices.of(rank)).collect(),
            true => {
                let whole = Slices::of_whole(&starts, elements, ranks).into_iter();
                whole.map(|own| if own.is_empty() { Vec::new() } else { vec![own] }).collect()
            }
        };
        let among = if ranks == 1 {
            None
        } else {
            optimizer.keep(updated[rank].clone())?;
            Some(PeerBuffers { norms: Buffer::zeros(device, slices.chunks())?, travelling: 0 })
        };
        let sums = AnySums::zeros(parameters, shards / ranks, ranks, &slices)?;
        let agreed = AtomicBool::new(ranks == 1);
        Ok(Self { group, shards, slices, updated, sums, among, state, agreed })
    }

    /// Returns an error unless these shards were made for these parameters and this optimizer.
    fn check<R: UpdateRule>(&self, parameters: &Parameters, optimizer: &Optimizer<R>) -> Result<()> {
        let all = 0..self.slices.elements();
        let fits = match &self.among {
            Some(_) => optimizer.slices() == self.updated[self.group.rank()],
            None => optimizer.slices() == std::slice::from_ref(&all),
        };
        if parameters.spec().elements() == all.end && fits {
            return Ok(());
        }
        let expected = "a train state with the shards and the optimizer that `in_group` has made for it";
        Err(Error::misuse("update", expected, "the shards or the optimizer of another train state"))
    }

    /// Returns the parts of a batch that each of this rank's shards owns. `lens` are the lengths of
    /// the parts. A shard's range is empty if the batch has fewer samples than shards.
    fn own(&self, lens: &[usize]) -> Result<Vec<Range<usize>>> {
        let (parts, shards) = (lens.len(), self.shards);
        if parts < shards && lens.iter().any(|&samples| samples > 1) {
            let expected = format!("a batch of at least {shards} parts, one for each shard, or parts of one sample");
            return Err(Error::misuse("update", expected, format!("{parts} parts of {lens:?} samples")));
        }
        Ok(self.group.own_parts(shards, parts))
    }

    /// Adds a part of the gradients of this rank's shard `number` to those of its earlier
    /// neighbors, as far up the tree as they are complete. Keeps sums that must wait for a later
    /// neighbor.
    fn fold(&mut self, arena: &mut Arena, gradients: &mut Gradients, number: usize, part: Range<usize>) -> Result<()> {
        let own = self.shards / self.group.ranks();
        if own == 1 || part.is_empty() {
            return Ok(());
        }
        arena.step(|step| {
            let _phase = step.enter(Phase::Backward);
            match &mut self.sums {
                AnySums::F32(sums) => sums.fold(step, gradients, number, part),
                AnySums::Bf16(sums) => sums.fold(step, gradients, number, part),
            }
        })
    }

    /// Queues the exchange of the next bucket, which sends each rank its slice.
    fn exchange(&mut self, gradients: &Gradients, number: usize) -> Result<()> {
        let Self { group, slices, sums, among, .. } = self;
        let Some(PeerBuffers { travelling, .. }) = among else { return Ok(()) };
        let (flat, parts, ranks) = (gradients.region()?, sums.parts(number), 0..group.ranks());
        let sends: Vec<_> = ranks.clone().map(|to| (to, flat.words_of(slices.of_bucket(number, to)))).collect();
        let own = slices.of_bucket(number, group.rank()).len();
        let part = |from: usize| parts.words_of(from * slices.pitch(number)..from * slices.pitch(number) + own);
        let receives: Vec<_> = ranks.map(|from| (from, part(from))).collect();
        // SAFETY: gradients and parts are buffers of this train state, which a device frees in
        // stream order. Until the link is followed, only an update whose gradients travel goes on.
        // It launches the folding of those that do not yet, and replays, which ask for the lends.
        // What an exchange receives is read by the sum, which follows the link. The update before
        // has read what it received by then, for an exchange runs after all work queued before.
        unsafe { group.exchange_beside(&sends, &receives)? };
        *travelling = number + 1;
        Ok(())
    }

    /// Gathers one part of the optimizer's state from all slices.
    fn whole(&self, parameters: &Parameters, state: &State) -> Result<State> {
        let Self { group, slices, updated, .. } = self;
        let (ranks, stored, mut start) = (0..group.ranks(), parameters.spec().state(), 0);
        let whole = State::zeros(parameters.device(), stored, slices.elements())?;
        let part = |memory: Memory<f32>, elements: Range<usize>| {
            let words = words(stored, &elements);
            memory.part(words.start, words.len())
        };
        let of_slice = |slice: Range<usize>| {
            start += slice.len();
            part(state.buffer().words(), start - slice.len()..start)
        };
        let own: Vec<_> = updated[group.rank()].iter().cloned().map(of_slice).collect();
        let sends: Vec<_> = ranks.clone().flat_map(|to| own.iter().map(move |&part| (to, part))).collect();
        let place = |from: usize, slice: Range<usize>| (from, part(whole.buffer().words(), slice));
        let of_rank = |from: usize| updated[from].iter().cloned().map(move |slice| place(from, slice));
        let receives: Vec<_> = ranks.flat_map(of_rank).collect();
        // SAFETY: the state and the new buffer are freed in stream order.
        unsafe { group.exchange(&sends, &receives)? };
        Ok(whole)
    }

    /// Sends the sums of the gradients in this rank's slices to the other ranks that update them,
    /// if there are any.
    fn send_sums(&self, gradients: &Gradients) -> Result<()> {
        let Self { group, slices, updated, .. } = self;
        let (own, flat) = (group.rank(), gradients.region()?);
        let sums = |of: usize, to: usize| {
            let within = updated[to].iter().flat_map(move |updated| slices.within(updated, of));
            within.map(|sums| flat.words_of(sums))
        };
        let others = || (0..group.ranks()).filter(|&rank| rank != own);
        let sends: Vec<_> = others().flat_map(|to| sums(own, to).map(move |part| (to, part))).collect();
        let receives: Vec<_> = others().flat_map(|from| sums(from, own).map(move |part| (from, part))).collect();
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        // SAFETY: the gradients are a buffer of this train state, which a device frees in stream
        // order.
        unsafe { group.exchange(&sends, &receives) }
    }

    /// Gathers the weights from all ranks that updated them, each region in which they are stored.
    fn gather_weights(&self, parameters: &Parameters) -> Result<()> {
        let runs = self.slices.elements() / RUN;
        parameters.regions().into_iter().try_for_each(|region| {
            // A slice has whole runs, and a run has whole words.
            let words = region.words();
            let run_words = words.len() / runs;
            let part = |slice: &Range<usize>| words.part(slice.start / RUN * run_words, slice.len() / RUN * run_words);
            // SAFETY: the weights are buffers of this train state, which a device frees in stream
            // order.
            unsafe { self.group.gather(|rank| self.updated[rank].iter().map(part).collect()) }
        })
    }
}

impl<R: UpdateRule> GradientSync<R> for Shards {
    fn is_group(&self) -> bool {
        true
    }

    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn agree_on_settings(
        &self,
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        settings: &dyn Fn(usize) -> Result<agreement::WeightSettings>,
        site: CallSite,
    ) -> Result<()> {
        self.check(parameters, optimizer)?;
        if !self.agreed.load(Ordering::Relaxed) {
            let settings = with_state(settings(self.shards)?, self.state.as_deref());
            self.group.compare("agree_on_settings", &settings, site)?;
            self.agreed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Disagreement`] if the ranks have different settings for the update.
    /// [`Error::MemoryShortage`] on all ranks if any rank reports a shortage. No rank then makes
    /// the update.
    fn own_parts(
        &mut self,
        optimizer: &Optimizer<R>,
        lens: &[usize],
        Ending { stop, short }: Ending,
        site: CallSite,
    ) -> Result<OwnParts> {
        let shards = self.own(lens)?;
        let settings = Settings::of(&agreement::of_update(optimizer, lens)?.0);
        if let Some(among) = &mut self.among {
            among.travelling = 0;
        }
        let rank = Some(self.group.rank());
        let short = short.map(|shortage| MemoryShortage { rank, ..shortage });
        let word = serde_json::to_vec(&BeforeUpdate { stop, short, settings }).expect("texts and figures");
        let words = self.group.agree("update", lens.iter().sum(), &word, site)?;
        let words = self.group.parse::<BeforeUpdate>(&words)?;
        let shortage = words.iter().find_map(|word| word.short.clone());
        let stop = words.iter().any(|word| word.stop);
        expect_same(&words.into_iter().map(|word| word.settings).collect::<Vec<_>>())?;
        match shortage {
            Some(shortage) => Err(Error::MemoryShortage(Box::new(shortage))),
            None => Ok(OwnParts { shards, stop }),
        }
    }

    /// Returns no buckets if there is only one rank.
    fn buckets(&self) -> &[Range<usize>] {
        self.among.as_ref().map_or(&[], |_| self.slices.buckets())
    }

    /// Starts the exchange of complete buckets of the last shard that do not travel yet. Each is
    /// first added to its neighbors. Work that is queued next, up to the sum, runs concurrently,
    /// and must neither read nor write these buckets or `parts`.
    fn buckets_ready(&mut self, arena: &mut Arena, gradients: &mut Gradients, complete: usize) -> Result<()> {
        let last = self.shards / self.group.ranks() - 1;
        let travelling = self.among.as_ref().map_or(complete, |among| among.travelling);
        for number in travelling..complete {
            let bucket = self.slices.buckets()[number].clone();
            self.fold(arena, gradients, last, bucket)?;
            self.exchange(gradients, number)?;
        }
        Ok(())
    }

    /// Adds the shard's gradients to those of its earlier neighbors, except buckets that travel,
    /// which were added before. The gradients of an empty shard are zero.
    fn shard_ready(
        &mut self,
        arena: &mut Arena,
        gradients: &mut Gradients,
        number: usize,
        is_empty: bool,
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
        self.fold(arena, gradients, number, 0..rest)
    }

    /// Each rank gets its slices of the sum, and the squared norms of all chunks.
    fn finish(&mut self, arena: &mut Arena, gradients: &mut Gradients, wanted: Option<Range<usize>>) -> Result<()> {
        let Some(travelling) = self.among.as_ref().map(|among| among.travelling) else { return Ok(()) };
        // All remaining buckets have been added to their neighbors.
        (travelling..self.slices.buckets().len()).try_for_each(|number| self.exchange(gradients, number))?;
        let Self { group, slices, sums, among: Some(PeerBuffers { norms, .. }), .. } = self else { return Ok(()) };
        group.follow()?;
        let (rank, chunks) = (group.rank(), [norms.len()]);
        arena.step(|step| {
            let _phase = step.enter(Phase::Optimizer);
            for bucket in 0..slices.buckets().len() {
                let own = slices.of_bucket(bucket, rank);
                if own.is_empty() {
                    continue;
                }
                let mut norms = step.lend_mut(norms, chunks)?.part(Slices::chunks_in(&own));
                let extents = [group.ranks(), slices.pitch(bucket)];
                match sums {
                    AnySums::F32(sums) => {
                        let mut sum = gradients.lend_flat_mut(step)?.part(own);
                        sums.sum_ranks_into(step, bucket, extents, &mut sum)?;
                        internals::squared_norms_into(step, &sum, &mut norms)?;
                    }
                    AnySums::Bf16(sums) => {
                        let mut sum = gradients.lend_flat_mut(step)?.part(own);
                        sums.sum_ranks_into(step, bucket, extents, &mut sum)?;
                        internals::squared_norms_into(step, &sum, &mut norms)?;
                    }
                }
            }
            Ok(())
        })?;
        let (flat, norms) = (gradients.region()?, norms.memory());
        let chunks = |slice: &Range<usize>| {
            let chunks = Slices::chunks_in(slice);
            norms.part(chunks.start, chunks.len())
        };
        let within = |wanted: &Range<usize>, rank: usize| {
            slices.within(wanted, rank).into_iter().map(|own| flat.words_of(own)).collect()
        };
        // SAFETY: norms and gradients are buffers of this train state, which a device frees in
        // stream order.
        unsafe {
            group.gather(|rank| slices.of(rank).iter().map(chunks).collect())?;
            wanted.map_or(Ok(()), |wanted| group.gather(|rank| within(&wanted, rank)))?;
        }
        self.send_sums(gradients)
    }

    /// Each rank updates its own slices or parameters, and all gather the weights.
    fn update(
        &self,
        arena: &mut Arena,
        ticket: UpdateTicket,
        Updated { parameters, gradients, optimizer }: Updated<'_, R>,
        monitored: Option<Parameter>,
        metric: &mut Metric<'_>,
    ) -> Result<()> {
        arena.step(|step| {
            let monitored = monitored.map(|monitored| {
                let _phase = step.enter(Phase::Backward);
                gradients.squared_norm(step, Some(monitored))
            });
            let monitored = monitored.transpose()?;
            let norm = match &self.among {
                None => optimizer.apply_with_norm(ticket, step, parameters, gradients)?,
                Some(PeerBuffers { norms, .. }) => {
                    let _phase = step.enter(Phase::Optimizer);
                    let norm = ops::sum(step, &step.lend(norms, [norms.len()])?)?;
                    optimizer.apply_slices(ticket, step, parameters, gradients, &norm)?;
                    norm
                }
            };
            metric(step, &norm)?;
            monitored.map_or(Ok(()), |monitored| metric(step, &monitored))
        })?;
        if self.among.is_some() {
            self.gather_weights(parameters)?;
            arena.step(|step| parameters.queue_copy(step))?;
        }
        Ok(())
    }

    fn losses(&self, own: &[f32], norms: &[f32], site: CallSite) -> Result<Vec<f32>> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let expected = bytes(norms);
        let words = self.group.agree("metrics", norms.len(), &[&expected[..], &bytes(own)].concat(), site)?;
        if let Some(rank) = words.iter().position(|word| !word.starts_with(&expected)) {
            let expected = format!("the same squared norms of the gradients on all ranks, {norms:?} here");
            let got = format!("different bits on rank {rank}: its device, or this one, is unreliable");
            return Err(Error::misuse("group", expected, got));
        }
        let losses = words.iter().flat_map(|word| word[expected.len()..].as_chunks().0);
        Ok(losses.map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn on_error(&self, error: Error) -> Error {
        match error {
            // All ranks already have this error and end with it.
            Error::MemoryShortage(shortage) if shortage.rank.is_some() => Error::MemoryShortage(shortage),
            error => {
                let Err(error) = self.group.broadcast_error::<Infallible>(Err(error));
                error
            }
        }
    }

    /// Rank 0 writes. All ranks return its result.
    fn save(
        &self,
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        write: &dyn Fn(&[State]) -> Result<()>,
        site: CallSite,
    ) -> Result<()> {
        self.group.agree("checkpoint", self.slices.elements(), &[], site)?;
        let kept = optimizer.kept_state();
        let whole: Vec<State> = match &self.among {
            None => Vec::new(),
            Some(_) => kept.iter().map(|state| self.whole(parameters, state)).collect::<Result<_>>()?,
        };
        if self.group.rank() == 0 {
            self.group.broadcast_error(write(if self.among.is_some() { &whole } else { kept }))?;
        }
        // All ranks wait here until the file exists.
        self.group.agree("checkpoint written", self.slices.elements(), &[], site).map(drop)
    }

    /// The ranks compare all settings again before the next update.
    fn restore(&mut self, checkpoint: &Checkpoint, site: CallSite) -> Result<()> {
        let settings = Settings::of(&[("checkpoint", checkpoint.digest()?)]);
        self.group.compare("restore", &settings, site)?;
        (self.state, self.agreed) = (None, AtomicBool::new(self.group.ranks() == 1));
        Ok(())
    }
}

/// Returns the SHA-256 of an optimizer's state, in hexadecimal. `None` if no update has changed the
/// state, or if it covers only slices, which other ranks do not have. Waits.
fn state_sha256<R: UpdateRule>(optimizer: &Optimizer<R>) -> Result<Option<String>> {
    let Ok(state) = optimizer.whole_state() else { return Ok(None) };
    if optimizer.updates() == 0 {
        return Ok(None);
    }
    let mut hash = Sha256::new();
    state.iter().try_for_each(|state| {
        let buffer = state.buffer();
        buffer.for_each_piece(0..buffer.bytes(), &mut |piece| {
            hash.update(piece);
            Ok(())
        })
    })?;
    Ok(Some(hex(&hash.finalize())))
}

/// Returns the settings to compare, with the digest of the optimizer's state added.
fn with_state(mut settings: agreement::WeightSettings, state: Option<&str>) -> Settings {
    state.into_iter().for_each(|state| settings.add("digest of the optimizer's state", state));
    Settings::of(&settings.0)
}
