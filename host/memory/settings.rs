//! How an arena is set up: its capacity, and its growth.

#![forbid(unsafe_code)]

/// What a step needs; made by [`Arena::measure`](super::Arena::measure).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub(crate) high_water_bytes: usize,
}

impl Measured {
    /// The most bytes that the step had in use.
    pub fn high_water_bytes(self) -> usize {
        self.high_water_bytes
    }
}

/// How large an arena is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Capacity {
    /// So many bytes.
    Bytes(usize),
    /// A share, above 0 and up to 1, of the memory that can be had when the arena is built.
    FractionOfAvailable(f64),
    /// Exactly what a step was measured to need.
    Measured(Measured),
}

impl Capacity {
    /// So many times 2^20 bytes; where no number says it, more than any device has.
    pub const fn mib(mebibytes: usize) -> Self {
        Self::Bytes(mebibytes.saturating_mul(1 << 20))
    }

    /// So many times 2^30 bytes; where no number says it, more than any device has.
    pub const fn gib(gibibytes: usize) -> Self {
        Self::Bytes(gibibytes.saturating_mul(1 << 30))
    }
}

/// Whether an arena's capacity changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// Never.
    #[default]
    Fixed,
    /// At the end of a step that needed more, to what it needed, up to `max_bytes`.
    AtBoundary {
        /// The largest capacity.
        max_bytes: usize,
    },
}
