//! The frame of a training program: exit codes, signals, the results folder, and ranks.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use crate::program::exit::{self, INTERRUPTED};
use crate::program::log::{self, Log};
use crate::program::ranks::{self, Rank};
use crate::program::screen::Screen;
use crate::program::{results, signals};
use crate::run::cli::RunArgs;
use crate::train::bad_input::{BadInput, Outcome, bad};

/// Runs `train`, which returns false if it was stopped early, and returns the exit code.
pub(crate) fn main(train: impl FnOnce(&mut Screen) -> Outcome<bool>) -> ExitCode {
    log::start(Log::Text);
    let mut screen = Screen::default();
    let ended = train(&mut screen);
    match ended.and_then(|finished| screen.end().map(|()| finished).map_err(Into::into)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            log::failed(Log::Text, &*error);
            ExitCode::from(if error.is::<BadInput>() { 2 } else { exit::code(&*error) })
        }
    }
}

/// Calls `load` with the number of shards, and then `train` on each rank of this process. Returns
/// false if it was stopped early.
pub(crate) fn on_ranks<P: Sync>(
    args: &RunArgs,
    (out, resume): (&Path, Option<&Path>),
    screen: &mut Screen,
    load: impl FnOnce(usize) -> Outcome<P>,
    train: impl Fn(&P, &Rank, &AtomicBool, &mut Screen) -> Outcome<bool> + Sync,
) -> Outcome<bool> {
    let stop = signals::listen(Log::Text).map_err(|error| format!("cannot install signal handlers: {error}"))?;
    let ranks = args.ranks.ranks().map_err(|error| bad("--ranks", error))?;
    let leads = ranks[0].leads();
    if leads {
        // Checked before anything slow.
        results::check(out, resume, args.overwrite).map_err(|reason| bad("--out", reason))?;
    }
    let plan = load(ranks[0].shards())?;
    let _results = if leads {
        Some(results::take(out, resume, args.overwrite)?)
    } else {
        *screen = Screen::quiet();
        None
    };
    let rank = |rank: &Rank, screen: &mut Screen| train(&plan, rank, &stop, screen);
    let quiet = |other: &Rank| rank(other, &mut Screen::quiet()).map(drop).map_err(|error| error.to_string());
    ranks::on_each(ranks, |first| rank(first, screen), quiet)
}
