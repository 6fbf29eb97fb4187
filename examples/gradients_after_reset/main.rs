//! Bug B in miniature: gradients that vanish when memory is reset and reused, although every loss
//! is right.
//!
//! ```text
//! cargo run --release --example gradients_after_reset  # on this CPU
//! cargo run --release --features cuda --example gradients_after_reset -- --device cuda  # on GPU
//! ```
//! In the original bug, the head's gradient fell from 3.74 to 2.5e-6, 2e-18 and 0 over four batches
//! with a pool reset between them. Memory that backward still needed was handed out again within
//! the same step. The losses need no stored activations, so they were right.
//!
//! Here one perceptron runs with the same kernels and four ways to store its activations: on a
//! tape, in saved tensors, in a pool that pins what backward needs, and in a pool that loses its
//! pins at the first reset, like the original.
//!
//! Exit code 0: the first three agree bit for bit, and the last shows the bug. 1: otherwise, or the
//! device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]

mod perceptron;
mod pool;
mod run;
#[path = "../../tests/support/mod.rs"]
mod support;

use clap::Parser;
use perceptron::Perceptron;
use run::print_table;
use std::process::ExitCode;
use stepscope::{Device, DeviceKind};

/// Shows what happens to gradients when memory is reset between batches
#[derive(Parser)]
#[command(name = "gradients_after_reset")]
struct Args {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

fn main() -> ExitCode {
    match run(Args::parse().device) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(kind: DeviceKind) -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(kind)?;
    let tape = Perceptron::by_tape(&device)?;
    let saved = Perceptron::by_hand(&device, |_| Ok(()))?;
    let (keeps, loses) = (Perceptron::by_pool(&device, false)?, Perceptron::by_pool(&device, true)?);
    println!("L2 norm of the head's gradient, on the {}.\n", device.description().name);
    print_table(&[
        ("on a tape", &tape),
        ("in saved tensors", &saved),
        ("pool that keeps pins", &keeps),
        ("pool that loses pins", &loses),
    ]);
    println!("\nlosses, on a tape:            {:?}", tape.losses);
    println!("losses, pool that loses pins: {:?}", loses.losses);
    if !(tape.differences(&saved).is_empty() && tape.differences(&keeps).is_empty()) {
        return Err("the first three ways to store activations do not agree".into());
    }
    if tape.losses != loses.losses || tape.differences(&loses) != [1, 2, 3] {
        return Err("the pool that loses its pins does not show the bug".into());
    }
    println!(
        "\nThe losses do not show the bug, since forward reads only fresh data. The first three agree bit for bit."
    );
    Ok(())
}
