//! Threads for a program's own work on many items, such as the rows of a file.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::train::bad_input::Outcome;

/// Threads that work on many items, or this thread if the system refuses to start others.
pub(crate) struct Workers(Option<ThreadPool>);

impl Workers {
    pub(crate) fn new() -> Self {
        Self(ThreadPoolBuilder::new().build().ok())
    }

    /// Returns the result for each item.
    ///
    /// # Errors
    /// The error of one of the items.
    pub(crate) fn map<T: Sync, R: Send>(
        &self,
        items: &[T],
        one: impl Fn(&T) -> Outcome<R> + Send + Sync,
    ) -> Outcome<Vec<R>> {
        match &self.0 {
            Some(threads) => threads.install(|| items.par_iter().map(one).collect()),
            None => items.iter().map(one).collect(),
        }
    }
}
