//! The race detector of the emulator. It finds twelve bugs planted in copies of real kernels, does
//! not report sound code, and agrees with a plain search for unordered accesses.
//!
//! `kernels/modes.rs` checks that the library's own kernels are free of races. clippy checks that
//! none of them bypasses the detector (`device/clippy.toml`).

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
