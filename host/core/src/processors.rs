//! Checks whether work can be spread over all processors.

#![forbid(unsafe_code)]

use rayon::ThreadPoolBuilder;
use std::error::Error as _;
use std::sync::OnceLock;

/// Returns true if rayon's threads run. Its global pool panics at its first use if the system
/// provides no threads. This function therefore starts the pool, and stores whether that failed.
/// The caller's thread then works without help.
pub(crate) fn have_threads() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    let start = || match ThreadPoolBuilder::new().build_global() {
        // Only the system's refusal has a source. Otherwise the program has started the pool
        // itself.
        Err(error) if error.source().is_some() => {
            tracing::warn!(%error, "the system provides no threads: one processor scans all numbers");
            false
        }
        _ => true,
    };
    rayon::current_thread_index().is_some() || *STARTED.get_or_init(start)
}
