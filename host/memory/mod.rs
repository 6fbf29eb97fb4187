//! Memory: what a step allocates from, and what outlives it.

mod admission;
mod arena;
mod buffer;
mod checked;
mod diagnostics;
mod layout;
mod overflow;

pub use admission::{MemInfo, Refusal, Situation};
pub use arena::{Arena, ArenaBuilder, Capacity, Growth, Measured};
pub(crate) use arena::{Region, Request};
pub use buffer::Buffer;
pub use diagnostics::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub(crate) use layout::ALIGN_BYTES;
pub use overflow::Overflow;
