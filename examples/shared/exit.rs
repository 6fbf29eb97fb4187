//! The exit codes of a program that trains.

use std::error::Error;

/// It was asked to end, as shells expect it behind Ctrl-C: 128 and the signal's number.
pub(crate) const INTERRUPTED: u8 = 130;
/// The host was short of memory: it may go on from its checkpoint later (`EX_TEMPFAIL` of sysexits.h).
const SHORT_OF_MEMORY: u8 = 75;
/// Any other error.
const FAILED: u8 = 1;

/// The code of an error.
pub(crate) fn code(error: &(dyn Error + 'static)) -> u8 {
    match error.downcast_ref() {
        Some(stepscope::Error::MemoryShortage(_)) => SHORT_OF_MEMORY,
        _ => FAILED,
    }
}
