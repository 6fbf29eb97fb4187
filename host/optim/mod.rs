//! Optimisers: a rule says how weights are updated ([`UpdateRule`]), [`Optimizer`] makes any rule's updates.
//!
//! Those of the library are one launch over the flat region, behind the gradients' norm, with clipping, a schedule and groups of
//! parameters.

#![forbid(unsafe_code)]

mod adamw;
mod optimizer;
mod parameter_groups;
mod range;
mod rule;
mod schedule;
mod sgd;
mod update;

pub use adamw::{AdamW, AdamWConfig};
pub use optimizer::Optimizer;
pub use parameter_groups::{ParameterGroup, ParameterGroups};
pub use rule::{UpdateArguments, UpdateRule};
pub use schedule::Schedule;
pub use sgd::{Sgd, SgdConfig};
