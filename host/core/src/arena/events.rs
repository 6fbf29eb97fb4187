//! The events of an arena's memory, and the observers that receive them.
//!
//! An observer is attached between steps, with `Arena::observe`, or to every new arena through an
//! [`ArenaTool`]. Without one, an allocation costs one more branch.
//!
//! Invariant: an observer changes nothing of the arena. It receives addresses as numbers, and only
//! by reference. One that panics is detached, and the arena goes on.

#![forbid(unsafe_code)]

use super::checked::GUARD_BYTES;
use super::region::ArenaInner;
use crate::device::Device;
use cuda_std::launch::inventory;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// The arena took `bytes` at `address` from the device. Recorded when it is built or grows, and
    /// first in a recording of an existing arena.
    Reserve,
    /// The arena freed these bytes.
    Release,
    /// A tensor was made. Tensors of the arena lie in its reservation. Every other tensor is a
    /// reservation of its own.
    Allocate,
    /// A tensor outside the arena was freed.
    Free,
    /// A scratch ended. All tensors in those `bytes` of the arena are gone.
    Rewind,
    /// A step ended. Otherwise like [`Kind::Rewind`].
    Reset,
    /// A captured step took these bytes at the end of the arena. They contain all its tensors.
    Capture,
    /// The steps may fill these bytes at the end of the arena again.
    EndCapture,
    /// A tensor of `bytes` was refused, and nothing changed. The address has no meaning.
    Refuse {
        /// The bytes that were free on the device.
        free_bytes: u64,
    },
}

/// The source of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The arena of the step.
    Arena,
    /// The overflow pool.
    Overflow,
    /// A buffer that outlives steps.
    Persistent,
}

/// An event of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time in microseconds, since 1970 for tools that show a date. The times of an arena's
    /// events never decrease.
    pub time_us: u64,
    /// The kind of the event.
    pub kind: Kind,
    /// The first affected byte on the device.
    pub address: u64,
    /// The number of bytes, as requested.
    pub bytes: usize,
    /// The bytes that kernels may access: `bytes`, and in checked mode also the guard after them.
    pub accessed_bytes: usize,
    /// The source of the memory.
    pub origin: Origin,
    /// The phase of the step: `forward`, `backward`, `optimizer`.
    pub phase: &'static str,
    /// The file of the call.
    pub file: &'static str,
    /// The line of the call.
    pub line: u32,
    /// The purpose of the memory: the name of the op or of the weight.
    pub label: Cow<'static, str>,
}

/// A receiver of the events of one arena.
pub trait ArenaObserver: Debug + Send {
    /// Receives an event, on the thread of the step. Returns false to be detached.
    fn event(&mut self, event: &Event) -> bool;

    /// Returns true if bytes that belong to no tensor must follow each tensor.
    fn needs_guards(&self) -> bool {
        false
    }
}

/// A tool that observes every arena from the start, if it was started with this program. Other
/// crates register one with `inventory::submit!`.
#[derive(Debug)]
pub struct ArenaTool {
    /// Returns the observer of a new arena of this device, if the tool wants one.
    pub observer: fn(&Device) -> Option<Box<dyn ArenaObserver>>,
}

inventory::collect!(ArenaTool);

impl ArenaTool {
    /// Returns the observers of a new arena.
    pub(super) fn observers(device: &Device) -> impl Iterator<Item = Box<dyn ArenaObserver>> {
        inventory::iter::<Self>.into_iter().filter_map(move |tool| (tool.observer)(device))
    }
}

/// The observers of an arena.
#[derive(Debug, Default)]
pub(super) struct Observers {
    attached: Cell<bool>,
    list: RefCell<Vec<Box<dyn ArenaObserver>>>,
}

impl Observers {
    /// Returns true if an observer is attached.
    #[inline]
    pub(super) fn attached(&self) -> bool {
        self.attached.get()
    }

    /// Attaches an observer unless it declines one of `events`, and returns true if it needs
    /// guards.
    pub(super) fn attach(&mut self, observer: Box<dyn ArenaObserver>, events: &[Event]) -> bool {
        let remaining = events.iter().try_fold(observer, |observer, event| deliver(observer, event));
        let Some(observer) = remaining else { return false };
        let guards = observer.needs_guards();
        self.list.get_mut().push(observer);
        self.attached.set(true);
        guards
    }

    /// Passes an event to every observer, and detaches those that decline or panic.
    #[cold]
    pub(super) fn notify(&self, event: &Event) {
        let observers = self.list.take();
        let kept: Vec<_> = observers.into_iter().filter_map(|observer| deliver(observer, event)).collect();
        self.attached.set(!kept.is_empty());
        self.list.replace(kept);
    }
}

/// Passes an event to an observer, and returns the observer if it stays attached.
fn deliver(mut observer: Box<dyn ArenaObserver>, event: &Event) -> Option<Box<dyn ArenaObserver>> {
    // The observer is dropped within the closure too, because that may also panic.
    let run = move || observer.event(event).then_some(observer);
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        // Dropping what was thrown could panic again.
        std::mem::forget(panic);
        tracing::warn!(kind = ?event.kind, "an observer of the arena panicked, and is detached");
        None
    })
}

impl ArenaInner {
    /// Attaches an observer, which first learns of the arena's memory.
    pub(super) fn observe(&mut self, observer: Box<dyn ArenaObserver>) {
        let event = |kind, offset: usize, bytes| {
            let site = Location::caller();
            self.event(kind, Origin::Arena, self.address + offset as u64, bytes, bytes, site, "arena".into())
        };
        let mut events = vec![event(Kind::Reserve, 0, self.owned_bytes)];
        if self.captured_bytes() > 0 {
            events.push(event(Kind::Capture, self.capacity.get(), self.captured_bytes()));
        }
        if self.observers.attach(observer, &events) {
            self.guard_bytes = GUARD_BYTES;
        }
    }

    /// Returns true if an observer is attached.
    #[inline]
    pub(super) fn observed(&self) -> bool {
        self.observers.attached()
    }

    /// Passes an event to the observers, if there are any.
    #[inline]
    pub(super) fn note(
        &self,
        kind: Kind,
        origin: Origin,
        address: u64,
        bytes: usize,
        site: &'static Location<'static>,
        label: Cow<'static, str>,
    ) {
        if self.observed() {
            self.observers.notify(&self.event(kind, origin, address, bytes, bytes, site, label));
        }
    }

    #[expect(clippy::too_many_arguments, reason = "each is a field of the event")]
    pub(super) fn event(
        &self,
        kind: Kind,
        origin: Origin,
        address: u64,
        bytes: usize,
        accessed_bytes: usize,
        site: &'static Location<'static>,
        label: Cow<'static, str>,
    ) -> Event {
        let time_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let phase = self.counters.borrow().phase.name();
        let (file, line) = (site.file(), site.line());
        Event { time_us, kind, address, bytes, accessed_bytes, origin, phase, file, line, label }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Capacity, DeviceKind, Overflow};
    use std::panic::panic_any;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Panics when it is dropped.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    /// Declines or panics at the first event of a kind.
    #[derive(Debug)]
    struct Bad {
        at: Kind,
        seen: Arc<AtomicUsize>,
        panics: bool,
    }

    impl ArenaObserver for Bad {
        fn event(&mut self, event: &Event) -> bool {
            self.seen.fetch_add(1, Ordering::Relaxed);
            match (event.kind == self.at, self.panics) {
                (true, true) => panic_any(Bomb),
                (at, _) => !at,
            }
        }
    }

    /// Checks that steps succeed, and free their blocks of the overflow pool, whatever event an
    /// observer leaves at.
    #[test]
    fn bad_observers_are_detached() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let kinds = [Kind::Reserve, Kind::Allocate, Kind::Free, Kind::Rewind, Kind::Reset, Kind::Release];
        for (at, panics) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let mut arena = Arena::builder(&device)
                .capacity(Capacity::Bytes(1024))
                .overflow(Overflow::pool(1 << 20))
                .build()
                .unwrap();
            let seen = Arc::new(AtomicUsize::new(0));
            arena.observe(Box::new(Bad { at, seen: Arc::clone(&seen), panics }));
            for _ in 0..2 {
                let step = arena.step(|step| {
                    // A scope that begins in an empty arena would end with a reset.
                    step.empty::<f32>([16])?;
                    step.scratch(|inner| inner.empty::<f32>([16]).map(drop))?;
                    step.empty::<f32>([1024]).map(drop)
                });
                step.unwrap();
                assert_eq!(arena.report().overflow.live_blocks, 0, "{at:?}");
            }
            assert_eq!(arena.region.observed(), at == Kind::Release, "{at:?}");
            drop(arena);
            assert!(seen.load(Ordering::Relaxed) > 0);
            assert_eq!(Arc::strong_count(&seen), 1, "{at:?}: the observer must be dropped");
        }
    }

    /// Checks that an observer sees the same events in a step that panics.
    #[test]
    fn panicking_steps_are_observed() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        let seen = Arc::new(AtomicUsize::new(0));
        arena.observe(Box::new(Bad { at: Kind::Reset, seen: Arc::clone(&seen), panics: true }));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = arena.step(|step| -> crate::Result<()> {
                step.empty::<f32>([4])?;
                panic!("the step");
            });
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"the step"));
        assert_eq!(seen.load(Ordering::Relaxed), 3, "expected the events Reserve, Allocate and Reset");
        assert!(!arena.region.observed());
        arena.step(|step| step.empty::<f32>([4]).map(drop)).unwrap();
    }
}
