//! A floor for the host's memory: no step begins below it.
//!
//! Where CPU and GPU share one memory, running out of it makes the kernel kill a process or stalls
//! the whole machine. A step that begins reads the available memory, and how fast other processes
//! take it. The step must finish before they have taken the rest.
//!
//! Invariant: a step begins only on figures that are at most 10 ms old, or so recent that memory
//! cannot have fallen to the floor since, at the fastest rate measured on such machines.

#![forbid(unsafe_code)]

use super::cgroup::Cgroups;
use super::shortage::{HostMemory, MemoryShortage, ProcessMemory};
use cuda_std::float_mode;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The fastest rate at which memory falls, in bytes per second. On a GB10, MemAvailable was
/// measured to fall from 34 to 12.7 GiB in 1.5 s.
const MAX_FALL_RATE: u64 = 16 << 30;
/// The shortest and the longest time for which figures are used.
const MIN_AGE: Duration = Duration::from_millis(10);
const MAX_AGE: Duration = Duration::from_secs(1);

/// The shortest interval over which the rate of other processes is measured.
const WINDOW: Duration = Duration::from_millis(200);
/// The number of steps that may run before one is refused: a captured step, and the one queued
/// after it.
const STEPS_AHEAD: u32 = 2;
/// The upper bound for the total time of these steps. A longer gap is a pause between steps.
const LONGEST: Duration = Duration::from_secs(4);

/// The floor of an arena and of the steps that were captured in it. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Floor(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The floor in bytes, or zero for none.
    bytes: AtomicU64,
    watch: Mutex<Watch>,
}

/// The last figures, and the duration of steps.
#[derive(Debug, Default)]
struct Watch {
    cgroups: Option<Cgroups>,
    /// The time until which the last figures are used, if they allowed a step.
    valid_until: Option<Instant>,
    /// The time when a step last began, and the longest of the recent steps.
    begun: Option<Instant>,
    step: Duration,
    /// The memory that other processes leave, and the time of that reading.
    left: Option<(Instant, u64)>,
    /// The rate at which that memory shrinks, in bytes per second.
    rate: f64,
}

impl Watch {
    /// Records that a step begins.
    fn begin_step(&mut self) {
        let now = Instant::now();
        let last = self.begun.replace(now).map_or(Duration::ZERO, |begun| now - begun);
        // After a long step, the value decays over several short ones.
        self.step = last.max(self.step * 7 / 8);
    }

    /// Reads the figures. Returns the shortage if less than the floor would be left after the run
    /// has taken these bytes, and other processes theirs.
    fn read(&mut self, floor_bytes: u64, still_wanted_bytes: u64) -> Option<MemoryShortage> {
        let memory = HostMemory::read(self.cgroups.get_or_insert_with(|| Cgroups::find(Path::new("/"))));
        self.measure_rate(&memory);
        let shortage = memory.shortage_for(floor_bytes, [still_wanted_bytes, self.others_take()]);
        let age = Duration::from_secs_f64(memory.above(floor_bytes) as f64 / MAX_FALL_RATE as f64);
        self.valid_until = shortage.is_none().then(|| Instant::now() + age.clamp(MIN_AGE, MAX_AGE));
        shortage
    }

    /// Updates the rate at which other processes take memory.
    fn measure_rate(&mut self, memory: &HostMemory) {
        let resident_bytes = ProcessMemory::read().map_or(0, |process| process.resident_bytes);
        let Some(left) = memory.left_by_others(resident_bytes) else { return };
        let now = Instant::now();
        let (at, before) = *self.left.get_or_insert((now, left));
        if now - at >= WINDOW {
            self.rate = before.saturating_sub(left) as f64 / (now - at).as_secs_f64();
            self.left = Some((now, left));
        }
    }

    /// Returns the bytes that other processes take until a step that begins now is done.
    fn others_take(&self) -> u64 {
        (self.rate * (self.step * STEPS_AHEAD).min(LONGEST).as_secs_f64()) as u64
    }
}

impl Floor {
    /// Creates a floor of `bytes` bytes, or none for zero.
    pub(crate) fn new(bytes: u64) -> Self {
        Self(Arc::new(Shared { bytes: AtomicU64::new(bytes), watch: Mutex::default() }))
    }

    /// Sets a new floor.
    pub(crate) fn set(&self, bytes: u64) {
        self.0.bytes.store(bytes, Ordering::Relaxed);
        self.watch().valid_until = None;
    }

    /// Returns the shortage if less is available now, or will be before a step is done. Costs a
    /// clock read while the last figures are valid.
    pub(crate) fn shortage(&self) -> Option<MemoryShortage> {
        let is_valid = self.watch().valid_until.is_some_and(|until| Instant::now() < until);
        if is_valid { None } else { self.shortage_for(0) }
    }

    /// Returns the shortage if less will be available after the run has taken another
    /// `still_wanted_bytes`. None without a floor.
    pub(crate) fn shortage_for(&self, still_wanted_bytes: u64) -> Option<MemoryShortage> {
        match self.0.bytes.load(Ordering::Relaxed) {
            0 => None,
            floor_bytes => float_mode::in_default(|| self.watch().read(floor_bytes, still_wanted_bytes)),
        }
    }

    /// Begins a step, or returns an error if less is available now, or will be before it is done.
    ///
    /// # Errors
    /// The shortage.
    pub(crate) fn begin_step(&self) -> Result<(), Box<MemoryShortage>> {
        self.watch().begin_step();
        self.shortage().map_or(Ok(()), |shortage| Err(Box::new(shortage)))
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.0.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::host_memory::MemInfo;
    use std::thread;

    #[test]
    fn only_unreachable_floors_are_errors() {
        let (high, low) = (Floor::new(u64::MAX), Floor::new(1));
        if MemInfo::read().is_some() {
            let shortage = high.begin_step().unwrap_err();
            assert!(shortage.floor_bytes > 1, "{shortage}");
        }
        assert_eq!(low.begin_step(), Ok(()), "the floor of another arena does not count");
        let captured = high.clone();
        high.set(0);
        assert_eq!((high.begin_step(), captured.begin_step()), (Ok(()), Ok(())));
    }

    /// Figures are read again when the floor changes, and when they are old.
    #[test]
    fn old_figures_are_read_again() {
        let floor = Floor::new(1);
        assert_eq!(floor.begin_step(), Ok(()));
        let first = floor.watch().valid_until;
        assert_eq!((floor.begin_step(), floor.watch().valid_until), (Ok(()), first));
        floor.watch().valid_until = Some(Instant::now());
        assert_eq!(floor.begin_step(), Ok(()));
        assert!(floor.watch().valid_until > first);
        if MemInfo::read().is_some() {
            floor.set(u64::MAX);
            assert!(floor.shortage().is_some());
            assert!(floor.shortage().is_some(), "figures that show a shortage are not used again");
        }
    }

    #[test]
    fn step_time_is_that_of_the_longest_recent_step() {
        let mut watch = Watch { rate: 8.0, ..Watch::default() };
        watch.begin_step();
        assert_eq!(watch.others_take(), 0, "the first step's duration is unknown");
        watch.begun = Some(Instant::now() - Duration::from_millis(1500));
        watch.begin_step();
        assert!(watch.step >= Duration::from_millis(1500) && watch.others_take() >= 24);
        let step = watch.step;
        watch.begin_step();
        assert!(watch.step >= step * 3 / 4);
        watch.step = Duration::from_secs(60);
        assert_eq!(watch.others_take(), 32, "at most four seconds");
    }

    #[test]
    fn window_excludes_own_memory() {
        let mut watch = Watch { step: LONGEST, ..Watch::default() };
        let memory = |available_bytes| HostMemory {
            host: Some(MemInfo { free_bytes: 0, available_bytes }),
            ..HostMemory::default()
        };
        watch.measure_rate(&memory(9 << 30));
        watch.measure_rate(&memory(8 << 30));
        assert_eq!(watch.others_take(), 0, "two samples are too few for a rate");
        thread::sleep(WINDOW);
        watch.measure_rate(&memory(7 << 30));
        let taken = watch.rate * WINDOW.as_secs_f64();
        assert!(((1u64 << 27) as f64..=(2u64 << 30) as f64).contains(&taken), "{taken}: expected at most 2 GiB");
        thread::sleep(WINDOW);
        watch.measure_rate(&memory(9 << 30));
        assert_eq!(watch.others_take(), 0);
    }
}
