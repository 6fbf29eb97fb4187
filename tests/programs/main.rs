//! Tests of the example programs, run as processes.

#[path = "../support/mod.rs"]
mod support;

mod bars;
mod digits;
mod ends;
mod log;
mod models;
mod resume;
mod runs;
