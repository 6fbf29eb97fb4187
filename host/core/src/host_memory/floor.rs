//! A floor for the host's memory: no step begins below it.
//!
//! Where CPU and GPU share one memory, running out of it makes the kernel kill a process or stalls
//! the whole machine. While arenas with a floor exist, a thread of this process reads the available
//! memory and how fast other processes take it. A step that begins must finish before they have
//! taken the rest.
//!
//! Invariant: the thread reads again before memory can fall to the floor at the fastest rate
//! measured on such machines. A step is refused only by figures read at that moment.

#![forbid(unsafe_code)]

use super::cgroup::Cgroups;
use super::shortage::{HostMemory, MemoryShortage, ProcessMemory};
use cuda_std::float_mode;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// The fastest rate at which memory falls, in bytes per second. On a GB10, MemAvailable was
/// measured to fall from 34 to 12.7 GiB in 1.5 s.
const MAX_FALL_RATE: u64 = 16 << 30;
/// The shortest and the longest time between two reads.
const MIN_WARNING_TIME: Duration = Duration::from_millis(10);
const LATEST: Duration = Duration::from_secs(1);

/// The shortest interval over which the rate of other processes is measured.
const WINDOW: Duration = Duration::from_millis(200);
/// The number of steps that may run before one is refused: a captured step, and the one queued
/// after it.
const STEPS_AHEAD: u32 = 2;
/// The upper bound for the total time of these steps. A longer gap is a pause between steps.
const LONGEST: Duration = Duration::from_secs(4);

/// The watch of this process, while an arena needs it.
static WATCH: Mutex<Weak<Watch>> = Mutex::new(Weak::new());

/// The figures that the thread has read.
#[derive(Debug)]
struct Watch {
    cgroups: Cgroups,
    /// The highest floor that an arena has set.
    floor_bytes: AtomicU64,
    /// The longest measured time of an arena's steps, in nanoseconds.
    horizon: AtomicU64,
    /// The memory that other processes leave, and the time of that reading.
    seen: Mutex<Option<(Instant, u64)>>,
    /// The rate at which that memory shrinks, in bytes per second.
    others_take: AtomicU64,
    /// True if a step of such an arena may have to be refused.
    is_short: AtomicBool,
    /// The sender that is dropped with the last arena, which ends the thread.
    _alive: Sender<()>,
}

impl Watch {
    /// Returns this process's watch, and starts it if there is none.
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
            tracing::warn!(%error, "no thread monitors the host's memory: steps begin even if it is short");
        }
        watch
    }

    /// Raises the highest floor to at least `floor_bytes`, and reads the figures.
    fn raise(&self, floor_bytes: u64) {
        self.floor_bytes.fetch_max(floor_bytes, Ordering::Relaxed);
        self.look();
    }

    /// Reads the figures, and returns how long they stay valid.
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
        Duration::from_secs_f64(memory.above(floor_bytes) as f64 / MAX_FALL_RATE as f64).clamp(MIN_WARNING_TIME, LATEST)
    }

    /// Updates the rate at which other processes take memory.
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

    /// Restarts the measurement. The memory that a GPU's driver took before the first step would
    /// otherwise count as taken by other processes.
    fn forget(&self) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.others_take.store(0, Ordering::Relaxed);
    }

    /// Returns the bytes that other processes take in this time.
    fn others_take(&self, time: Duration) -> u64 {
        float_mode::in_default(|| (self.others_take.load(Ordering::Relaxed) as f64 * time.as_secs_f64()) as u64)
    }
}

/// Reads the figures, if an arena still needs them.
fn watch_once(watch: &Weak<Watch>) -> Option<Duration> {
    watch.upgrade().map(|watch| watch.look())
}

/// The floor of an arena and of the steps that were captured in it. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Floor(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The floor in bytes, or zero for none.
    bytes: AtomicU64,
    /// The watch of this process, set with the first nonzero floor.
    watch: OnceLock<Arc<Watch>>,
    begun: Mutex<Begun>,
}

/// The time when a step last began, and the duration of the steps before it.
#[derive(Debug, Default)]
struct Begun {
    at: Option<Instant>,
    step: Duration,
}

impl Begun {
    /// Records that a step begins.
    fn now(&mut self) {
        let now = Instant::now();
        let last = self.at.replace(now).map_or(Duration::ZERO, |at| now - at);
        // After a long step, the value decays over several short ones.
        self.step = last.max(self.step * 7 / 8);
    }

    /// Returns the expected time until a step that begins now is done.
    fn horizon(&self) -> Duration {
        (self.step * STEPS_AHEAD).min(LONGEST)
    }
}

impl Floor {
    /// Creates a floor of `bytes` bytes, or none for zero.
    pub(crate) fn new(bytes: u64) -> Self {
        let floor =
            Self(Arc::new(Shared { bytes: AtomicU64::new(0), watch: OnceLock::new(), begun: Mutex::default() }));
        floor.set(bytes);
        floor
    }

    /// Sets a new floor.
    pub(crate) fn set(&self, bytes: u64) {
        // Miri requires every thread to end before `main` returns.
        if bytes > 0 && !cfg!(miri) {
            self.0.watch.get_or_init(|| Watch::get(bytes)).raise(bytes);
        }
        self.0.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the shortage if less is available now, or will be before a step is done. Costs a few
    /// loads while there is enough memory.
    pub(crate) fn shortage(&self) -> Option<MemoryShortage> {
        let watch = self.0.watch.get()?;
        if !watch.is_short.load(Ordering::Relaxed) {
            return None;
        }
        // The flag may be stale, or may concern the floor or steps of another arena.
        self.shortage_for(0)
    }

    /// Returns the shortage if less will be available after the run has taken another
    /// `still_wanted_bytes`. None without a floor.
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

    /// Begins a step, or returns an error if less is available now, or will be before it is done.
    ///
    /// # Errors
    /// The shortage.
    pub(crate) fn begin_step(&self) -> Result<(), Box<MemoryShortage>> {
        let Some(watch) = self.0.watch.get() else { return Ok(()) };
        let mut begun = self.begun();
        if begun.at.is_none() {
            watch.forget();
        }
        begun.now();
        watch.horizon.fetch_max(begun.horizon().as_nanos() as u64, Ordering::Relaxed);
        drop(begun);
        self.shortage().map_or(Ok(()), |shortage| Err(Box::new(shortage)))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::host_memory::MemInfo;

    #[test]
    fn only_unreachable_floors_are_errors() {
        let (high, low) = (Floor::new(u64::MAX), Floor::new(1));
        if MemInfo::read().is_some() {
            let shortage = high.begin_step().unwrap_err();
            assert!(shortage.floor_bytes > 1, "{shortage}");
        }
        assert_eq!(low.begin_step(), Ok(()), "the floor of another arena must not count");
        let captured = high.clone();
        high.set(0);
        assert_eq!((high.begin_step(), captured.begin_step()), (Ok(()), Ok(())));
    }

    #[test]
    fn no_floor_starts_no_watch() {
        let floor = Floor::new(0);
        assert!(floor.0.watch.get().is_none());
        assert_eq!(floor.begin_step(), Ok(()));
    }

    #[test]
    fn horizon_is_the_longest_recent_step() {
        let mut begun = Begun::default();
        begun.now();
        assert_eq!(begun.horizon(), Duration::ZERO, "the first step has no horizon");
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
    fn window_excludes_own_memory() {
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
        assert_eq!(watch.others_take(LONGEST), 0, "too few samples for a rate");
        thread::sleep(WINDOW);
        watch.see(&memory(7 << 30));
        let taken = watch.others_take(WINDOW);
        assert!((1 << 27..=2 << 30).contains(&taken), "{taken}: expected at most 2 GiB");
        thread::sleep(WINDOW);
        watch.see(&memory(9 << 30));
        assert_eq!(watch.others_take(WINDOW), 0);
    }

    #[test]
    fn watch_ends_with_last_floor() {
        let floor = Floor::new(1);
        let watch = Arc::downgrade(floor.0.watch.get().unwrap());
        let other = floor.clone();
        drop(floor);
        assert!(watch.upgrade().is_some());
        drop(other);
        // Floors of other tests may share it, and the thread may be reading.
        let start = Instant::now();
        while watch.upgrade().is_some() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(watch.upgrade().is_none());
    }
}
