//! The signals that ask a run to end: Ctrl-C, SIGTERM, and SIGHUP unless the program was started by
//! `nohup`.
//!
//! Invariant: the first one is answered at once by a line on standard error, whatever the program
//! waits for. Before the first update there is nothing to save, so it ends the program; then it
//! ends training after the current update, with a checkpoint. The second one ends the program at
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::{io, thread};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

use super::exit::INTERRUPTED;
use super::log::{self, Log};
use super::results;

/// The phase of the run.
static PHASE: AtomicU8 = AtomicU8::new(LOADING);
/// No update has been made.
const LOADING: u8 = 0;
const TRAINING: u8 = 1;
/// All updates have been made.
const WRITING: u8 = 2;

/// Listens. The flag that is returned is for [`stepscope::Trainer::stop_when`].
///
/// # Errors
/// The system's: no thread, no handler.
pub(crate) fn listen(log: Log) -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut wanted = vec![SIGINT, SIGTERM];
    if !hangup_is_ignored() {
        wanted.push(SIGHUP);
    }
    for &signal in &wanted {
        // In the handler itself: the thread below may be waiting for a standard error that nobody
        // reads.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new(wanted)?;
    let answer = move || signals.forever().for_each(|signal| answer(log, signal));
    thread::Builder::new().name("signals".into()).spawn(answer)?;
    Ok(stop)
}

/// An update has been made: from now on a checkpoint is worth waiting for.
pub(crate) fn update_is_made() {
    // Not a store: another rank of this process may be further.
    PHASE.fetch_max(TRAINING, Ordering::Relaxed);
}

/// Training has come to its end.
pub(crate) fn training_has_ended() {
    PHASE.fetch_max(WRITING, Ordering::Relaxed);
}

fn answer(log: Log, signal: i32) {
    let name = low_level::signal_name(signal).unwrap_or("a signal");
    match PHASE.load(Ordering::Relaxed) {
        LOADING => {
            log::say(log, &format!("{name}: stopped before the first update; nothing was saved"));
            results::release();
            low_level::exit(INTERRUPTED.into());
        }
        TRAINING => {
            log::say(
                log,
                &format!("{name}: stopping after the current update, with a checkpoint; send it again to stop at once"),
            );
        }
        _ => log::say(
            log,
            &format!("{name}: training has ended, and its results are being written; send it again to stop at once"),
        ),
    }
}

/// Returns true if the program was started to ignore SIGHUP, as by `nohup`. False where there is no
/// `/proc`.
#[expect(clippy::disallowed_methods, reason = "reads the kernel's own file, which ends")]
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}
