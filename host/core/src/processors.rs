//! Work on host memory that is spread over all processors.
//!
//! Invariant: parts have fixed boundaries, so no result depends on the number of threads.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use std::error::Error as _;
use std::sync::OnceLock;

/// Returns true if rayon's threads run. Its global pool panics at its first use if the system
/// provides no threads. This function therefore starts the pool, and stores whether that failed.
/// The caller's thread then works without help.
pub(crate) fn have_threads() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    // Miri refuses crossbeam-epoch, which rayon's threads use (crossbeam-rs/crossbeam#545).
    if cfg!(miri) {
        return false;
    }
    let start = || match ThreadPoolBuilder::new().build_global() {
        // Only the system's refusal has a source. Otherwise the program has started the pool
        // itself.
        Err(error) if error.source().is_some() => {
            tracing::warn!(%error, "the system provides no threads: one processor does all work on the host");
            false
        }
        _ => true,
    };
    rayon::current_thread_index().is_some() || *STARTED.get_or_init(start)
}

/// Calls `work` for each part of `len` elements, of which the last may be shorter, with the index
/// of its first element. Runs in the default floating-point mode.
///
/// # Errors
/// One of the errors of `work`, after which some parts are not visited.
pub fn for_each_part<T: Send, E: Send>(
    values: &mut [T],
    len: usize,
    work: impl Fn(usize, &mut [T]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let work = |(number, part): (usize, &mut [T])| float_mode::in_default(|| work(number * len, part));
    match values.len() > len && have_threads() {
        true => values.par_chunks_mut(len).enumerate().try_for_each(work),
        false => values.chunks_mut(len).enumerate().try_for_each(work),
    }
}
