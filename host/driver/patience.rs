//! How long a thread that tests a device waits for it, in place of the deadlines that it is given: so long for one launch, and so
//! long in all for what was launched.
//!
//! Invariant: nothing else takes of that time, so a slow host cannot make a device look stuck.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// What is left, while this thread tests a device.
    static LEFT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Runs `code` with so much patience.
pub(crate) fn limited<R>(patience: Duration, code: impl FnOnce() -> R) -> R {
    struct Before(Option<Duration>);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
        }
    }
    let _before = Before(LEFT.replace(Some(patience)));
    code()
}

/// Whether this thread tests a device.
pub(super) fn is_limited() -> bool {
    LEFT.get().is_some()
}

/// The deadline of a launch.
pub(super) fn of_launch(deadline: Duration) -> Duration {
    LEFT.get().unwrap_or(deadline)
}

/// Waits for the device: `wait` hears until when.
pub(super) fn of_wait<R>(deadline: Duration, wait: impl FnOnce(Duration) -> R) -> R {
    let Some(left) = LEFT.get() else { return wait(deadline) };
    let start = Instant::now();
    let waited_for = wait(left);
    LEFT.set(Some(left.saturating_sub(start.elapsed())));
    waited_for
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn waits_take_of_it_and_nothing_else_does() {
        let patience = Duration::from_secs(2);
        limited(patience, || {
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(of_launch(DEADLINE), patience);
            of_wait(DEADLINE, |left| {
                assert_eq!(left, patience);
                std::thread::sleep(Duration::from_millis(2));
            });
            let left = of_wait(DEADLINE, |left| left);
            assert!(left <= patience - Duration::from_millis(2) && of_launch(DEADLINE) <= left, "{left:?}");
            limited(Duration::ZERO, || assert_eq!(of_launch(DEADLINE), Duration::ZERO));
            assert_ne!(of_launch(DEADLINE), Duration::ZERO);
        });
        assert_eq!(of_launch(DEADLINE), DEADLINE);
        of_wait(DEADLINE, |left| assert_eq!(left, DEADLINE));
    }
}
