//! What ops ask of several tensors' shapes at once.

use crate::error::{Error, Result};
use crate::tensor::{Shape, Source};

/// An error in the name of `op` unless two tensors that must agree do.
///
/// # Errors
/// [`Error::Misuse`] when the shapes differ.
pub fn same_shape(op: &'static str, a: Shape, b: Shape) -> Result<()> {
    if a == b { Ok(()) } else { Err(Error::misuse(op, format!("two tensors of shape {a}"), format!("one of {b}"))) }
}

/// An error in the name of `op` unless `row`, a gain say, has an element for each of `cols`.
pub(super) fn check_row<'s>(op: &'static str, what: &str, cols: usize, row: &impl Source<'s, f32>) -> Result<()> {
    if row.shape().extents() == [cols] {
        return Ok(());
    }
    Err(Error::misuse(op, format!("a {what} of shape [{cols}]"), row.shape().to_string()))
}

/// An error in the name of `op` for rows of another length. Flat elements are for the kernel's
/// contract to count.
pub(super) fn check_rows<'s>(op: &'static str, what: &str, len: usize, rows: &impl Source<'s, f32>) -> Result<()> {
    match rows.shape().extents() {
        [_] => Ok(()),
        [_, extent] if *extent == len => Ok(()),
        _ => Err(Error::misuse(op, format!("{what} of shape [groups, {len}]"), rows.shape().to_string())),
    }
}
