//! Reverse-mode differentiation: a tape of backward closures, in the order of the forward pass.
//!
//! The differentiable form of an op is defined next to the op, in [`ops`](crate::ops). It computes
//! the forward pass and records one closure, which turns the gradients of its outputs into those of
//! its inputs. Neither the tape nor a device has a list of ops. An [`Op`] puts a record on the
//! tape, and a [`Backward`] serves its closure. Ops of other packages use the same two types. A
//! recomputed part of a tape keeps only its inputs ([`RecomputeInput`]) and runs again in the
//! backward pass. Ops that need nothing but variables are methods of [`Var`], which finds its tape
//! (`open.rs`).
//!
//! Invariant: every value on a tape is `Saved`, so nothing can overwrite what the backward pass
//! reads. A tape is consumed by its one backward pass. Variables of another tape and parameters of
//! another spec are rejected.

#![forbid(unsafe_code)]

mod backward;
mod op;
mod open;
mod recompute;
pub(crate) mod recompute_input;
mod record;
mod var;

pub use backward::Backward;
pub use op::Op;
pub(crate) use open::Kept;
pub use recompute_input::RecomputeInput;
pub use record::Tape;
pub use var::{AnyVar, Var};
