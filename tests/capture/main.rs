//! Tests of captured steps, deadlines, device faults, missing resources and the self-test of a
//! device.

#[path = "../support/overrun.rs"]
mod overrun;
#[path = "../support/mod.rs"]
mod support;

mod capture;
mod capture_crossasset;
mod capture_faults;
mod capture_owners;
mod captured_deadlines;
mod deadlines;
mod missing_resources;
mod recordings;
mod self_test;
