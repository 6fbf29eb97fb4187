//! Tests of ranks that train one model together, and of the faults that end them.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod agreement_programs;
mod gradient_readers;
mod group;
mod group_ends;
mod group_faults;
mod longest_deadline;
mod overlap;
mod ranks;
mod whole_parameters;
