//! A worker thread for driver calls that can block, so that a caller never waits longer than its deadline.
//!
//! A call stuck in the kernel cannot be cancelled. At the deadline the caller goes on with a timeout, and the thread is
//! given up with the call: it ends with the process. Invariant: a call's result reaches its own caller or nobody. All
//! interleavings of callers, worker and deadlines are explored in `tests/loom`, which brings the `model` of channels and clock.

#![forbid(unsafe_code)]

#[cfg(loom)]
use crate::model::{Instant, mpsc, thread};
use mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;
#[cfg(not(loom))]
use std::{sync::mpsc, thread, time::Instant};

type Job = Box<dyn FnOnce() + Send>;

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
            for job in queue {
                job();
            }
        })?;
        Ok(Self { jobs })
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
        // A worker that an earlier call's panic ended takes no job: the answer's sender goes with it.
        let _ = self.jobs.send(Box::new(job));
        match answer.recv_timeout(deadline) {
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

    #[test]
    fn a_call_that_never_returns_costs_its_deadline_and_no_more() {
        let lane = Lane::start().unwrap();
        let deadline = Duration::from_millis(30);
        let TimedOut { waited } = lane
            .run(deadline, || {
                loop {
                    std::thread::park()
                }
            })
            .unwrap_err();
        assert!(waited >= deadline && waited < deadline + Duration::from_millis(50), "{waited:?}");
        // The next call stands behind the stuck one, and has its own deadline.
        assert!(lane.run(deadline, || 1).is_err());
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
