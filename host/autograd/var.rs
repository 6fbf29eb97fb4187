//! A value on a tape.
//!
//! Invariant: it is [`Saved`], so nothing can overwrite what backward will read.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::tensor::{Saved, Shape};

/// A value on a tape, and on no other: anywhere else it is [`Error::Misuse`].
#[derive(Clone, Copy, Debug)]
pub struct Var<'s> {
    pub(super) value: Saved<'s>,
    pub(super) tape: u64,
    /// Its number among the outputs of the tape's ops; none for an input, which needs no gradient.
    pub(super) output: Option<usize>,
}

impl<'s> Var<'s> {
    /// The value: shared and read-only until the step is over.
    pub fn value(&self) -> &Saved<'s> {
        &self.value
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    /// Whether a backward pass wants its gradient: an input's it does not. What is given for one is dropped.
    pub fn wants_gradient(&self) -> bool {
        self.output.is_some()
    }

    /// An error in the name of `op` unless it is a variable of this tape.
    pub(super) fn check(&self, op: &'static str, tape: u64) -> Result<()> {
        if self.tape == tape {
            return Ok(());
        }
        Err(Error::misuse(op, "a variable of this tape", "one of another tape"))
    }
}
