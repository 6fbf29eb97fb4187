//! A witness of the machine's own pauses, for tests of deadlines.
//!
//! The library owes an answer by a deadline plus [`SLACK`]. A machine with more to do than cores may run nobody for longer
//! than that; the witness, a thread that wants to wake every millisecond, knows for how long it was itself kept waiting.
//! Invariant: a limit is extended by that time and by nothing else, so on an idle machine it is the deadline plus
//! [`SLACK`] to a millisecond or two.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a call may take beyond its deadline.
pub(crate) const SLACK: Duration = Duration::from_millis(50);
/// How long "at once" lasts: no wait, no look at the device.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(5);
/// The pulse.
const BEAT: Duration = Duration::from_millis(1);

struct Witness {
    start: Instant,
    /// Nanoseconds from the start to the latest beat.
    latest: AtomicU64,
    /// Nanoseconds that beats came late, in all.
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

    /// How late beats have come in all, the one that is due included.
    fn late(&self) -> Duration {
        let due = lateness(self.latest.load(Ordering::SeqCst), self.now());
        Duration::from_nanos(self.late.load(Ordering::SeqCst) + due)
    }
}

/// How late the second of two beats is: nothing when it is off by less than a beat, as sleeps are on any machine.
fn lateness(before: u64, now: u64) -> u64 {
    let beat = BEAT.as_nanos() as u64;
    let gap = now.saturating_sub(before);
    if gap < 2 * beat { 0 } else { gap - beat }
}

/// A stretch of time under the witness's eyes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    start: Instant,
    late: Duration,
}

impl Watch {
    pub(crate) fn start() -> Self {
        let late = Witness::get().late();
        Self { start: Instant::now(), late }
    }

    /// How long it has lasted.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// For how long the machine kept the witness waiting meanwhile.
    pub(crate) fn pauses(&self) -> Duration {
        Witness::get().late().saturating_sub(self.late)
    }

    /// Whether it has lasted longer than `limit` and the machine's pauses.
    pub(crate) fn exceeds(&self, limit: Duration) -> bool {
        let elapsed = self.elapsed();
        elapsed > limit && elapsed > limit + self.pauses()
    }

    /// # Panics
    /// When it has lasted longer than `limit` and the machine's pauses.
    #[track_caller]
    pub(crate) fn within(&self, limit: Duration, what: &str) {
        let (elapsed, late) = (self.elapsed(), self.exceeds(limit));
        assert!(!late, "{what}: {elapsed:?} of at most {limit:?}, with the machine's pauses of {:?}", self.pauses());
    }
}
