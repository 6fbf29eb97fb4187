//! The race detector of the emulator: twelve planted bugs in copies of real kernels are found, sound code is not
//! reported, and its verdicts are those of a plain search for unordered accesses.
//!
//! That the library's own kernels are clean is `kernels/modes.rs`; that none goes around the detector, `ci/kernel_rules.py`.

#[path = "support/mod.rs"]
mod support;

#[path = "races/global.rs"]
mod global;
#[path = "races/mutants.rs"]
mod mutants;
#[path = "races/oracle.rs"]
mod oracle;
#[path = "races/shared.rs"]
mod shared;
