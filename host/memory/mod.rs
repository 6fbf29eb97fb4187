//! Memory: what a step allocates from, and what outlives it.

mod arena;
mod buffer;
mod builder;
mod checked;
mod conditions;
mod counters;
mod floor;
mod full;
mod layout;
#[cfg(test)]
mod layout_rows;
mod overflow;
mod page_locked;
mod peak;
mod region;
mod request;
mod reuse;
#[cfg(feature = "nvtx")]
mod sanitizer;
mod scope;
mod sections;
mod settings;
mod situation;
mod snapshot;

pub use arena::Arena;
pub use buffer::Buffer;
pub(crate) use buffer::PIECE_BYTES;
pub use builder::ArenaBuilder;
pub(crate) use checked::Checks;
pub(crate) use conditions::{Labels, Turns};
pub(crate) use floor::Floor;
pub(crate) use layout::ALIGN_BYTES;
pub use overflow::Overflow;
pub use page_locked::PageLocked;
pub(crate) use region::Region;
pub(crate) use scope::Aside;
pub(crate) use sections::Section;
pub use settings::{Capacity, Growth, Measured};
pub use snapshot::{Event, Kind, Origin, Recording};
