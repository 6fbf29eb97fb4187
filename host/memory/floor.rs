//! A floor under the host's memory: below it no step begins.
//!
//! Where CPU and GPU share one memory, the kernel ends a process, or the whole machine stands still, once it is used up. A thread of
//! this process looks at what is available while arenas with a floor live. Invariant: it looks again before memory can have fallen to the
//! floor, as fast as it has been seen to fall, and a step is refused by figures of that moment alone.

#![forbid(unsafe_code)]

use crate::cgroup::Cgroups;
use crate::error::{Error, Result};
use crate::shortage::{HostMemory, MemoryShortage};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// How fast memory falls at most, in bytes a second. On a GB10 MemAvailable was seen to fall from 34 to 12.7 GiB in 1.5 s.
const FALL: u64 = 16 << 30;
/// How often the thread looks at most and at least.
const SOONEST: Duration = Duration::from_millis(10);
const LATEST: Duration = Duration::from_secs(1);

/// The watch of this process, while an arena needs it.
static WATCH: Mutex<Weak<Watch>> = Mutex::new(Weak::new());

/// What the thread has seen.
#[derive(Debug)]
struct Watch {
    cgroups: Cgroups,
    /// The highest floor that an arena has asked for.
    floor_bytes: AtomicU64,
    /// Less than that was available.
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
            is_short: AtomicBool::new(false),
            _alive: alive,
        });
        *current = Arc::downgrade(&watch);
        let watched = Arc::downgrade(&watch);
        let run = move || {
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
        let floor_bytes = self.floor_bytes.load(Ordering::Relaxed);
        let memory = HostMemory::read(&self.cgroups);
        self.is_short.store(memory.shortage(floor_bytes).is_some(), Ordering::Relaxed);
        Duration::from_secs_f64(memory.above(floor_bytes) as f64 / FALL as f64).clamp(SOONEST, LATEST)
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
}

impl Floor {
    /// A floor of so many bytes; zero is none.
    pub(super) fn new(bytes: u64) -> Self {
        let floor = Self(Arc::new(Shared { bytes: AtomicU64::new(0), watch: OnceLock::new() }));
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

    /// The shortage, if less is available now. Costs a few loads while there is enough.
    pub(crate) fn shortage(&self) -> Option<MemoryShortage> {
        let watch = self.0.watch.get()?;
        if !watch.is_short.load(Ordering::Relaxed) {
            return None;
        }
        // Of another arena's floor, or some time ago.
        HostMemory::read(&watch.cgroups).shortage(self.0.bytes.load(Ordering::Relaxed))
    }

    /// The shortage, if less would be available once so many more bytes are taken. None without a floor.
    pub(crate) fn shortage_for(&self, still_wanted_bytes: u64) -> Option<MemoryShortage> {
        let watch = self.0.watch.get()?;
        let floor_bytes = self.0.bytes.load(Ordering::Relaxed);
        let floor = (floor_bytes > 0).then_some(floor_bytes)?;
        HostMemory::read(&watch.cgroups).shortage_for(floor, still_wanted_bytes)
    }

    /// An error when less is available now.
    ///
    /// # Errors
    /// [`Error::MemoryShortage`].
    pub(crate) fn check(&self) -> Result<()> {
        self.shortage().map_or(Ok(()), |shortage| Err(Error::MemoryShortage(Box::new(shortage))))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::admission::Situation;
    use std::time::Instant;

    #[test]
    fn a_floor_that_nobody_can_have_is_told_and_one_of_a_byte_is_not() {
        let (high, low) = (Floor::new(u64::MAX), Floor::new(1));
        if Situation::read_host().is_some() {
            let error = high.check().unwrap_err();
            assert!(matches!(&error, Error::MemoryShortage(shortage) if shortage.floor_bytes > 1), "{error}");
        }
        assert_eq!(low.check(), Ok(()), "another's floor is not its own");
        let captured = high.clone();
        high.set(0);
        assert_eq!((high.check(), captured.check()), (Ok(()), Ok(())));
    }

    #[test]
    fn without_a_floor_nobody_watches() {
        let floor = Floor::new(0);
        assert!(floor.0.watch.get().is_none());
        assert_eq!(floor.check(), Ok(()));
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
