//! Ranks that train one model together, and what ends them.

#[path = "../support/mod.rs"]
mod support;

mod group;
mod group_ends;
mod group_faults;
mod overlap;
mod ranks;
