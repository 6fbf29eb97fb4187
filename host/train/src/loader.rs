//! Batches that a separate thread prepares, a few ahead, while the device works.
//!
//! Invariant: batches come in the order of the iterator, and the caller receives every error and
//! panic of the thread. Waits for the thread have a deadline, and it is never joined. Once its
//! loader is dropped, it ends after the batch that it is making.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;
use stepscope_core::internals::panic_message;
use stepscope_core::{DEFAULT_DEADLINE, Error, Resource, Result};

/// The most finished batches in the queue. One more may be in progress.
const AHEAD: usize = 2;

/// An iterator whose items are made by a separate thread, up to two ahead.
///
/// If several threads make the items, leave processors to those that copy batches to the GPU. On a
/// host with 32 processors and an H200, using half of them instead of all made training 1.4 times
/// as fast. The model ran at 588,000 samples per second (`docs/lab/steps.md`).
///
/// ```
/// let squares = stepscope::data::Loader::new((0..4u32).map(|number| Ok(number * number)))?;
/// assert_eq!(squares.collect::<stepscope::Result<Vec<u32>>>()?, [0, 1, 4, 9]);
/// # Ok::<(), stepscope::Error>(())
/// ```
pub struct Loader<T> {
    batches: Receiver<Result<T>>,
    deadline: Duration,
}

impl<T> fmt::Debug for Loader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Loader<T> {
    /// Starts making `batches`. Their first error is the last item.
    ///
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub fn new(batches: impl Iterator<Item = Result<T>> + Send + 'static) -> Result<Self> {
        let (sender, receiver) = sync_channel(AHEAD);
        let started = thread::Builder::new().name("stepscope-loader".into()).spawn(move || {
            float_mode::set_default();
            make(batches, &sender);
        });
        started.map_err(|error| Error::system("loader", Resource::Thread, error))?;
        Ok(Self { batches: receiver, deadline: DEFAULT_DEADLINE })
    }

    /// Sets the longest wait for a batch (default [`DEFAULT_DEADLINE`]).
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }
}

impl<T> Iterator for Loader<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        match self.batches.recv_timeout(self.deadline) {
            Ok(batch) => Some(batch),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                Some(Err(Error::Loader { reason: format!("no batch after {:?}", self.deadline) }))
            }
        }
    }
}

/// Sends items until they end, one is an error, or the loader is dropped.
fn make<T>(batches: impl Iterator<Item = Result<T>>, sender: &SyncSender<Result<T>>) {
    let send = || {
        for batch in batches {
            let failed = batch.is_err();
            if sender.send(batch).is_err() || failed {
                break;
            }
        }
    };
    // The iterator is dropped after a panic, so its broken state cannot be observed.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(send)) {
        let reason = format!("the thread that makes batches panicked: {}", panic_message(panic));
        // If the loader is gone, nothing receives the error.
        let _ = sender.send(Err(Error::Loader { reason }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    /// A time far longer than any of this takes.
    const LONG: Duration = Duration::from_secs(20);

    fn wait_until(what: &str, holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < LONG, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn prefetch_is_limited() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let mut loader = Loader::new((0..100).map(move |number| {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(number)
        }))
        .unwrap();
        for taken in 0..5 {
            let most = taken + AHEAD + 1;
            wait_until("batches are made ahead", || made.load(Ordering::SeqCst) == most);
            thread::sleep(Duration::from_millis(5));
            assert_eq!(made.load(Ordering::SeqCst), most, "batches made after {taken} were taken");
            assert_eq!(loader.next().unwrap().unwrap(), taken);
        }
        assert_eq!(loader.map(Result::unwrap).collect::<Vec<_>>(), (5..100).collect::<Vec<_>>());
    }

    #[test]
    fn errors_arrive_after_earlier_batches() {
        let misuse = || Error::misuse("batch", "samples", "none");
        let mut failing = Loader::new([Ok(1), Ok(2), Err(misuse()), Ok(3)].into_iter()).unwrap();
        assert_eq!((failing.next(), failing.next()), (Some(Ok(1)), Some(Ok(2))));
        assert_eq!((failing.next(), failing.next()), (Some(Err(misuse())), None));

        let panics = |number: u32| if number == 1 { panic!("sample {number} is missing") } else { Ok(number) };
        let mut panicking = Loader::new((0..3).map(panics)).unwrap();
        assert_eq!(panicking.next(), Some(Ok(0)));
        let error = panicking.next().unwrap().unwrap_err().to_string();
        assert!(error.contains("panicked: sample 1 is missing"), "{error}");
        assert_eq!(panicking.next(), None);
    }

    #[test]
    fn late_batch_is_an_error() {
        let (_gate, opened) = channel::<()>();
        let stuck = std::iter::once_with(move || opened.recv().map_err(|_| Error::misuse("gate", "open", "closed")));
        let mut loader = Loader::new(stuck).unwrap().deadline(Duration::from_millis(10));
        let error = loader.next().unwrap().unwrap_err().to_string();
        assert_eq!(error, "loader: no batch after 10ms");
    }

    #[test]
    fn early_drop_neither_hangs_nor_leaks() {
        let kept = Arc::new(());
        // The thread waits for room in the queue ..
        let held = Arc::clone(&kept);
        let mut full = Loader::new((0..).map(move |_: u32| Ok(Arc::clone(&held)))).unwrap();
        drop(full.next());
        drop(full);
        wait_until("a batch that waits for room is dropped", || Arc::strong_count(&kept) == 1);
        // .. or is making a batch that takes long.
        let (gate, opened) = channel::<()>();
        let held = Arc::clone(&kept);
        let busy = Loader::new(std::iter::once_with(move || {
            let _ = opened.recv();
            Ok(held)
        }))
        .unwrap();
        let start = Instant::now();
        drop(busy);
        assert!(start.elapsed() < LONG, "the drop waited for the batch");
        drop(gate);
        wait_until("a batch in progress is dropped", || Arc::strong_count(&kept) == 1);
    }
}
