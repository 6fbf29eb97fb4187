//! A floor under the host's memory: below it no step begins.
//!
//! Where CPU and GPU share one memory, the kernel ends a process, or the whole machine stands still, once it is used up. A thread of
//! this process looks at what is available while arenas with a floor live, and at how fast others take it: a step that is begun must be
//! done before they have. Invariant: it looks again before memory can have fallen to the floor, as fast as it has been seen to fall on such
//! machines, and a step is refused by figures of that moment alone.

#![forbid(unsafe_code)]

use crate::cgroup::Cgroups;
use crate::error::{Error, Result};
use crate::shortage::{HostMemory, MemoryShortage, ProcessMemory};
use cuda_std::float_mode;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How fast memory falls at most, in bytes a second. On a GB10 MemAvailable was seen to fall from 34 to 12.7 GiB in 1.5 s.
const FALL: u64 = 16 << 30;
/// How often the thread looks at most and at least.
const SOONEST: Duration = Duration::from_millis(10);
const LATEST: Duration = Duration::from_secs(1);

/// Over how long at least it is measured how fast others take memory.
const WINDOW: Duration = Duration::from_millis(200);
/// How many steps may run before one is refused: a captured one, and the one that is queued behind it.
const STEPS_AHEAD: u32 = 2;
/// Steps are not taken to be longer than this together: a pause between two is no step.
const LONGEST: Duration = Duration::from_secs(4);

/// The watch of this process, while an arena needs it.
static WATCH: Mutex<Weak<Watch>> = Mutex::new(Weak::new());

/// What the thread has seen.
#[derive(Debug)]
struct Watch {
    cgroups: Cgroups,
    /// The highest floor that an arena has asked for.
    floor_bytes: AtomicU64,
    /// The longest that an arena's steps have been seen to take, in nanoseconds.
    horizon: AtomicU64,
    /// What others leave, and when.
    seen: Mutex<Option<(Instant, u64)>>,
    /// Bytes a second by which that became less.
    others_take: AtomicU64,
    /// A step of such an arena may have to be refused.
    is_short: AtomicBool,
    /// Goes with the last arena, and the thread with it.
    _alive: Sender<()>,
}

impl Watch {
    /// That of this process, which is begun if there is none.
    fn get(floor_bytes: u64) -> Arc<Self> {
        let mut current = WATCH.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watch) = current.upgrade() {
            return watch;
        }
        let (alive, gone) = mpsc::channel();
        let watch = Arc::new(Self {
            cgroups: Cgroups::find(Path::new("/")),
            floor_bytes: AtomicU64::new(floor_bytes),
            horizon: AtomicU64::new(0),
            seen: Mutex::new(None),
            others_take: AtomicU64::new(0),
            is_short: AtomicBool::new(false),
            _alive: alive,
        });
        *current = Arc::downgrade(&watch);
        let watched = Arc::downgrade(&watch);
        let run = move || {
            float_mode::set_default();
            let mut pause = watch_once(&watched);
            while let Some(RecvTimeoutError::Timeout) = pause.and_then(|pause| gone.recv_timeout(pause).err()) {
                pause = watch_once(&watched);
            }
        };
        if let Err(error) = thread::Builder::new().name("stepscope-memory".into()).spawn(run) {
            tracing::warn!(%error, "no thread watches the host's memory: a step is not refused when it is short");
        }
        watch
    }

    /// Looks from now on for a floor of so many bytes, too.
    fn raise(&self, floor_bytes: u64) {
        self.floor_bytes.fetch_max(floor_bytes, Ordering::Relaxed);
        self.look();
    }

    /// Looks, and says how long that holds.
    fn look(&self) -> Duration {
        float_mode::in_default(|| self.look_now())
    }

    fn look_now(&self) -> Duration {
        let floor_bytes = self.floor_bytes.load(Ordering::Relaxed);
        let memory = HostMemory::read(&self.cgroups);
        self.see(&memory);
        let horizon = Duration::from_nanos(self.horizon.load(Ordering::Relaxed));
        let is_short = memory.shortage_for(floor_bytes, [0, self.others_take(horizon)]).is_some();
        self.is_short.store(is_short, Ordering::Relaxed);
        Duration::from_secs_f64(memory.above(floor_bytes) as f64 / FALL as f64).clamp(SOONEST, LATEST)
    }

    /// Notes how fast others take memory.
    fn see(&self, memory: &HostMemory) {
        let resident_bytes = ProcessMemory::read().map_or(0, |process| process.resident_bytes);
        let Some(left) = memory.left_by_others(resident_bytes) else { return };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, before) = *seen.get_or_insert((Instant::now(), left));
        let over = at.elapsed();
        if over >= WINDOW {
            let a_second = before.saturating_sub(left) as f64 / over.as_secs_f64();
            self.others_take.store(a_second as u64, Ordering::Relaxed);
            *seen = Some((Instant::now(), left));
        }
    }

    /// Measures anew: what a GPU's driver was asked for before the first step looks as if others had taken it.
    fn forget(&self) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.others_take.store(0, Ordering::Relaxed);
    }

    /// What others take in this time.
    fn others_take(&self, time: Duration) -> u64 {
        float_mode::in_default(|| (self.others_take.load(Ordering::Relaxed) as f64 * time.as_secs_f64()) as u64)
    }
}

/// Looks, if anybody still wants it.
fn watch_once(watch: &Weak<Watch>) -> Option<Duration> {
    watch.upgrade().map(|watch| watch.look())
}

/// The floor of an arena, and of the steps that were captured in it. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Floor(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Zero: there is none.
    bytes: AtomicU64,
    /// From the first one on.
    watch: OnceLock<Arc<Watch>>,
    begun: Mutex<Begun>,
}

/// When a step was last begun, and how long the steps before took.
#[derive(Debug, Default)]
struct Begun {
    at: Option<Instant>,
    step: Duration,
}

impl Begun {
    /// A step begins.
    fn now(&mut self) {
        let now = Instant::now();
        let last = self.at.replace(now).map_or(Duration::ZERO, |at| now - at);
        // A long one among short ones counts for some time.
        self.step = last.max(self.step * 7 / 8);
    }

    /// How long it takes until a step that is begun now is done.
    fn horizon(&self) -> Duration {
        (self.step * STEPS_AHEAD).min(LONGEST)
    }
}

impl Floor {
    /// A floor of so many bytes; zero is none.
    pub(super) fn new(bytes: u64) -> Self {
        let floor =
            Self(Arc::new(Shared { bytes: AtomicU64::new(0), watch: OnceLock::new(), begun: Mutex::default() }));
        floor.set(bytes);
        floor
    }

    /// Another height from now on.
    pub(super) fn set(&self, bytes: u64) {
        // Miri wants every thread to have ended before `main` returns.
        if bytes > 0 && !cfg!(miri) {
            self.0.watch.get_or_init(|| Watch::get(bytes)).raise(bytes);
        }
        self.0.bytes.store(bytes, Ordering::Relaxed);
    }

    /// The shortage, if less is available now, or will be before a step is done. Costs a few loads while there is enough.
    pub(crate) fn shortage(&self) -> Option<MemoryShortage> {
        let watch = self.0.watch.get()?;
        if !watch.is_short.load(Ordering::Relaxed) {
            return None;
        }
        // Of another arena's floor or steps, or some time ago.
        self.shortage_for(0)
    }

    /// The shortage, if less will be available once the run has taken so many more bytes. None without a floor.
    pub(crate) fn shortage_for(&self, still_wanted_bytes: u64) -> Option<MemoryShortage> {
        let watch = self.0.watch.get()?;
        let floor_bytes = self.0.bytes.load(Ordering::Relaxed);
        let floor_bytes = (floor_bytes > 0).then_some(floor_bytes)?;
        let others_take_bytes = watch.others_take(self.begun().horizon());
        HostMemory::read(&watch.cgroups).shortage_for(floor_bytes, [still_wanted_bytes, others_take_bytes])
    }

    fn begun(&self) -> MutexGuard<'_, Begun> {
        self.0.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step begins: an error when less is available now, or will be before it is done.
    ///
    /// # Errors
    /// [`Error::MemoryShortage`].
    pub(crate) fn begin_step(&self) -> Result<()> {
        let Some(watch) = self.0.watch.get() else { return Ok(()) };
        let mut begun = self.begun();
        if begun.at.is_none() {
            watch.forget();
        }
        begun.now();
        watch.horizon.fetch_max(begun.horizon().as_nanos() as u64, Ordering::Relaxed);
        drop(begun);
        self.shortage().map_or(Ok(()), |shortage| Err(Error::MemoryShortage(Box::new(shortage))))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::admission::{MemInfo, Situation};

    #[test]
    fn a_floor_that_nobody_can_have_is_told_and_one_of_a_byte_is_not() {
        let (high, low) = (Floor::new(u64::MAX), Floor::new(1));
        if Situation::read_host().is_some() {
            let error = high.begin_step().unwrap_err();
            assert!(matches!(&error, Error::MemoryShortage(shortage) if shortage.floor_bytes > 1), "{error}");
        }
        assert_eq!(low.begin_step(), Ok(()), "another's floor is not its own");
        let captured = high.clone();
        high.set(0);
        assert_eq!((high.begin_step(), captured.begin_step()), (Ok(()), Ok(())));
    }

    #[test]
    fn without_a_floor_nobody_watches() {
        let floor = Floor::new(0);
        assert!(floor.0.watch.get().is_none());
        assert_eq!(floor.begin_step(), Ok(()));
    }

    #[test]
    fn a_step_counts_as_long_as_the_longest_of_the_last() {
        let mut begun = Begun::default();
        begun.now();
        assert_eq!(begun.horizon(), Duration::ZERO, "nothing is known of the first");
        thread::sleep(Duration::from_millis(80));
        begun.now();
        let step = begun.step;
        assert!(step >= Duration::from_millis(80));
        begun.now();
        assert!(begun.step >= step * 3 / 4 && begun.horizon() == (begun.step * STEPS_AHEAD).min(LONGEST));
        begun.step = Duration::from_secs(60);
        assert_eq!(begun.horizon(), LONGEST);
    }

    #[test]
    fn what_others_take_is_known_over_a_window_and_what_this_process_takes_is_not_theirs() {
        let watch = Watch {
            cgroups: Cgroups::find(Path::new("/no such place")),
            floor_bytes: AtomicU64::new(0),
            horizon: AtomicU64::new(0),
            seen: Mutex::new(None),
            others_take: AtomicU64::new(0),
            is_short: AtomicBool::new(false),
            _alive: mpsc::channel().0,
        };
        let memory = |available_bytes| HostMemory {
            host: Some(MemInfo { free_bytes: 0, available_bytes }),
            ..HostMemory::default()
        };
        watch.see(&memory(9 << 30));
        watch.see(&memory(8 << 30));
        assert_eq!(watch.others_take(LONGEST), 0, "too soon to tell");
        thread::sleep(WINDOW);
        watch.see(&memory(7 << 30));
        let taken = watch.others_take(WINDOW);
        assert!((1 << 27..=2 << 30).contains(&taken), "{taken}: 2 GiB in a window or more");
        thread::sleep(WINDOW);
        watch.see(&memory(9 << 30));
        assert_eq!(watch.others_take(WINDOW), 0);
    }

    #[test]
    fn the_watch_ends_with_the_last_floor() {
        let floor = Floor::new(1);
        let watch = Arc::downgrade(floor.0.watch.get().unwrap());
        let other = floor.clone();
        drop(floor);
        assert!(watch.upgrade().is_some());
        drop(other);
        // Floors of other tests may share it, and the thread may be looking.
        let start = Instant::now();
        while watch.upgrade().is_some() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(watch.upgrade().is_none());
    }
}
