//! A witness of the machine's own pauses, for tests of deadlines.
//!
//! The library must answer by a deadline plus [`SLACK`]. A machine with more work than cores may
//! delay a ready thread for longer than that. Two sources measure the delay. On Linux the scheduler
//! reports how long the calling thread was ready and did not run. For other threads, a witness
//! thread wakes every millisecond and measures how late it woke.
//!
//! Invariant: only these times extend a limit, so on an idle machine it is the deadline plus
//! [`SLACK`].

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time that a call may take beyond its deadline.
pub(crate) const SLACK: Duration = Duration::from_millis(50);
/// The longest duration of "at once": no wait, no poll of the device.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(5);
/// The interval of the witness's beats.
const BEAT: Duration = Duration::from_millis(1);

struct Witness {
    start: Instant,
    /// Nanoseconds from the start to the latest beat.
    latest: AtomicU64,
    /// The total nanoseconds by which beats came late.
    late: AtomicU64,
}

impl Witness {
    fn get() -> &'static Self {
        static WITNESS: OnceLock<&'static Witness> = OnceLock::new();
        WITNESS.get_or_init(|| {
            let (latest, late) = (AtomicU64::new(0), AtomicU64::new(0));
            let witness: &Self = Box::leak(Box::new(Self { start: Instant::now(), latest, late }));
            std::thread::Builder::new().name("witness".into()).spawn(|| witness.beat()).expect("a thread");
            witness
        })
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn beat(&self) {
        loop {
            std::thread::sleep(BEAT);
            let now = self.now();
            let before = self.latest.swap(now, Ordering::SeqCst);
            self.late.fetch_add(lateness(before, now), Ordering::SeqCst);
        }
    }

    /// Returns the total lateness of the beats, including the one that is due.
    fn late(&self) -> Duration {
        let due = lateness(self.latest.load(Ordering::SeqCst), self.now());
        Duration::from_nanos(self.late.load(Ordering::SeqCst) + due)
    }
}

/// Returns the lateness of the second of two beats. It is 0 if it is less than a beat, as sleeps
/// are inexact on any machine.
fn lateness(before: u64, now: u64) -> u64 {
    let beat = BEAT.as_nanos() as u64;
    let gap = now.saturating_sub(before);
    if gap < 2 * beat { 0 } else { gap - beat }
}

/// Returns the total time for which this thread was ready to run and did not: the second figure of
/// its `schedstat`. It is zero if the system does not report it.
#[cfg(target_os = "linux")]
fn ready_and_not_run() -> Duration {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    thread_local! {
        static FILE: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let mut text = [0; 96];
    let length = FILE.with(|file| file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok())).unwrap_or(0);
    let figures = std::str::from_utf8(&text[..length]).unwrap_or_default();
    let nanoseconds = figures.split_ascii_whitespace().nth(1).and_then(|figure| figure.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

#[cfg(not(target_os = "linux"))]
fn ready_and_not_run() -> Duration {
    Duration::ZERO
}

/// A stretch of time of one thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    start: Instant,
    late: Duration,
    not_run: Duration,
}

impl Watch {
    pub(crate) fn start() -> Self {
        let (late, not_run) = (Witness::get().late(), ready_and_not_run());
        Self { start: Instant::now(), late, not_run }
    }

    /// Returns the elapsed time.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the time for which the machine delayed this thread and the witness meanwhile.
    pub(crate) fn pauses(&self) -> Duration {
        Witness::get().late().saturating_sub(self.late) + ready_and_not_run().saturating_sub(self.not_run)
    }

    /// True if more time has passed than `limit` and the machine's pauses.
    pub(crate) fn exceeds(&self, limit: Duration) -> bool {
        let elapsed = self.elapsed();
        elapsed > limit && elapsed > limit + self.pauses()
    }

    /// # Panics
    /// More time has passed than `limit` and the machine's pauses.
    #[track_caller]
    pub(crate) fn within(&self, limit: Duration, what: &str) {
        let (elapsed, late) = (self.elapsed(), self.exceeds(limit));
        assert!(
            !late,
            "{what}: took {elapsed:?}, more than {limit:?} plus the machine's pauses of {:?}",
            self.pauses()
        );
    }
}
