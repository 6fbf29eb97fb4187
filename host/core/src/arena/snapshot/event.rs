//! The events of a device's memory.

#![forbid(unsafe_code)]

use crate::arena::layout::padded;
use std::borrow::Cow;

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

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Arena => "arena",
            Self::Overflow => "overflow",
            Self::Persistent => "persistent",
        }
    }
}

/// An event of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time in microseconds, since 1970 for tools that show a date. Never earlier than that of
    /// the event before.
    pub time_us: u64,
    /// The kind of the event.
    pub kind: Kind,
    /// The first affected byte on the device.
    pub address: u64,
    /// The number of bytes, as requested.
    pub bytes: usize,
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

impl Event {
    /// Returns the bytes that the event occupies. Tensors start at multiples of the alignment.
    pub(super) fn occupied_bytes(&self) -> u64 {
        padded(self.bytes).unwrap_or(self.bytes) as u64
    }
}
