//! Whether work can be spread over all processors.

#![forbid(unsafe_code)]

use rayon::ThreadPoolBuilder;
use std::error::Error as _;
use std::sync::OnceLock;

/// Whether rayon's threads run. Its global pool panics at its first use where the system gives no
/// threads, so this starts the pool, and notes where that is refused: the caller's thread then does
/// the work alone.
pub(crate) fn have_threads() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    let start = || match ThreadPoolBuilder::new().build_global() {
        // Only the system's refusal has a source; otherwise the program has started the pool
        // itself.
        Err(error) if error.source().is_some() => {
            tracing::warn!(%error, "the system gives no threads: one processor scans all numbers");
            false
        }
        _ => true,
    };
    rayon::current_thread_index().is_some() || *STARTED.get_or_init(start)
}
