//! A rank of a group, with everything that ranks compare before they update the weights.
//!
//! Invariant: before the first update, all ranks have compared everything that decides the weights.

use super::agreement;
use super::sync::{CallSite, Ending};
use crate::checkpoint::Checkpoint;
use crate::optim::{Optimizer, UpdateRule};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use stepscope_core::internals::hex;
use stepscope_core::{Error, MemoryShortage, Parameters, Result};
use stepscope_group::Group;
use stepscope_group::agreement::{Settings, expect_same};

/// The largest number of ranks in a group, limited by what one launch can sum.
const MOST_RANKS: usize = 64;

/// A rank of a group that trains a model.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) group: Group,
    /// The number of shards of each batch.
    pub(super) shards: usize,
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

impl Ranks {
    /// Compares the settings of the parameters and the optimizer with the other ranks, in the name
    /// of `op`.
    pub(super) fn new<R: UpdateRule>(
        op: &'static str,
        (group, shards): (Group, usize),
        parameters: &Parameters,
        optimizer: &Optimizer<R>,
        site: CallSite,
    ) -> Result<Self> {
        let ranks = group.ranks();
        if !shards.is_power_of_two() || !shards.is_multiple_of(ranks) || ranks > MOST_RANKS {
            let expected = format!("shards: a power of two and a multiple of the ranks, of which at most {MOST_RANKS}");
            return Err(Error::misuse(op, expected, format!("{shards} shards for {ranks} ranks")));
        }
        let state = if ranks > 1 {
            let state = group.broadcast_error(state_sha256(optimizer))?;
            let settings = group.broadcast_error(agreement::of_optimizer(shards, parameters, optimizer))?;
            group.compare(op, &with_state(settings, state.as_deref()), site)?;
            state
        } else {
            None
        };
        Ok(Self { group, shards, state, agreed: AtomicBool::new(ranks == 1) })
    }

    /// Returns the number of shards of each rank.
    pub(super) fn own_shards(&self) -> usize {
        self.shards / self.group.ranks()
    }

    /// Compares everything that decides the weights, unless that was done before.
    pub(super) fn agree_on_settings(
        &self,
        settings: &dyn Fn(usize) -> Result<agreement::WeightSettings>,
        site: CallSite,
    ) -> Result<()> {
        if !self.agreed.load(Ordering::Relaxed) {
            let settings = with_state(settings(self.shards)?, self.state.as_deref());
            self.group.compare("agree_on_settings", &settings, site)?;
            self.agreed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Agrees on the next update, by a batch with parts of these lengths. Returns true if all ranks
    /// stop after it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks have different settings for the update.
    /// [`Error::MemoryShortage`] on all ranks if any rank reports a shortage. No rank then makes
    /// the update.
    pub(super) fn agree_on_update<R: UpdateRule>(
        &self,
        optimizer: &Optimizer<R>,
        lens: &[usize],
        Ending { stop, short }: Ending,
        site: CallSite,
    ) -> Result<bool> {
        let settings = Settings::of(&agreement::of_update(optimizer, lens)?.0);
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
            None => Ok(stop),
        }
    }

    /// Returns the losses of each rank. `norms` must have the same bits on all ranks.
    pub(super) fn losses(&self, own: &[f32], norms: &[f32], site: CallSite) -> Result<Vec<Vec<f32>>> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let expected = bytes(norms);
        let words = self.group.agree("metrics", norms.len(), &[&expected[..], &bytes(own)].concat(), site)?;
        if let Some(rank) = words.iter().position(|word| !word.starts_with(&expected)) {
            let expected = format!("the same squared norms of the gradients on all ranks, {norms:?} here");
            let got = format!("different bits on rank {rank}: its device, or this one, is unreliable");
            return Err(Error::misuse("group", expected, got));
        }
        let values =
            |word: &[u8]| word[expected.len()..].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(words.iter().map(|word| values(word)).collect())
    }

    /// Sends an error to all ranks, which end with it. Returns the error to report.
    pub(super) fn on_error(&self, error: Error) -> Error {
        match error {
            // All ranks already have this error and end with it.
            Error::MemoryShortage(shortage) if shortage.rank.is_some() => Error::MemoryShortage(shortage),
            error => {
                let Err(error) = self.group.broadcast_error::<Infallible>(Err(error));
                error
            }
        }
    }

    /// Checks that all ranks restore the same checkpoint. They compare all settings again before
    /// the next update.
    pub(super) fn restore(&mut self, checkpoint: &Checkpoint, site: CallSite) -> Result<()> {
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
