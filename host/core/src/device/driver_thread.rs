//! The one thread that calls the driver, so that a caller never waits longer than its deadline.
//!
//! A call that is stuck in the kernel cannot be canceled. At the deadline the caller continues with
//! a timeout, and the thread is abandoned with the call. It ends with the process. Caller and
//! worker poll for each other for some microseconds before they sleep, because waking a sleeper
//! takes longer than most calls.
//!
//! Invariant: a call's result reaches only its own caller. `tests/loom` explores all interleavings
//! of callers, worker and deadlines, and supplies the `model` of channels and clock. In that model
//! there is no polling.

#![forbid(unsafe_code)]

#[cfg(loom)]
use crate::model::{Instant, mpsc, thread};
#[cfg(not(loom))]
use mpsc::TryRecvError;
use mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
#[cfg(not(loom))]
use std::{sync::mpsc, thread, time::Instant};

/// The time that caller and worker poll before they sleep. Most calls take a microsecond, and
/// waking a sleeper takes several.
#[cfg(not(loom))]
const SPIN_TIME: Duration = Duration::from_micros(20);
/// The number of polls between two clock reads. After each such round the thread yields.
#[cfg(not(loom))]
const POLLS: u32 = 64;

type Job = Box<dyn FnOnce() + Send>;

/// Polls `look` for this long, and returns its value if there is one.
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

/// Receives a message within [`SPIN_TIME`]. Returns none if there is none or the senders are gone.
#[cfg(not(loom))]
fn poll_briefly<T>(channel: &Receiver<T>) -> Option<T> {
    let look = || match channel.try_recv() {
        Ok(message) => Some(Some(message)),
        Err(TryRecvError::Disconnected) => Some(None),
        Err(TryRecvError::Empty) => None,
    };
    watch(SPIN_TIME, look).flatten()
}

#[cfg(loom)]
fn poll_briefly<T>(_: &Receiver<T>) -> Option<T> {
    None
}

/// A worker thread.
#[derive(Debug)]
pub(super) struct DriverThread {
    jobs: Sender<Job>,
}

/// A call that had not returned at its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimedOut {
    /// The time that the caller waited.
    pub(super) waited: Duration,
}

impl DriverThread {
    /// Starts the worker. It ends when this value is dropped and its last call has returned.
    pub(super) fn start() -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new().name("stepscope-driver".into()).spawn(move || {
            while let Some(job) = poll_briefly(&queue).or_else(|| queue.recv().ok()) {
                job();
            }
        })?;
        Ok(Self { jobs })
    }

    /// Posts a call that no caller waits for. It runs after all earlier calls.
    pub(super) fn post(&self, call: impl FnOnce() + Send + 'static) {
        // A worker that ended by a panic takes no job. The caller that waits for the next one gets
        // an error.
        let _ = self.jobs.send(Box::new(call));
    }

    /// Runs `call` on the worker and waits for it until the deadline. The call owns everything that
    /// it uses, so it may end later, or never.
    pub(super) fn run<R: Send + 'static>(
        &self,
        deadline: Duration,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, TimedOut> {
        let start = Instant::now();
        let (result, answer) = mpsc::sync_channel(1);
        let job = move || {
            // The caller may have left at its deadline.
            let _ = result.send(call());
        };
        // If the worker has ended, the job and with it the answer's sender are dropped.
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
        let lane = DriverThread::start().unwrap();
        // Each call takes Miri 50 ms.
        for number in 0..if cfg!(miri) { 20 } else { 1000 } {
            assert_eq!(lane.run(Duration::from_secs(5), move || number * 2), Ok(number * 2));
        }
    }

    /// Checks the shortest of several tries, because a busy machine may delay a single one.
    #[test]
    fn hung_call_costs_only_its_deadline() {
        let deadline = Duration::from_millis(30);
        let mut shortest = Duration::MAX;
        for _ in 0..5 {
            let lane = DriverThread::start().unwrap();
            let stuck = || loop {
                std::thread::park()
            };
            let TimedOut { waited } = lane.run(deadline, stuck).unwrap_err();
            assert!(waited >= deadline, "{waited:?}");
            // The next call is queued after the stuck one, and has its own deadline.
            assert!(lane.run(deadline, || 1).is_err());
            shortest = shortest.min(waited);
            // Miri's clock counts interpreted instructions, so no upper bound holds there.
            if cfg!(miri) || shortest < deadline + Duration::from_millis(50) {
                return;
            }
        }
        panic!("the shortest wait was {shortest:?}");
    }

    #[test]
    fn panicking_call_fails_at_once() {
        let lane = DriverThread::start().unwrap();
        let start = Instant::now();
        assert!(lane.run(Duration::from_secs(20), || panic!("planted")).is_err());
        // So does the next call, which finds no worker.
        assert!(lane.run(Duration::from_secs(20), || 1).is_err());
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
