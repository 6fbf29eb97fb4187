//! The one thread that calls the driver, so that a caller never waits longer than its deadline.
//!
//! A call that is stuck in the kernel cannot be canceled. At the deadline the caller continues with
//! a timeout, and the thread is abandoned with the call. It ends with the process. Caller and
//! worker poll for each other for some microseconds before they sleep, because waking a sleeper
//! takes longer than most calls.
//!
//! Invariant: a call's result reaches only its own caller, and so does the message of its panic.
//! `tests/loom` explores all interleavings of callers, worker and deadlines, and supplies the
//! `model` of channels and clock. In that model there is no polling.

#![forbid(unsafe_code)]

#[cfg(loom)]
use crate::model::{Instant, mpsc, thread};
#[cfg(not(loom))]
use mpsc::TryRecvError;
use mpsc::{Receiver, RecvTimeoutError, Sender};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
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

/// The reason that a call has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoResult {
    /// It had not returned at its deadline.
    TimedOut {
        /// The time that the caller waited.
        waited: Duration,
    },
    /// It panicked.
    Panicked {
        /// The message of the panic.
        message: String,
    },
}

/// Runs `call`. Returns its result, or the message of its panic. The caller must not use what the
/// call may have left half done.
pub(super) fn caught<R>(call: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(panic_message)
}

/// Returns the message of a panic.
pub fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = text.unwrap_or("no message").to_owned();
    // Dropping the value of a panic can panic in turn.
    std::mem::forget(panic);
    message
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

    /// Posts a call that no caller waits for. It runs after all earlier calls, and does not panic.
    pub(super) fn post(&self, call: impl FnOnce() + Send + 'static) {
        // The worker takes jobs as long as this value exists.
        let _ = self.jobs.send(Box::new(call));
    }

    /// Runs `call` on the worker and waits for it until the deadline. The call owns everything that
    /// it uses, so it may end later, or never.
    pub(super) fn run<R: Send + 'static>(
        &self,
        deadline: Duration,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, NoResult> {
        let start = Instant::now();
        let (result, answer) = mpsc::sync_channel(1);
        let job = move || {
            // The caller may have left at its deadline.
            let _ = result.send(caught(call));
        };
        self.post(job);
        let answer = match poll_briefly(&answer) {
            Some(result) => Ok(result),
            None => answer.recv_timeout(deadline.saturating_sub(start.elapsed())),
        };
        let panicked = |message| NoResult::Panicked { message };
        match answer {
            Ok(result) => result.map_err(panicked),
            Err(RecvTimeoutError::Timeout) => Err(NoResult::TimedOut { waited: start.elapsed() }),
            // A worker that has ended drops the job, and with it the answer's sender.
            Err(RecvTimeoutError::Disconnected) => Err(panicked("the driver thread has ended".into())),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn results_come_back_in_order() {
        let worker = DriverThread::start().unwrap();
        // Each call takes Miri 50 ms.
        for number in 0..if cfg!(miri) { 20 } else { 1000 } {
            assert_eq!(worker.run(Duration::from_secs(5), move || number * 2), Ok(number * 2));
        }
    }

    /// Checks the shortest of several tries, because a busy machine may delay a single one.
    #[test]
    fn hung_call_costs_only_its_deadline() {
        let deadline = Duration::from_millis(30);
        let mut shortest = Duration::MAX;
        for _ in 0..5 {
            let worker = DriverThread::start().unwrap();
            let stuck = || loop {
                std::thread::park()
            };
            let NoResult::TimedOut { waited } = worker.run(deadline, stuck).unwrap_err() else { panic!("no deadline") };
            assert!(waited >= deadline, "{waited:?}");
            // The next call is queued after the stuck one, and has its own deadline.
            assert!(worker.run(deadline, || 1).is_err());
            shortest = shortest.min(waited);
            // Miri's clock counts interpreted instructions, so no upper bound holds there.
            if cfg!(miri) || shortest < deadline + Duration::from_millis(50) {
                return;
            }
        }
        panic!("the shortest wait was {shortest:?}");
    }

    #[test]
    fn panic_is_reported_at_once() {
        /// The value of a panic, which panics again when it is dropped.
        struct Twice;
        impl Drop for Twice {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        let worker = DriverThread::start().unwrap();
        let start = Instant::now();
        let run = |call: fn() -> u32| worker.run(Duration::from_secs(20), call);
        let panicked = |message: &str| Err(NoResult::Panicked { message: message.into() });
        assert_eq!(run(|| panic!("planted")), panicked("planted"));
        assert_eq!(run(|| panic!("planted {}", 2)), panicked("planted 2"));
        assert_eq!(run(|| std::panic::panic_any(Twice)), panicked("no message"));
        assert_eq!(run(|| 1), Ok(1));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
