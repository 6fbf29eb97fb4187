//! The unit tests of the data side of `examples/crossasset`: bars, features, labels, folds, command
//! line, report.
//!
//! Cargo builds an example either as a program or as its tests. `tests/programs/bars.rs` runs the
//! program, so this file compiles the modules a second time for the tests inside them.

#![forbid(unsafe_code)]
#![allow(dead_code, reason = "the program's main, which calls all of this, is not here")]

#[path = "../examples/crossasset/bars.rs"]
mod bars;
#[path = "../examples/crossasset/cli.rs"]
mod cli;
#[path = "../examples/crossasset/dataset.rs"]
mod dataset;
#[path = "../examples/crossasset/features.rs"]
mod features;
#[path = "../examples/crossasset/model.rs"]
mod model;
#[path = "../examples/crossasset/plain.rs"]
mod plain;
#[path = "crossasset/plain.rs"]
mod plain_and_fused;
#[path = "../examples/crossasset/random.rs"]
mod random;
#[path = "../examples/crossasset/report.rs"]
mod report;
#[path = "../examples/crossasset/samples.rs"]
mod samples;
#[path = "../examples/crossasset/sizes.rs"]
mod sizes;
#[path = "crossasset/stored.rs"]
mod stored;
mod support;
#[path = "../examples/crossasset/synthetic.rs"]
mod synthetic;
