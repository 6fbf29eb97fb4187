//! What can happen to memory.

#![forbid(unsafe_code)]

use crate::memory::layout::padded;
use std::borrow::Cow;

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
    pub(super) fn name(self) -> &'static str {
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
    pub(super) fn occupied_bytes(&self) -> u64 {
        padded(self.bytes).unwrap_or(self.bytes) as u64
    }
}
