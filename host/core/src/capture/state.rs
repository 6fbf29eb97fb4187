//! The life cycle of a captured step, as a table.
//!
//! Invariant: a graph is replayed only after it was sealed, and no state follows a lost device.
//! This file is pure: it uses no driver, memory or time.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// The state of a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// A dry run has measured its needs. Nothing is recorded.
    Warm,
    /// Its launches are being listed.
    Recording,
    /// A graph that can be replayed.
    Sealed,
    /// Its device is lost.
    Lost,
}

/// An event in the life of a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The closure runs to be recorded.
    Record,
    /// The closure failed or panicked, or the driver refused.
    Abandon,
    /// The driver has made a graph of it.
    Seal,
    /// The graph is about to run.
    Replay,
    /// The device was lost.
    Lose,
}

impl State {
    /// Returns the state after an event.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the event cannot happen in this state.
    pub(super) fn after(self, event: Event) -> Result<Self> {
        match (self, event) {
            (_, Event::Lose) => Ok(Self::Lost),
            (Self::Warm, Event::Record) => Ok(Self::Recording),
            (Self::Recording, Event::Abandon) => Ok(Self::Warm),
            (Self::Recording, Event::Seal) => Ok(Self::Sealed),
            (Self::Sealed, Event::Replay) => Ok(Self::Sealed),
            (state, event) => {
                let needs = match event {
                    Event::Record => "a step that is warm",
                    Event::Abandon | Event::Seal => "a step that is being recorded",
                    Event::Replay | Event::Lose => "a step that is sealed",
                };
                Err(Error::misuse("capture", needs, format!("{event:?} of a step that is {state:?}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 4] = [State::Warm, State::Recording, State::Sealed, State::Lost];
    const EVENTS: [Event; 5] = [Event::Record, Event::Abandon, Event::Seal, Event::Replay, Event::Lose];

    #[test]
    fn the_whole_table() {
        use State::{Lost, Recording, Sealed, Warm};
        // One row per state and one column per event, in the orders above.
        let table = [
            [Some(Recording), None, None, None, Some(Lost)],
            [None, Some(Warm), Some(Sealed), None, Some(Lost)],
            [None, None, None, Some(Sealed), Some(Lost)],
            [None, None, None, None, Some(Lost)],
        ];
        for (state, row) in STATES.into_iter().zip(table) {
            for (event, want) in EVENTS.into_iter().zip(row) {
                let after = state.after(event);
                assert_eq!(after.as_ref().ok(), want.as_ref(), "{event:?} in {state:?}");
                if let Err(error) = after {
                    let message = error.to_string();
                    assert!(
                        message.contains(&format!("{state:?}")) && message.contains(&format!("{event:?}")),
                        "{message}"
                    );
                }
            }
        }
    }

    /// Tries every sequence of up to six events. A replay happens only after a seal, with nothing
    /// but replays in between.
    #[test]
    fn only_sealed_captures_are_replayed() {
        fn walk(state: State, sealed: bool, left: usize) {
            if left == 0 {
                return;
            }
            for event in EVENTS {
                let Ok(next) = state.after(event) else { continue };
                assert!(event != Event::Replay || sealed);
                assert!(state != State::Lost || next == State::Lost, "the state of a lost device must stay Lost");
                walk(next, event == Event::Seal || (sealed && event == Event::Replay), left - 1);
            }
        }
        walk(State::Warm, false, 6);
    }
}
