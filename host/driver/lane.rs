//! The one thread that calls the driver, so that a caller never waits longer than its deadline.
//!
//! A call stuck in the kernel cannot be cancelled. At the deadline the caller goes on with a timeout, and the thread is
//! given up with the call: it ends with the process. Caller and worker poll for each other for some microseconds before they
//! sleep: waking a sleeper takes longer than most calls. Invariant: a call's result reaches its own caller
//! or nobody. All interleavings of callers, worker and deadlines are explored in `tests/loom`, which brings the `model` of
//! channels and clock; there nobody polls, everybody sleeps.

#![forbid(unsafe_code)]

#[cfg(loom)]
use crate::model::{Instant, mpsc, thread};
#[cfg(not(loom))]
use mpsc::TryRecvError;
use mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
#[cfg(not(loom))]
use std::{sync::mpsc, thread, time::Instant};

/// How long caller and worker poll before they sleep: most calls take a microsecond, and waking a sleeper takes several.
#[cfg(not(loom))]
const AWAKE: Duration = Duration::from_micros(20);
/// Polls between two readings of the clock; after each such round other threads may run.
#[cfg(not(loom))]
const POLLS: u32 = 64;

type Job = Box<dyn FnOnce() + Send>;

/// What is seen within such a time.
#[cfg(not(loom))]
pub(super) fn watch<T>(awake: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        for _ in 0..POLLS {
            match look() {
                Some(seen) => return Some(seen),
                None => std::hint::spin_loop(),
            }
        }
        if start.elapsed() >= awake {
            return None;
        }
        thread::yield_now();
    }
}

/// What comes within [`AWAKE`]: nothing also when nobody is left to send.
#[cfg(not(loom))]
fn poll_briefly<T>(channel: &Receiver<T>) -> Option<T> {
    let look = || match channel.try_recv() {
        Ok(message) => Some(Some(message)),
        Err(TryRecvError::Disconnected) => Some(None),
        Err(TryRecvError::Empty) => None,
    };
    watch(AWAKE, look).flatten()
}

#[cfg(loom)]
fn poll_briefly<T>(_: &Receiver<T>) -> Option<T> {
    None
}

/// One worker thread.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: Sender<Job>,
}

/// The call had not ended at its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimedOut {
    /// How long the caller waited.
    pub(super) waited: Duration,
}

impl Lane {
    /// Starts the worker. It ends when the lane is dropped and its last call has returned.
    pub(super) fn start() -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new().name("stepscope-driver".into()).spawn(move || {
            while let Some(job) = poll_briefly(&queue).or_else(|| queue.recv().ok()) {
                job();
            }
        })?;
        Ok(Self { jobs })
    }

    /// Gives the worker a call that nobody waits for. It runs behind all that were given before.
    pub(super) fn post(&self, call: impl FnOnce() + Send + 'static) {
        // A worker that an earlier call's panic ended takes no job: who waits for the next one hears of it.
        let _ = self.jobs.send(Box::new(call));
    }

    /// Runs `call` on the worker and waits for it until the deadline. Everything that the call uses is its own, so it
    /// may end later, or never.
    pub(super) fn run<R: Send + 'static>(
        &self,
        deadline: Duration,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, TimedOut> {
        let start = Instant::now();
        let (result, answer) = mpsc::sync_channel(1);
        let job = move || {
            // The caller may have gone at its deadline.
            let _ = result.send(call());
        };
        // Of a worker that has ended the answer's sender goes with the job.
        self.post(job);
        if let Some(result) = poll_briefly(&answer) {
            return Ok(result);
        }
        match answer.recv_timeout(deadline.saturating_sub(start.elapsed())) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(TimedOut { waited: start.elapsed() })
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn results_come_back_in_order() {
        let lane = Lane::start().unwrap();
        // Miri takes 50 ms for each.
        for number in 0..if cfg!(miri) { 20 } else { 1000 } {
            assert_eq!(lane.run(Duration::from_secs(5), move || number * 2), Ok(number * 2));
        }
    }

    /// A busy machine may delay a single try, so the shortest of a few counts.
    #[test]
    fn a_call_that_never_returns_costs_its_deadline_and_no_more() {
        let deadline = Duration::from_millis(30);
        let mut shortest = Duration::MAX;
        for _ in 0..5 {
            let lane = Lane::start().unwrap();
            let stuck = || loop {
                std::thread::park()
            };
            let TimedOut { waited } = lane.run(deadline, stuck).unwrap_err();
            assert!(waited >= deadline, "{waited:?}");
            // The next call stands behind the stuck one, and has its own deadline.
            assert!(lane.run(deadline, || 1).is_err());
            shortest = shortest.min(waited);
            // Miri's clock counts what it interprets, so there a wait has no upper bound to speak of.
            if cfg!(miri) || shortest < deadline + Duration::from_millis(50) {
                return;
            }
        }
        panic!("the shortest wait was {shortest:?}");
    }

    #[test]
    fn a_call_that_panics_is_a_timeout_at_once_and_not_a_hang() {
        let lane = Lane::start().unwrap();
        let start = Instant::now();
        assert!(lane.run(Duration::from_secs(20), || panic!("planted")).is_err());
        // So is the next, which finds no worker.
        assert!(lane.run(Duration::from_secs(20), || 1).is_err());
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
