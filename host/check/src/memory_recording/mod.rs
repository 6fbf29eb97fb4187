//! A [`Recording`] of memory events, exported as PyTorch's memory snapshot.
//!
//! A [`MemoryRecorder`] observes an arena, takes no memory from a device and uses no driver.
//!
//! Invariant: a recording is bounded, and dropped events are folded into its starting state, so
//! the export stays exact however long it ran.
#![forbid(unsafe_code)]

mod pickle;
mod recorder;
mod recording;

pub use recorder::MemoryRecorder;
pub use recording::Recording;

use stepscope_core::Event;
use stepscope_core::internals::ALIGN_BYTES;

/// Returns the bytes that the tensor occupies. Tensors start at multiples of the alignment.
fn occupied_bytes(event: &Event) -> u64 {
    event.bytes.checked_next_multiple_of(ALIGN_BYTES).unwrap_or(event.bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::recording::Held;
    use super::*;
    use proptest::prelude::*;
    use stepscope_core::{Kind, Origin};

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
            accessed_bytes: bytes,
            origin,
            phase: "forward",
            file: "host/core/src/ops/activation.rs",
            line: 21,
            label: "gelu".into(),
        }
    }

    /// Records steps like real ones, twice: a step of tensors in the arena, a nested scratch, an
    /// overflow, a reset.
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
                offset += bytes.next_multiple_of(ALIGN_BYTES);
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
    fn rewind_ends_only_tensors_above() {
        let mut held = Held::default();
        for (address, bytes) in [(ARENA, 100), (ARENA + 256, 300), (ARENA + 768, 1), (OVERFLOW, 5), (WEIGHTS, 9)] {
            assert_eq!(held.apply(&event(1, Kind::Allocate, address, bytes)), []);
        }
        let ended = held.apply(&event(2, Kind::Rewind, ARENA + 256, 768));
        assert_eq!(ended.iter().map(|ended| ended.address - ARENA).collect::<Vec<_>>(), [256, 768]);
        let ended = held.apply(&event(3, Kind::Reset, ARENA, 256));
        assert_eq!(ended.iter().map(|ended| ended.bytes).collect::<Vec<_>>(), [100]);
        assert_eq!(held.live.len(), 2);
        assert_eq!(held.apply(&event(4, Kind::Free, OVERFLOW, 5)).len(), 1);
        assert_eq!(held.apply(&event(4, Kind::Free, OVERFLOW, 5)).len(), 0, "the tensor was already freed");
    }

    #[test]
    fn empty_tensors_hide_no_others() {
        let mut held = Held::default();
        held.apply(&event(1, Kind::Allocate, ARENA, 64));
        held.apply(&event(2, Kind::Allocate, ARENA, 0));
        assert_eq!(held.live[&ARENA].bytes, 64);
    }

    proptest! {
        /// Checks that dropping events changes no state: the final state is the same for any limit.
        #[test]
        fn forgotten_events_become_the_start(
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
                (held.reserved, held.live)
            };
            let (reserved, live) = end(&short);
            prop_assert_eq!(live.len(), 1, "the weights");
            prop_assert_eq!((reserved, live), end(&full));
        }
    }
}
