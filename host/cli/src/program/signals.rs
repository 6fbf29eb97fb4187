//! The signals that ask a run to end: Ctrl-C, SIGTERM, and SIGHUP unless the program was started by
//! `nohup`.
//!
//! Invariant: the first signal is answered at once by a line on standard error, even while the
//! program waits. Before the first update it ends the program, since there is nothing to save.
//! Later it ends training after the current update, with a checkpoint. A second signal ends the
//! program at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;
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
/// A signal ends the program before the first update.
const ENDING: u8 = 3;

/// Installs the handlers. Pass the returned flag to [`stepscope::Trainer::stop_when`].
///
/// # Errors
/// Returns an error if the system cannot start the thread or install a handler.
pub fn listen(log: Log) -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut wanted = vec![SIGINT, SIGTERM];
    if !hangup_is_ignored() {
        wanted.push(SIGHUP);
    }
    for &signal in &wanted {
        // Runs in the handler itself, because the thread below may be blocked on a standard error
        // that nobody reads.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new(wanted)?;
    let answer = move || signals.forever().for_each(|signal| answer(log, signal));
    thread::Builder::new().name("signals".into()).spawn(answer)?;
    Ok(stop)
}

/// Records that an update was made. From now on, a signal waits for the checkpoint.
pub fn update_is_made() {
    enter(TRAINING);
}

/// Records that training has ended.
pub fn training_has_ended() {
    enter(WRITING);
}

/// Enters a phase, after which files may be written. If a signal ends the program, waits for that
/// end, so that it leaves no file half written.
fn enter(phase: u8) {
    // A plain store could move the phase back, because another rank of this process may be further.
    if PHASE.fetch_max(phase, Ordering::Relaxed) == ENDING {
        // Longer only if nobody reads standard error. Then training ends after this update.
        thread::sleep(Duration::from_secs(10));
    }
}

fn answer(log: Log, signal: i32) {
    let name = low_level::signal_name(signal).unwrap_or("a signal");
    let before = PHASE.compare_exchange(LOADING, ENDING, Ordering::Relaxed, Ordering::Relaxed);
    match before.unwrap_or_else(|phase| phase) {
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

/// Returns true if the program was started with SIGHUP ignored, as `nohup` does. Returns false
/// without `/proc`.
#[expect(clippy::disallowed_methods, reason = "reads the kernel's own file, which ends")]
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}
