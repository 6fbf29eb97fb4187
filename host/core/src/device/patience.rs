//! A limit on how long a thread that tests a device waits for it. It replaces the usual deadlines
//! with one time for each launch, and one total time for all waits for launched work.
//!
//! Invariant: only waits for the device use up this time, so a slow host cannot make a device
//! appear stuck.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// The remaining time, while this thread tests a device.
    static LEFT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Runs `code` with this limit.
pub fn limited<R>(patience: Duration, code: impl FnOnce() -> R) -> R {
    struct Before(Option<Duration>);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
        }
    }
    let _before = Before(LEFT.replace(Some(patience)));
    code()
}

/// Returns true if this thread tests a device.
pub(super) fn is_limited() -> bool {
    LEFT.get().is_some()
}

/// Returns the deadline of a launch.
pub(super) fn of_launch(deadline: Duration) -> Duration {
    LEFT.get().unwrap_or(deadline)
}

/// Waits for the device. `wait` receives the longest time to wait.
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
    fn only_waits_use_the_budget() {
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
