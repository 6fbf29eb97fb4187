//! A value on a tape.
//!
//! Invariant: the value is [`Saved`], so nothing can overwrite what the backward pass reads.

#![forbid(unsafe_code)]

use crate::arena::ArenaInner;
use crate::error::{Error, Result};
use crate::tensor::{Element, Saved, Shape, Stored};
use std::fmt;

/// A value on a tape. Using it on any other tape is [`Error::Misuse`].
pub struct Var<'s, S: Stored = f32> {
    pub(super) value: Saved<'s, S>,
    /// The memory of its step, for ops that are called on the variable.
    pub(super) region: &'s ArenaInner,
    pub(super) tape: u64,
    /// Its number among the outputs of the tape's ops. `None` for an input and for a constant,
    /// which need no gradient.
    pub(super) output: Option<usize>,
    /// True for a constant: a value that follows only from frozen parameters and from inputs.
    pub(super) constant: bool,
}

impl<S: Stored> Clone for Var<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Stored> Copy for Var<'_, S> {}

impl<S: Stored> fmt::Debug for Var<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var<{}>{}", <S as Element>::NAME, self.shape())
    }
}

impl<'s, S: Stored> Var<'s, S> {
    /// The value, shared and read-only until the step ends.
    pub fn value(&self) -> &Saved<'s, S> {
        &self.value
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    /// True if a backward pass computes its gradient. False for an input, and for a value that
    /// follows only from frozen parameters and inputs. A gradient of these is dropped.
    pub fn wants_gradient(&self) -> bool {
        self.output.is_some()
    }
}

/// A variable of any stored type.
pub trait AnyVar: sealed::Sealed {}

/// The things that a value of a tape depends on, from least to most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dependence {
    /// Inputs only, or nothing that the tape knows.
    Unknown,
    /// Frozen parameters and inputs.
    Constant,
    /// Trained parameters, or the output of an op with a backward pass.
    Trained,
}

mod sealed {
    pub trait Sealed {
        fn tape(&self) -> u64;

        /// Returns if a backward pass computes its gradient, and if it is a constant.
        fn dependence(&self) -> super::Dependence;
    }
}

impl<S: Stored> AnyVar for Var<'_, S> {}

impl<S: Stored> sealed::Sealed for Var<'_, S> {
    fn tape(&self) -> u64 {
        self.tape
    }

    fn dependence(&self) -> Dependence {
        match self.output {
            Some(_) => Dependence::Trained,
            None if self.constant => Dependence::Constant,
            None => Dependence::Unknown,
        }
    }
}

/// Returns an error of `op` unless the variable belongs to this tape.
pub(super) fn check(var: &dyn AnyVar, op: &'static str, tape: u64) -> Result<()> {
    if var.tape() == tape {
        return Ok(());
    }
    Err(Error::misuse(op, "a variable of this tape", "a variable of another tape"))
}
