//! The latest events of a device's memory, and the state before the first of them.
//!
//! Invariant: a recording is bounded, and dropped events are folded into its starting state.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use stepscope_core::{Event, Kind};

/// The latest events of one device's memory, and what was held before the first of them.
#[derive(Clone, Debug)]
pub struct Recording {
    pub(super) device: String,
    pub(super) limit: usize,
    pub(super) start: Held,
    pub(super) events: VecDeque<Event>,
    pub(super) forgotten_events: u64,
}

impl Recording {
    /// Creates an empty recording of the device with that name, which keeps the latest `limit`
    /// events.
    pub fn new(device: impl Into<String>, limit: usize) -> Self {
        Self { device: device.into(), limit, start: Held::default(), events: VecDeque::new(), forgotten_events: 0 }
    }

    /// Adds the latest event.
    pub fn push(&mut self, event: Event) {
        self.events.push_back(event);
        while self.events.len() > self.limit {
            if let Some(oldest) = self.events.pop_front() {
                self.start.apply(&oldest);
                self.forgotten_events += 1;
            }
        }
    }

    /// Returns the kept events, the oldest first.
    pub fn events(&self) -> impl ExactSizeIterator<Item = &Event> {
        self.events.iter()
    }

    /// Returns the number of older events that are not kept.
    pub fn forgotten_events(&self) -> u64 {
        self.forgotten_events
    }
}

/// The memory held at one moment: the events that reserved and allocated it, by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    pub(super) reserved: BTreeMap<u64, Event>,
    pub(super) live: BTreeMap<u64, Event>,
}

impl Held {
    /// Updates the state by `event`. Returns the allocations that ended, in address order,
    /// including one that lay where a new one begins.
    pub(super) fn apply(&mut self, event: &Event) -> Vec<Event> {
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
                let range = event.address..event.address.saturating_add(event.bytes as u64);
                let ended: Vec<u64> = self.live.range(range).map(|(&address, _)| address).collect();
                return ended.iter().filter_map(|address| self.live.remove(address)).collect();
            }
            _ => {}
        }
        Vec::new()
    }
}
