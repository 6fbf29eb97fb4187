//! One set of bits: runs every kernel on seeded inputs and compares digests of the results with the committed ones.
//!
//! ```text
//! cargo run --release --example same_bits                                    # the emulator on this CPU
//! cargo run --release --features cuda --example same_bits -- --device cuda   # the GPU
//! cargo run --release --example same_bits -- --plant add                     # shows that one wrong bit is seen
//! cargo run --release --example same_bits -- --update                        # after a change of a kernel or a case
//! ```
//! A line for each kernel, forward and backward: its name, the first 16 digits of the SHA-256 of its results, and whether
//! that is the committed one; then the digest of all. NaNs count as equal.
//! Exit code 0: all are equal (with `--update`: are written). 1: one is not, or the device failed. 2: the command line is
//! wrong.

#![forbid(unsafe_code)]

mod cases;
mod golden;
#[path = "../../tests/support/mod.rs"]
mod support;

use cases::CASES;
use clap::Parser;
use clap::builder::PossibleValuesParser;
use golden::{GOLDEN, compare};
use std::process::ExitCode;
use stepscope::{Device, DeviceKind};

/// Where the committed digests are.
const GOLDEN_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/same_bits/golden.txt");

/// Compares the bits of every kernel's results with the committed ones.
#[derive(Parser)]
#[command(name = "same_bits")]
struct Args {
    /// Where the kernels run
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Change the last bit of one result of this kernel
    #[arg(long, value_name = "KERNEL", hide_possible_values = true,
        value_parser = PossibleValuesParser::new(CASES.map(|(name, _)| name)))]
    plant: Option<String>,

    /// Write the digests to golden.txt in the source folder and show what changed
    #[arg(long, conflicts_with = "plant")]
    update: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// True when all are equal, or written.
fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let device = Device::open(args.device)?;
    let mut found = String::new();
    for (name, case) in CASES {
        let mut results = cases::run(&device, case)?;
        if args.plant.as_deref() == Some(name) {
            results[0][0] ^= 1;
        }
        found += &golden::line(name, &results);
    }
    println!("{}, {} kernels", device.description().name, CASES.len());
    let verdicts = compare(&found, GOLDEN);
    verdicts.iter().filter(|verdict| !(args.update && verdict.equal())).for_each(|verdict| println!("{verdict}"));
    let different = verdicts.iter().filter(|verdict| !verdict.equal()).count();
    println!("{:<24} {}", "all", golden::of_all(&found));
    if args.update {
        std::fs::write(GOLDEN_PATH, &found).map_err(|error| format!("{GOLDEN_PATH}: {error}"))?;
        println!("{different} changed, written to {GOLDEN_PATH}");
        return Ok(true);
    }
    match different {
        0 => println!("all equal"),
        count => println!("{count} DIFFERENT"),
    }
    Ok(different == 0)
}
