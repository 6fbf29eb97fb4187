//! A value on a tape.
//!
//! Invariant: it is [`Saved`], so nothing can overwrite what backward will read.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::tensor::{Saved, Shape, Stored};

/// A value on a tape, and on no other: anywhere else it is [`Error::Misuse`].
#[derive(Debug)]
pub struct Var<'s, S: Stored = f32> {
    pub(super) value: Saved<'s, S>,
    pub(super) tape: u64,
    /// Its number among the outputs of the tape's ops; none for an input, which needs no gradient.
    pub(super) output: Option<usize>,
}

impl<S: Stored> Clone for Var<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Stored> Copy for Var<'_, S> {}

impl<'s, S: Stored> Var<'s, S> {
    /// The value: shared and read-only until the step is over.
    pub fn value(&self) -> &Saved<'s, S> {
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
}

/// A variable, whatever it stores.
pub trait AnyVar: sealed::Sealed {
    #[doc(hidden)]
    fn tape(&self) -> u64;
}

mod sealed {
    pub trait Sealed {}
}

impl<S: Stored> sealed::Sealed for Var<'_, S> {}

impl<S: Stored> AnyVar for Var<'_, S> {
    fn tape(&self) -> u64 {
        self.tape
    }
}

/// An error in the name of `op` unless it is a variable of this tape.
pub(super) fn check(var: &dyn AnyVar, op: &'static str, tape: u64) -> Result<()> {
    if var.tape() == tape {
        return Ok(());
    }
    Err(Error::misuse(op, "a variable of this tape", "one of another tape"))
}
