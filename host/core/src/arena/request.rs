//! A request for memory from an arena.

#![forbid(unsafe_code)]

use crate::tensor::Shape;

/// A requested tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Its bytes, before padding.
    pub(crate) bytes: usize,
    pub(crate) shape: Shape,
    /// The name of its element type.
    pub(crate) element: &'static str,
    /// The word that checked mode fills it with.
    pub(crate) poison: u32,
}
