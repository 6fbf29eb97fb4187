//! std's channels, threads and clock in a form that loom explores.
//!
//! Invariant: they guarantee exactly what std's do. Time is not measured: a deadline may pass at
//! any moment, before or after any other event, unless it is [`NEVER`].

pub(crate) use loom::thread;
use std::time::Duration;

/// A deadline that does not pass.
pub(crate) const NEVER: Duration = Duration::MAX;

/// A clock that stands still.
pub(crate) struct Instant;

impl Instant {
    pub(crate) fn now() -> Self {
        Self
    }

    pub(crate) fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
}

/// Channels as in `std::sync::mpsc`.
pub(crate) mod mpsc {
    use super::NEVER;
    use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    use std::collections::VecDeque;
    use std::time::Duration;

    // A failed model does not run on: its channels do not touch loom while it unwinds.

    /// The messages that were sent and not received, and the remaining ends.
    struct State<T> {
        messages: VecDeque<T>,
        senders: usize,
        has_receiver: bool,
        /// The receiver's waits, and those of them that have met their deadline.
        waits: usize,
        ended: Vec<usize>,
    }

    struct Channel<T> {
        state: Mutex<State<T>>,
        changed: Condvar,
    }

    impl<T> Channel<T> {
        fn state(&self) -> MutexGuard<'_, State<T>> {
            self.state.lock().expect("no thread of a model panics")
        }

        /// Changes the state and wakes all threads that wait for it.
        fn change<R>(&self, change: impl FnOnce(&mut State<T>) -> R) -> R {
            let result = change(&mut self.state());
            self.changed.notify_all();
            result
        }
    }

    pub(crate) struct Sender<T>(Arc<Channel<T>>);

    pub(crate) struct Receiver<T>(Arc<Channel<T>>);

    #[derive(Debug)]
    pub(crate) enum RecvTimeoutError {
        Timeout,
        Disconnected,
    }

    pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let state = State { messages: VecDeque::new(), senders: 1, has_receiver: true, waits: 0, ended: Vec::new() };
        let channel = Arc::new(Channel { state: Mutex::new(state), changed: Condvar::new() });
        (Sender(Arc::clone(&channel)), Receiver(channel))
    }

    /// Returns an unbounded [`channel`]: the driver thread never sends more than a bounded one
    /// holds.
    pub(crate) fn sync_channel<T>(_: usize) -> (Sender<T>, Receiver<T>) {
        channel()
    }

    impl<T> Sender<T> {
        /// Sends a message, or returns it when no receiver is left.
        pub(crate) fn send(&self, message: T) -> Result<(), T> {
            self.0.change(|state| {
                if !state.has_receiver {
                    return Err(message);
                }
                state.messages.push_back(message);
                Ok(())
            })
        }
    }

    impl<T> std::fmt::Debug for Sender<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Sender")
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            self.0.change(|state| state.senders += 1);
            Self(Arc::clone(&self.0))
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                self.0.change(|state| state.senders -= 1);
            }
        }
    }

    impl<T: Send + 'static> Receiver<T> {
        pub(crate) fn recv(&self) -> Result<T, RecvTimeoutError> {
            self.recv_timeout(NEVER)
        }

        pub(crate) fn recv_timeout(&self, deadline: Duration) -> Result<T, RecvTimeoutError> {
            let mut state = self.0.state();
            state.waits += 1;
            let wait = state.waits;
            drop(state);
            if deadline != NEVER {
                let channel = Arc::clone(&self.0);
                loom::thread::spawn(move || channel.change(|state| state.ended.push(wait)));
            }
            self.receive(wait)
        }

        fn receive(&self, wait: usize) -> Result<T, RecvTimeoutError> {
            let mut state = self.0.state();
            loop {
                if let Some(message) = state.messages.pop_front() {
                    return Ok(message);
                }
                if state.senders == 0 {
                    return Err(RecvTimeoutError::Disconnected);
                }
                if state.ended.contains(&wait) {
                    return Err(RecvTimeoutError::Timeout);
                }
                state = self.0.changed.wait(state).expect("no thread of a model panics");
            }
        }
    }

    impl<T: Send + 'static> Iterator for Receiver<T> {
        type Item = T;

        fn next(&mut self) -> Option<T> {
            self.recv().ok()
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                // Dropped outside the lock, because a message may hold an end of another channel.
                drop(self.0.change(|state| {
                    state.has_receiver = false;
                    std::mem::take(&mut state.messages)
                }));
            }
        }
    }
}
