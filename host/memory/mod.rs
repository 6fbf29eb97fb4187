//! Memory: what a step allocates from, and what outlives it.

mod admission;
mod arena;
mod buffer;
mod checked;
mod conditions;
mod diagnostics;
mod full;
mod layout;
mod overflow;
mod region;
mod sections;
mod settings;
mod snapshot;

pub use admission::{MemInfo, Refusal, Situation};
pub use arena::{Arena, Measured};
pub use buffer::Buffer;
pub(crate) use checked::Checks;
pub(crate) use conditions::{Labels, Turns};
pub use diagnostics::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
pub(crate) use layout::ALIGN_BYTES;
pub use overflow::Overflow;
pub(crate) use region::{Region, Request};
pub(crate) use sections::Section;
pub use settings::{ArenaBuilder, Capacity, Growth};
pub use snapshot::{Event, Kind, Origin, Recording};
