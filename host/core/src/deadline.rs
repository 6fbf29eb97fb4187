//! Times at which waits end.
//!
//! Invariant: a duration of any length gives a time without overflow.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// The distance of the time that replaces one beyond the clock's range.
const FARTHEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns the time `time` from now.
pub fn after(time: Duration) -> Instant {
    later(Instant::now(), time)
}

/// Returns the time `time` after `start`. If the clock cannot express it, as for [`Duration::MAX`],
/// returns one year after `start`.
pub fn later(start: Instant, time: Duration) -> Instant {
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
