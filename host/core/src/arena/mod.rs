//! Memory: the arena that a step allocates from, and buffers that outlive steps.

mod budget;
mod buffer;
mod builder;
mod checked;
mod conditions;
mod counters;
mod events;
mod floor;
mod full;
mod handle;
mod layout;
mod overflow;
mod page_locked;
mod peak;
mod region;
mod request;
mod reuse;
mod scope;
mod sections;
mod settings;

pub use buffer::Buffer;
pub use buffer::PIECE_BYTES;
pub use builder::ArenaBuilder;
pub(crate) use checked::Checks;
pub use conditions::Turns;
pub use events::{ArenaObserver, ArenaTool, Event, Kind, Origin};
pub(crate) use floor::Floor;
pub use handle::Arena;
pub use layout::ALIGN_BYTES;
pub use overflow::Overflow;
pub use page_locked::PageLocked;
pub(crate) use region::ArenaInner;
pub(crate) use scope::NestedScope;
pub(crate) use sections::GraphReservation;
pub use settings::{Capacity, Growth, Measured};
