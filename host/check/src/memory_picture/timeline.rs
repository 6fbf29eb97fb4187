//! A recording as a stack over time: the memory that each phase holds at each moment.
//!
//! Persistent memory lies at the bottom, then the arena by phase, then the overflow. Invariant:
//! each column shows the fullest moment in it, so no peak is lost to the resolution.

use super::occupied_bytes;
use super::recording::{Held, Recording};
use std::collections::BTreeMap;
use stepscope_core::{Event, Kind, Origin};

/// A band of the stack.
pub(super) struct Layer<'r> {
    pub(super) origin: Origin,
    phase: &'r str,
    pub(super) peak_bytes: u64,
}

impl Layer<'_> {
    pub(super) fn name(&self) -> &str {
        match (self.origin, self.phase) {
            (Origin::Arena, "") => "no phase",
            (Origin::Arena, phase) => phase,
            (Origin::Overflow, _) => "overflow",
            (Origin::Persistent, _) => "persistent",
        }
    }

    fn holds(&self, event: &Event) -> bool {
        self.origin == event.origin && (self.origin != Origin::Arena || self.phase == event.phase)
    }
}

/// The stack at one moment.
#[derive(Clone)]
pub(super) struct Sample {
    /// The bytes in each layer, from the bottom.
    pub(super) levels: Vec<u64>,
    /// The end of the arena in the stack: persistent bytes plus the arena's reservation. Zero
    /// without an arena.
    pub(super) arena_end: u64,
}

impl Sample {
    pub(super) fn total(&self) -> u64 {
        self.levels.iter().sum()
    }
}

/// The stack over the time of a recording.
pub(super) struct Timeline<'r> {
    pub(super) layers: Vec<Layer<'r>>,
    /// The fullest moment of each column. The columns divide the time evenly.
    pub(super) columns: Vec<Sample>,
    pub(super) start_us: u64,
    pub(super) span_us: u64,
    pub(super) peak_us: u64,
    pub(super) peak_bytes: u64,
    /// The number of events before the peak.
    peak_events: usize,
    /// The most that the arena reserved.
    pub(super) arena_bytes: u64,
    /// The times when steps ended.
    pub(super) resets_us: Vec<u64>,
    /// The times when requests were refused, with the bytes in use then.
    pub(super) refusals: Vec<(u64, u64)>,
}

impl<'r> Timeline<'r> {
    pub(super) fn new(recording: &'r Recording, columns: usize) -> Self {
        let start_us = recording.events.front().map_or(0, |event| event.time_us);
        let end_us = recording.events.back().map_or(0, |event| event.time_us);
        let mut held = recording.start.clone();
        let mut line = Self {
            layers: layers(recording),
            columns: Vec::with_capacity(columns),
            start_us,
            span_us: end_us.saturating_sub(start_us).max(1),
            peak_us: start_us,
            peak_bytes: 0,
            peak_events: 0,
            arena_bytes: 0,
            resets_us: Vec::new(),
            refusals: Vec::new(),
        };
        let mut now = Sample { levels: vec![0; line.layers.len()], arena_end: 0 };
        for live in held.live.values() {
            now.levels[line.layer_of(live)] += occupied_bytes(live);
        }
        line.see(&mut now, &held, (start_us, 0));
        for (number, event) in recording.events.iter().enumerate() {
            // Columns without an event show the state before them. So does the start of the event's
            // own column.
            let column = ((line.part(event.time_us) * columns as f64) as usize).min(columns - 1);
            while line.columns.len() <= column {
                line.columns.push(now.clone());
            }
            for ended in held.apply(event) {
                now.levels[line.layer_of(&ended)] -= occupied_bytes(&ended);
            }
            match event.kind {
                Kind::Allocate => now.levels[line.layer_of(event)] += occupied_bytes(event),
                Kind::Reset => line.resets_us.push(event.time_us),
                Kind::Refuse { .. } => line.refusals.push((event.time_us, now.total())),
                _ => {}
            }
            line.see(&mut now, &held, (event.time_us, number + 1));
            if let Some(shown) = line.columns.last_mut()
                && now.total() >= shown.total()
            {
                *shown = now.clone();
            }
        }
        line.columns.resize(columns, now);
        line
    }

    /// Returns the position of a moment in the recording, from 0 to 1.
    pub(super) fn part(&self, time_us: u64) -> f64 {
        (time_us.saturating_sub(self.start_us) as f64 / self.span_us as f64).min(1.0)
    }

    /// Returns the source line whose tensors held most at the peak, and their bytes.
    pub(super) fn holds_most(&self, recording: &Recording) -> Option<(String, u64)> {
        let mut held = recording.start.clone();
        recording.events.iter().take(self.peak_events).for_each(|event| drop(held.apply(event)));
        let mut by_line: BTreeMap<_, u64> = BTreeMap::new();
        for live in held.live.values() {
            *by_line.entry((&live.file, live.line)).or_default() += occupied_bytes(live);
        }
        let ((file, line), bytes) = by_line.into_iter().max_by_key(|&(_, bytes)| bytes)?;
        Some((format!("{file}:{line}"), bytes))
    }

    /// Completes a sample, with the number of events so far, and updates the peaks.
    fn see(&mut self, now: &mut Sample, held: &Held, (time_us, events): (u64, usize)) {
        let reserved: u64 = held.reserved.values().map(|event| event.bytes as u64).sum();
        let persistent = self.layers.iter().zip(&now.levels).filter(|(layer, _)| layer.origin == Origin::Persistent);
        self.arena_bytes = self.arena_bytes.max(reserved);
        now.arena_end = if reserved == 0 { 0 } else { reserved + persistent.map(|(_, bytes)| bytes).sum::<u64>() };
        for (layer, &bytes) in self.layers.iter_mut().zip(&now.levels) {
            layer.peak_bytes = layer.peak_bytes.max(bytes);
        }
        if now.total() > self.peak_bytes {
            (self.peak_us, self.peak_bytes, self.peak_events) = (time_us, now.total(), events);
        }
    }

    fn layer_of(&self, event: &Event) -> usize {
        let found = self.layers.iter().position(|layer| layer.holds(event));
        found.expect("every allocation of the recording has its layer")
    }
}

/// Returns the layers from the bottom: persistent, the phases in the order of their appearance,
/// overflow.
fn layers(recording: &Recording) -> Vec<Layer<'_>> {
    let mut layers: Vec<Layer<'_>> = Vec::new();
    let made = recording.events.iter().filter(|event| event.kind == Kind::Allocate);
    for event in recording.start.live.values().chain(made) {
        if !layers.iter().any(|layer| layer.holds(event)) {
            layers.push(Layer { origin: event.origin, phase: event.phase, peak_bytes: 0 });
        }
    }
    layers.sort_by_key(|layer| match layer.origin {
        Origin::Persistent => 0,
        Origin::Arena => 1,
        Origin::Overflow => 2,
    });
    layers
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ARENA, OVERFLOW, WEIGHTS, event};
    use super::*;
    use proptest::prelude::*;

    fn levels(sample: &Sample) -> &[u64] {
        &sample.levels
    }

    #[test]
    fn columns_show_held_memory_and_peak() {
        let mut recording = Recording::new("emulated", 100);
        recording.push(event(100, Kind::Reserve, ARENA, 4096));
        recording.push(event(100, Kind::Allocate, WEIGHTS, 1000));
        recording.push(event(110, Kind::Allocate, ARENA, 100));
        recording.push(Event { phase: "backward", ..event(130, Kind::Allocate, ARENA + 256, 512) });
        recording.push(event(130, Kind::Allocate, OVERFLOW, 5000));
        recording.push(event(131, Kind::Free, OVERFLOW, 5000));
        recording.push(event(132, Kind::Refuse { free_bytes: 0 }, 0, 1));
        recording.push(event(150, Kind::Reset, ARENA, 768));
        let line = Timeline::new(&recording, 5);
        let names: Vec<&str> = line.layers.iter().map(Layer::name).collect();
        assert_eq!(names, ["persistent", "forward", "backward", "overflow"]);
        // Columns of 10 us start at 100 us. The overflow lasted 1 us and is visible. The last
        // column starts with the plateau.
        let expected =
            [[1024, 0, 0, 0], [1024, 256, 0, 0], [1024, 256, 0, 0], [1024, 256, 512, 5120], [1024, 256, 512, 0]];
        assert_eq!(line.columns.iter().map(levels).collect::<Vec<_>>(), expected);
        assert!(line.columns.iter().all(|column| column.arena_end == 4096 + 1024));
        assert_eq!((line.peak_us, line.peak_bytes), (130, 1024 + 256 + 512 + 5120));
        let all = 1024 + 256 + 512 + 5120;
        assert_eq!(
            line.holds_most(&recording),
            Some(("host/core/src/ops/activation.rs:21".into(), all)),
            "one line made all tensors"
        );
        assert_eq!(line.arena_bytes, 4096);
        assert_eq!(line.resets_us, [150]);
        assert_eq!(line.refusals, [(132, 1024 + 256 + 512)]);
        assert_eq!(line.layers.iter().map(|layer| layer.peak_bytes).collect::<Vec<_>>(), [1024, 256, 512, 5120]);
    }

    #[test]
    fn forgotten_memory_is_shown() {
        let mut recording = Recording::new("emulated", 1);
        recording.push(event(0, Kind::Allocate, WEIGHTS, 256));
        recording.push(event(5, Kind::Allocate, ARENA, 256));
        recording.push(event(9, Kind::Reset, ARENA, 256));
        let line = Timeline::new(&recording, 2);
        assert_eq!(line.columns.iter().map(levels).collect::<Vec<_>>(), [[256, 256], [256, 0]]);
        assert_eq!(line.peak_bytes, 512);
    }

    proptest! {
        /// Checks that the columns' fullest moment is the peak of a plain replay, at any
        /// resolution.
        #[test]
        fn no_peak_is_lost(
            changes in prop::collection::vec((0u64..50, 0u64..12, 1usize..5000), 1..80),
            columns in 1usize..40,
            limit in 1usize..90,
        ) {
            let mut recording = Recording::new("emulated", limit);
            let (mut time, mut live) = (0, std::collections::BTreeMap::new());
            let mut peak_of_the_kept = 0;
            let first_kept = changes.len().saturating_sub(limit);
            for (at, &(later, slot, bytes)) in changes.iter().enumerate() {
                time += later;
                let address = OVERFLOW + (slot << 20);
                let before: u64 = live.values().sum();
                if live.remove(&slot).is_some() {
                    recording.push(event(time, Kind::Free, address, bytes));
                } else {
                    live.insert(slot, 256 * bytes.div_ceil(256) as u64);
                    recording.push(event(time, Kind::Allocate, address, bytes));
                }
                if at >= first_kept {
                    peak_of_the_kept = peak_of_the_kept.max(before).max(live.values().sum());
                }
            }
            let line = Timeline::new(&recording, columns);
            prop_assert_eq!(line.columns.len(), columns);
            prop_assert_eq!(line.peak_bytes, peak_of_the_kept);
            prop_assert_eq!(line.columns.iter().map(Sample::total).max(), Some(peak_of_the_kept));
        }
    }
}
