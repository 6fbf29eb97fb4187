//! Moments at which waits end.
//!
//! Invariant: a time of any length gives a moment; none overflows.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// The distance of the moment that stands for one which the clock cannot express.
const FARTHEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The moment that is `time` away.
pub(crate) fn after(time: Duration) -> Instant {
    later(Instant::now(), time)
}

/// The moment `time` after `start`. Where the clock cannot express it, as for [`Duration::MAX`], it
/// is a year after `start`.
pub(crate) fn later(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start + FARTHEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_time_gives_a_moment() {
        let before = Instant::now();
        for time in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_secs(1 << 63)] {
            assert!(after(time) >= before + FARTHEST, "{time:?}");
        }
        let hour = Duration::from_secs(3600);
        assert!(after(hour) >= before + hour && after(hour) < before + FARTHEST);
        assert!(after(Duration::ZERO) >= before);
    }
}
