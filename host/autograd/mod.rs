//! Reverse-mode differentiation: a tape of what backward must do, in the order of the forward pass.
//!
//! An op's differentiable form stands beside the op, in [`ops`](crate::ops): it computes forward, records
//! one closure that turns the gradients of its outputs into those of its inputs, and is done; neither the tape nor a
//! device knows a list of ops. Here stand the sums of which the tape makes its own. An [`Op`] puts it on the tape and a [`Backward`] serves its closure: ops of other packages
//! have the same two. A checkpoint is a part of a tape that keeps its inputs alone ([`Kept`]) and runs again in the backward pass. Invariant: every value on a tape is [`Saved`], so nothing can overwrite what backward
//! will read, the tape is consumed by its one backward pass, and neither takes a variable of another tape or a parameter of another
//! layout.

#![forbid(unsafe_code)]

mod backward;
mod checkpoint;
mod elementwise;
pub(crate) mod kept;
mod op;
mod tape;
mod var;

pub use backward::Backward;
pub use kept::Kept;
pub use op::Op;
pub use tape::Tape;
pub use var::{AnyVar, Var};
