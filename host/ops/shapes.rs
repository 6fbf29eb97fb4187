//! What ops ask of several tensors' shapes at once.

use crate::error::{Error, Result};
use crate::tensor::Shape;

/// An error in the name of `op` unless two tensors that must agree do.
///
/// # Errors
/// [`Error::Misuse`] when the shapes differ.
pub fn same_shape(op: &'static str, a: Shape, b: Shape) -> Result<()> {
    if a == b { Ok(()) } else { Err(Error::misuse(op, format!("two tensors of shape {a}"), format!("one of {b}"))) }
}
