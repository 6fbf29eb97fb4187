//! What happened to the memory, event by event, for people and their tools: a [`Recording`] becomes PyTorch's memory
//! snapshot (`pickle`) or a picture (`timeline`, `svg`).
//!
//! It only listens: it takes no memory from a device and knows no driver. Invariant: a recording is bounded, and what
//! it forgets is folded into its starting state, so that both exports stay exact however long it ran.
#![forbid(unsafe_code)]

mod pickle;
mod svg;
mod timeline;

use super::layout::padded;
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// The arena took `bytes` at `address` from the device: when it is built, when it grows, and first of all in a
    /// recording of an arena that is there already.
    Reserve,
    /// The arena gave them back.
    Release,
    /// A tensor was made. Those of the arena lie in what it reserved; all others are a reservation of their own.
    Allocate,
    /// A tensor outside the arena was freed.
    Free,
    /// A scratch ended: all tensors in those `bytes` of the arena are gone.
    Rewind,
    /// A step ended: as [`Kind::Rewind`].
    Reset,
    /// A tensor of `bytes` was refused; nothing changed. The address means nothing.
    Refuse {
        /// Bytes that were free on the device.
        free_bytes: u64,
    },
}

/// Where memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The arena of the step.
    Arena,
    /// The overflow pool.
    Overflow,
    /// A buffer that outlives steps.
    Persistent,
}

impl Origin {
    fn name(self) -> &'static str {
        match self {
            Self::Arena => "arena",
            Self::Overflow => "overflow",
            Self::Persistent => "persistent",
        }
    }
}

/// One thing that happened to the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, in microseconds: since 1970 for tools that show a date. Never before the event recorded last.
    pub time_us: u64,
    /// What happened.
    pub kind: Kind,
    /// The first byte that it concerns, on the device.
    pub address: u64,
    /// How many bytes, as they were asked for.
    pub bytes: usize,
    /// Where they come from.
    pub origin: Origin,
    /// What the step was doing: `forward`, `backward`, `optimizer`.
    pub phase: &'static str,
    /// The file of the call.
    pub file: &'static str,
    /// Its line.
    pub line: u32,
    /// What the memory is for: the name of the op or of the weight.
    pub label: Cow<'static, str>,
}

impl Event {
    /// What the event occupies: tensors start at multiples of the alignment.
    fn occupied_bytes(&self) -> u64 {
        padded(self.bytes).unwrap_or(self.bytes) as u64
    }
}

/// The latest events of one device's memory, and what was held before the first of them.
#[derive(Clone, Debug)]
pub struct Recording {
    device: String,
    limit: usize,
    start: Held,
    events: VecDeque<Event>,
    forgotten_events: u64,
}

impl Recording {
    /// An empty recording of the device of that name, which keeps the latest `limit` events.
    pub fn new(device: impl Into<String>, limit: usize) -> Self {
        Self { device: device.into(), limit, start: Held::default(), events: VecDeque::new(), forgotten_events: 0 }
    }

    /// Adds what happened last.
    pub fn push(&mut self, event: Event) {
        self.events.push_back(event);
        while self.events.len() > self.limit {
            if let Some(oldest) = self.events.pop_front() {
                self.start.apply(&oldest);
                self.forgotten_events += 1;
            }
        }
    }

    /// The events that are kept, the oldest first.
    pub fn events(&self) -> impl ExactSizeIterator<Item = &Event> {
        self.events.iter()
    }

    /// How many older events are not kept.
    pub fn forgotten_events(&self) -> u64 {
        self.forgotten_events
    }

    /// The recording as a pickle of PyTorch's `torch.cuda.memory._snapshot()`: for `torch/cuda/_memory_viz.py` and for
    /// the viewer at <https://pytorch.org/memory_viz>, which shows the phases as categories. Device 0, stream 0. What
    /// the arena reserved is one segment; every other tensor is a segment of its own. About 400 bytes an event.
    pub fn pickle(&self) -> Vec<u8> {
        pickle::write(self)
    }

    /// A picture of the memory in use over time, stacked by phase, as SVG. Sizes are rounded up to the alignment.
    pub fn timeline_svg(&self) -> String {
        svg::draw(self)
    }
}

/// What is held at one moment: the events that reserved and allocated it, by address.
#[derive(Clone, Debug, Default)]
struct Held {
    reserved: BTreeMap<u64, Event>,
    live: BTreeMap<u64, Event>,
    resets: u64,
}

impl Held {
    /// The state after `event`. Returns the allocations that ended, in the order of their addresses: one that lay where
    /// a new one begins, too.
    fn apply(&mut self, event: &Event) -> Vec<Event> {
        match event.kind {
            Kind::Reserve => {
                self.reserved.insert(event.address, event.clone());
            }
            Kind::Release => {
                self.reserved.remove(&event.address);
            }
            // An empty tensor shares its address with the next one.
            Kind::Allocate if event.bytes == 0 => {}
            Kind::Allocate => return self.live.insert(event.address, event.clone()).into_iter().collect(),
            Kind::Free => return self.live.remove(&event.address).into_iter().collect(),
            Kind::Rewind | Kind::Reset => {
                self.resets += u64::from(event.kind == Kind::Reset);
                let range = event.address..event.address.saturating_add(event.bytes as u64);
                let gone: Vec<u64> = self.live.range(range).map(|(&address, _)| address).collect();
                return gone.iter().filter_map(|address| self.live.remove(address)).collect();
            }
            Kind::Refuse { .. } => {}
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(super) const ARENA: u64 = 0x7f00_0000_0000;
    pub(super) const OVERFLOW: u64 = 0x7f10_0000_0000;
    pub(super) const WEIGHTS: u64 = 0x7f20_0000_0000;

    pub(super) fn event(time_us: u64, kind: Kind, address: u64, bytes: usize) -> Event {
        let origin = match address {
            WEIGHTS.. => Origin::Persistent,
            OVERFLOW.. => Origin::Overflow,
            _ => Origin::Arena,
        };
        Event {
            time_us,
            kind,
            address,
            bytes,
            origin,
            phase: "forward",
            file: "host/ops/activation.rs",
            line: 21,
            label: "gelu".into(),
        }
    }

    /// Steps as a real one goes: a step of tensors in the arena, a scratch within, an overflow, a reset; then again.
    pub(super) fn step(
        recording: &mut Recording,
        start_us: u64,
        tensors: &[(usize, &'static str)],
        arena_bytes: usize,
    ) {
        let (mut offset, mut spilled, mut time) = (0usize, Vec::new(), start_us);
        for &(bytes, phase) in tensors {
            time += 7;
            let room = arena_bytes - offset;
            let address = if bytes <= room { ARENA + offset as u64 } else { OVERFLOW + ((spilled.len() as u64) << 32) };
            recording.push(Event { phase, ..event(time, Kind::Allocate, address, bytes) });
            if bytes <= room {
                offset += padded(bytes).unwrap();
            } else {
                spilled.push((address, bytes));
            }
        }
        for (address, bytes) in spilled {
            recording.push(event(time + 1, Kind::Free, address, bytes));
        }
        recording.push(event(time + 2, Kind::Reset, ARENA, offset));
    }

    #[test]
    fn a_rewind_ends_the_arena_tensors_above_it_alone() {
        let mut held = Held::default();
        for (address, bytes) in [(ARENA, 100), (ARENA + 256, 300), (ARENA + 768, 1), (OVERFLOW, 5), (WEIGHTS, 9)] {
            assert_eq!(held.apply(&event(1, Kind::Allocate, address, bytes)), []);
        }
        let gone = held.apply(&event(2, Kind::Rewind, ARENA + 256, 768));
        assert_eq!(gone.iter().map(|gone| gone.address - ARENA).collect::<Vec<_>>(), [256, 768]);
        assert_eq!(held.resets, 0);
        let gone = held.apply(&event(3, Kind::Reset, ARENA, 256));
        assert_eq!(gone.iter().map(|gone| gone.bytes).collect::<Vec<_>>(), [100]);
        assert_eq!((held.resets, held.live.len()), (1, 2));
        assert_eq!(held.apply(&event(4, Kind::Free, OVERFLOW, 5)).len(), 1);
        assert_eq!(held.apply(&event(4, Kind::Free, OVERFLOW, 5)).len(), 0, "it is gone already");
    }

    #[test]
    fn an_empty_tensor_hides_nobody() {
        let mut held = Held::default();
        held.apply(&event(1, Kind::Allocate, ARENA, 64));
        held.apply(&event(2, Kind::Allocate, ARENA, 0));
        assert_eq!(held.live[&ARENA].bytes, 64);
    }

    proptest! {
        /// Forgetting events changes no state: whatever the limit, the end is the same.
        #[test]
        fn forgotten_events_are_folded_into_the_start(
            steps in prop::collection::vec(prop::collection::vec(0usize..3000, 0..12), 1..6),
            limit in 0usize..40,
        ) {
            let (mut short, mut full) = (Recording::new("emulated", limit), Recording::new("emulated", usize::MAX));
            for recording in [&mut short, &mut full] {
                recording.push(event(0, Kind::Reserve, ARENA, 8192));
                recording.push(event(0, Kind::Allocate, WEIGHTS, 4096));
                for (at, tensors) in steps.iter().enumerate() {
                    let tensors: Vec<_> = tensors.iter().map(|&bytes| (bytes, "forward")).collect();
                    step(recording, 1000 * at as u64, &tensors, 8192);
                }
            }
            prop_assert!(short.events().len() <= limit);
            prop_assert_eq!(short.events().len() as u64 + short.forgotten_events(), full.events().len() as u64);
            let end = |recording: &Recording| {
                let mut held = recording.start.clone();
                recording.events().for_each(|event| drop(held.apply(event)));
                (held.reserved, held.live, held.resets)
            };
            let (reserved, live, resets) = end(&short);
            prop_assert_eq!(resets, steps.len() as u64);
            prop_assert_eq!(live.len(), 1, "the weights");
            prop_assert_eq!((reserved, live, resets), end(&full));
        }
    }
}
