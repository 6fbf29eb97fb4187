//! What is asked of an arena.

#![forbid(unsafe_code)]

use crate::tensor::Shape;

/// A tensor to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Its bytes, before padding.
    pub(crate) bytes: usize,
    pub(crate) shape: Shape,
    /// Its element type's name.
    pub(crate) element: &'static str,
    /// What checked mode fills it with.
    pub(crate) poison: u32,
}
