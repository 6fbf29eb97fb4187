//! Memory: what a step allocates from, and what outlives it.

mod arena;
mod buffer;
mod layout;

pub(crate) use arena::Region;
pub use arena::{Arena, ArenaBuilder, ArenaReport, Capacity};
pub use buffer::Buffer;
pub(crate) use layout::ALIGN_BYTES;
