//! Tensors: what all the rest moves, lends and computes with.
//!
//! Plain values: a shape, an element type, an address and a brand. Invariant: nothing here knows a device or a step; whoever
//! makes a tensor of memory says for how long it is memory.

mod access;
mod brand;
mod element;
mod lent;
mod memory;
mod owned;
mod shape;
mod stored;

pub use access::{Source, Target};
pub(crate) use brand::Brand;
pub use element::Element;
pub(crate) use element::{STALE, Values};
pub use lent::{Lent, LentMut};
pub(crate) use memory::Memory;
pub use owned::{Saved, Tensor};
pub use shape::Shape;
pub(crate) use stored::AnyTensor;
pub use stored::Stored;
