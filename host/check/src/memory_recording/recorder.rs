//! A recorder of the memory events of an arena.
//!
//! Invariant: the arena keeps no recording. It ends with its recorder.

#![forbid(unsafe_code)]

use super::recording::Recording;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use stepscope_core::internals::{ArenaObserver, observe};
use stepscope_core::{Arena, Event};

/// Records the memory events of an arena, each with its line and phase, until it is dropped.
///
/// ```
/// use stepscope::check::MemoryRecorder;
/// use stepscope::{Arena, Capacity, Device, DeviceKind};
///
/// let device = Device::open(DeviceKind::Emulated)?;
/// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let recorder = MemoryRecorder::start(&mut arena, 100_000);
/// arena.step(|step| step.empty::<f32>([1000]).map(drop))?;
/// assert_eq!(recorder.recording().events().len(), 3); // reserved, allocated, reset
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Debug)]
pub struct MemoryRecorder {
    recording: Arc<Mutex<Recording>>,
}

impl MemoryRecorder {
    /// Records the latest `limit` events from now on.
    pub fn start(arena: &mut Arena, limit: usize) -> Self {
        let recording = Recording::new(&arena.device().description().name, limit);
        let recording = Arc::new(Mutex::new(recording));
        observe(arena, Box::new(Observer(Arc::downgrade(&recording))));
        Self { recording }
    }

    /// Returns the events recorded so far. See [`Recording::pickle`].
    pub fn recording(&self) -> Recording {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The arena's part of a recorder.
#[derive(Debug)]
struct Observer(Weak<Mutex<Recording>>);

impl ArenaObserver for Observer {
    fn event(&mut self, event: &Event) -> bool {
        let Some(recording) = self.0.upgrade() else { return false };
        recording.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stepscope_core::{Capacity, Device, DeviceKind, Kind};

    #[test]
    fn recorders_record_until_dropped() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        let [long, short] = [100, 2].map(|limit| MemoryRecorder::start(&mut arena, limit));
        let observed = Arc::downgrade(&long.recording);
        arena.step(|step| step.empty::<f32>([64]).map(drop)).unwrap();
        let kinds =
            |recorder: &MemoryRecorder| recorder.recording().events().map(|event| event.kind).collect::<Vec<_>>();
        assert_eq!(kinds(&long), [Kind::Reserve, Kind::Allocate, Kind::Reset]);
        assert_eq!(kinds(&short), [Kind::Allocate, Kind::Reset]);
        assert_eq!(short.recording().forgotten_events(), 1);
        drop(long);
        assert_eq!(observed.strong_count(), 0);
        arena.step(|step| step.empty::<f32>([64]).map(drop)).unwrap();
        assert_eq!(short.recording().forgotten_events(), 3, "the other recorder must continue");
    }
}
