//! Memory: what a step allocates from, and what outlives it.

mod arena;
mod buffer;
mod layout;

pub use arena::{Arena, ArenaBuilder, ArenaReport, Capacity};
pub(crate) use arena::Region;
pub use buffer::Buffer;
pub(crate) use layout::ALIGN_BYTES;
