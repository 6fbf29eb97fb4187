//! The settings of an arena's capacity and growth.

#![forbid(unsafe_code)]

/// The needs of a step, measured by [`Arena::measure`](super::Arena::measure).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub(crate) high_water_bytes: usize,
}

impl Measured {
    /// Returns the most bytes that the step had in use.
    pub fn high_water_bytes(self) -> usize {
        self.high_water_bytes
    }
}

/// The size of an arena.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Capacity {
    /// A number of bytes.
    Bytes(usize),
    /// A share, above 0 and up to 1, of the memory that is available when the arena is built.
    FractionOfAvailable(f64),
    /// The measured needs of a step, exactly.
    Measured(Measured),
}

impl Capacity {
    /// Returns `mebibytes` times 2^20 bytes, or on overflow more than any device has.
    pub const fn mib(mebibytes: usize) -> Self {
        Self::Bytes(mebibytes.saturating_mul(1 << 20))
    }

    /// Returns `gibibytes` times 2^30 bytes, or on overflow more than any device has.
    pub const fn gib(gibibytes: usize) -> Self {
        Self::Bytes(gibibytes.saturating_mul(1 << 30))
    }
}

/// The growth of an arena's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// The capacity never changes.
    #[default]
    Fixed,
    /// The capacity grows after a step that needed more, to what it needed, up to `max_bytes`.
    AtBoundary {
        /// The largest capacity.
        max_bytes: usize,
    },
}
