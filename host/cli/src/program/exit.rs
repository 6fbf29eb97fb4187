//! The exit codes of a training program.

use std::error::Error;

/// Stopped on request, with the code that shells expect after Ctrl-C: 128 plus the signal's number.
pub const INTERRUPTED: u8 = 130;
/// The host was short of memory; the run may continue from its checkpoint later (`EX_TEMPFAIL` of
/// sysexits.h).
const SHORT_OF_MEMORY: u8 = 75;
/// Any other error.
const FAILED: u8 = 1;

/// Returns the exit code for an error.
pub fn code(error: &(dyn Error + 'static)) -> u8 {
    match error.downcast_ref() {
        Some(stepscope::Error::MemoryShortage(_)) => SHORT_OF_MEMORY,
        _ => FAILED,
    }
}
