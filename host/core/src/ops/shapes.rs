//! Checks of tensors' shapes that several ops share.

use crate::error::{Error, Result};
use crate::tensor::Source;

/// Returns an error of `op` unless `row`, such as a gain, has one element for each of `cols`.
pub(super) fn check_row<'s>(op: &'static str, what: &str, cols: usize, row: &impl Source<'s, f32>) -> Result<()> {
    if row.shape().extents() == [cols] {
        return Ok(());
    }
    Err(Error::misuse(op, format!("a {what} of shape [{cols}]"), row.shape().to_string()))
}

/// Returns an error of `op` for rows of another length. The kernel's contract checks the number of
/// flat elements.
pub(super) fn check_rows<'s>(op: &'static str, what: &str, len: usize, rows: &impl Source<'s, f32>) -> Result<()> {
    match rows.shape().extents() {
        [_] => Ok(()),
        [_, extent] if *extent == len => Ok(()),
        _ => Err(Error::misuse(op, format!("{what} of shape [groups, {len}]"), rows.shape().to_string())),
    }
}
