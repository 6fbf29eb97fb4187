//! Bug B in small: gradients that vanish when memory is reset and used again, while every loss stays right.
//!
//! ```text
//! cargo run --release --example gradients_after_reset                                    # on this CPU
//! cargo run --release --features cuda --example gradients_after_reset -- --device cuda   # on the GPU
//! ```
//! The original: over four batches, with a pool reset between them, the head's gradient fell from 3.74 to 2.5e-6, 2e-18 and 0,
//! because memory that backward still needed was handed out again within the same step; the losses, which need nothing kept,
//! were right. Here one perceptron runs with its activations kept in four ways, by the same kernels: on a tape, in saved
//! tensors, in a pool that pins what backward needs, and in one that loses its pins at the first reset, as the original did.
//! Exit code 0: the first three agree to the bit, and the last shows the bug. 1: not so, or the device failed. 2: the command
//! line is wrong.

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

/// Shows what becomes of gradients when memory is reset between batches.
#[derive(Parser)]
#[command(name = "gradients_after_reset")]
struct Args {
    /// Where to run
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
    println!("The head's gradient, its L2 norm, on the {}.\n", device.description().name);
    print_table(&[
        ("on a tape", &tape),
        ("in saved tensors", &saved),
        ("pool that keeps pins", &keeps),
        ("pool that loses pins", &loses),
    ]);
    println!("\nlosses, on a tape:            {:?}", tape.losses);
    println!("losses, pool that loses pins: {:?}", loses.losses);
    if !(tape.differences(&saved).is_empty() && tape.differences(&keeps).is_empty()) {
        return Err("three ways to keep activations do not agree".into());
    }
    if tape.losses != loses.losses || tape.differences(&loses) != [1, 2, 3] {
        return Err("the pool that loses its pins does not show the bug".into());
    }
    println!("\nThe losses show nothing: forward reads only what was just written. The first three agree to the bit.");
    Ok(())
}
