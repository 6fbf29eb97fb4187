//! Optimizers. A rule defines how weights are updated ([`UpdateRule`]), and [`Optimizer`] applies
//! any rule.
//!
//! AdamW and SGD take one launch over the flat region, after the gradients' norm. Muon takes about
//! 30 for each matrix. All support clipping, a schedule and parameter groups.

#![forbid(unsafe_code)]

mod adamw;
mod muon;
mod optimizer;
mod parameter_groups;
mod range;
mod rule;
mod schedule;
mod sgd;
mod state;
mod ticket;
mod update;

pub use adamw::AdamW;
pub use muon::Muon;
pub use optimizer::Optimizer;
pub use parameter_groups::{ParameterGroup, ParameterGroups};
pub use rule::{SmallUpdateArguments, UpdateArguments, UpdateRule, WholeParameter};
pub use schedule::{Decay, Schedule};
pub use sgd::Sgd;
pub(crate) use state::State;
#[cfg(feature = "group")]
pub(crate) use state::words;
pub use ticket::UpdateTicket;
