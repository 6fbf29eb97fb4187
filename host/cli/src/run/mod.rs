//! A training run of a language model, which `train` and `finetune` share. [`main`] returns its
//! exit code, and [`on_ranks`] runs it on each rank of this process. What other training programs
//! use too, such as the example `crossasset`, is in [`crate::program`].
//!
//! | file | part |
//! |---|---|
//! | [`best`] | the weights of the best evaluation |
//! | [`cli`] | options |
//! | [`events`] | the records of TensorBoard files |
//! | [`folder`] | tokenizer, chat template and stop tokens next to a model's weights |
//! | [`gpu`] | the clock and the temperature of the GPU |
//! | [`logs`] | JSON lines and TensorBoard files |
//! | [`memory`] | the size of the arena |
//! | [`report`] | `report.json` |
//! | [`settings`] | the settings of a model that a run must share to resume |
//! | [`updates`] | the loop of updates, with evaluations and checkpoints |

pub(crate) mod best;
pub(crate) mod cli;
pub(crate) mod events;
pub(crate) mod folder;
pub(crate) mod gpu;
pub(crate) mod logs;
pub(crate) mod memory;
pub(crate) mod report;
pub(crate) mod rule;
pub(crate) mod settings;
pub(crate) mod updates;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use stepscope::Checkpoint;

use self::cli::RunArgs;
use crate::program::exit::{self, INTERRUPTED};
use crate::program::log::{self, Log};
use crate::program::ranks::{self, Rank};
use crate::program::results::{CHECKPOINT, Claim};
use crate::program::screen::Screen;
use crate::program::{marks, signals};
use crate::train::bad_input::{BadInput, Outcome, bad, for_users};

/// Runs `train`, which returns false if it was stopped early, and returns the exit code.
pub(crate) fn main(train: impl FnOnce(&mut Screen) -> Outcome<bool>) -> ExitCode {
    log::start(Log::Text);
    let mut screen = Screen::default();
    let ended = train(&mut screen);
    match ended.and_then(|finished| screen.end().map(|()| finished).map_err(Into::into)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            let message = error.downcast_ref().map_or_else(|| error.to_string(), for_users);
            log::failed(Log::Text, &*Box::<dyn Error>::from(message));
            ExitCode::from(if error.is::<BadInput>() { 2 } else { exit::code(&*error) })
        }
    }
}

/// Loads the checkpoint that `--resume` names.
pub(crate) fn resumed(path: &Path) -> Outcome<Checkpoint> {
    if marks::notes(path).is_some_and(|notes| notes["stepscope.format"].is_null()) {
        let reason = format!(
            "{} has weights, but is no checkpoint: give the {CHECKPOINT} in the --out of a run. To start from these \
             weights, give their folder with --weights",
            path.display()
        );
        return Err(bad("--resume", reason));
    }
    Checkpoint::load(path).map_err(|error| bad("--resume", error))
}

/// Calls `load` with the number of shards, and then `train` on each rank of this process, which
/// writes into the claimed folder. Returns false if it was stopped early.
pub(crate) fn on_ranks<P: Sync>(
    args: &RunArgs,
    claim: &Claim<'_>,
    screen: &mut Screen,
    load: impl FnOnce(usize) -> Outcome<P>,
    train: impl Fn(&P, &Rank, &AtomicBool, &mut Screen) -> Outcome<bool> + Sync,
) -> Outcome<bool> {
    let stop = signals::listen(Log::Text).map_err(|error| format!("cannot install signal handlers: {error}"))?;
    let ranks = args.ranks.ranks().map_err(|error| bad("--ranks", for_users(&error)))?;
    let [all, shards] = [ranks[0].ranks(), ranks[0].shards()];
    if !shards.is_power_of_two() || !shards.is_multiple_of(all) {
        let reason = format!("expected a power of two that is a multiple of the {all} ranks, got {shards}");
        return Err(bad("--shards", reason));
    }
    let leads = ranks[0].leads();
    if leads {
        // Checked before anything slow.
        claim.check().map_err(|reason| bad("--out", reason))?;
    }
    let plan = load(ranks[0].shards())?;
    let _results = if leads {
        Some(claim.take()?)
    } else {
        *screen = Screen::quiet();
        None
    };
    let rank = |rank: &Rank, screen: &mut Screen| train(&plan, rank, &stop, screen);
    let quiet = |other: &Rank| rank(other, &mut Screen::quiet()).map(drop).map_err(|error| error.to_string());
    ranks::on_each(ranks, |first| rank(first, screen), quiet)
}
