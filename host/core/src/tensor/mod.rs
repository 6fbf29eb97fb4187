//! Tensors, the values that all other modules move, lend and compute with.
//!
//! A tensor is a plain value: a shape, an element type, an address and a brand.
//!
//! Invariant: this module depends on neither devices nor steps. The code that makes a tensor from
//! memory guarantees how long the memory lives.

mod access;
mod brand;
mod element;
mod lent;
mod memory;
mod owned;
mod shape;
mod stored;

pub(crate) use access::sealed::Sealed;
pub use access::{Source, Target};
pub(crate) use brand::Brand;
pub use element::{Element, is_finite};
pub(crate) use element::{STALE, Values};
pub use lent::{Lent, LentMut};
pub use memory::Memory;
pub use owned::{Saved, Tensor};
pub use shape::Shape;
pub(crate) use stored::AnyTensor;
pub use stored::Stored;
