//! Verifies the scalar functions on every float32 input, on a device and on this CPU.
//!
//! ```text
//! cargo run --release --example scalars  # the emulator, all 2^32 inputs per function
//! cargo run --release --features cuda --example scalars -- --device cuda  # the GPU, the same
//! cargo run --release --example scalars -- --stride 4099  # every 4099th input
//! ```
//! For each function of `device/src/math.rs`, it prints how many of the device's results differ
//! from the CPU's in any bit (NaNs aside). It also prints the largest error against float64, in
//! units in the last place (ulp), with its input. The device runs the kernel `scalars`; the CPU
//! calls the same function, compiled for it.
//!
//! Exit code 0: no bit differs and no error exceeds the bound in `math.rs`. 1: otherwise, or the
//! device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod reference;
mod sweep;

use clap::Parser;
use reference::{FUNCTIONS, Function};
use std::process::ExitCode;
use std::time::Instant;
use stepscope::{Arena, Capacity, Device, DeviceKind, Result};
use sweep::{BLOCK, sweep};

/// Compares the scalar functions on a device with the CPU and with float64, over all inputs
#[derive(Parser)]
#[command(name = "scalars")]
struct Args {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Test only inputs whose bits are a multiple of this
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    stride: u32,

    /// Test only these functions
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = FUNCTIONS.each_ref().map(|function| function.name))]
    only: Vec<String>,
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

/// Returns true if all results meet the claims of `math.rs`.
fn run(args: &Args) -> Result<bool> {
    let device = Device::open(args.device)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::Bytes(BLOCK * size_of::<f32>())).build()?;
    println!(
        "{} against this CPU, every input whose bits are a multiple of {}",
        device.description().name,
        args.stride
    );
    println!(
        "{:<16} {:>10} {:>10} {:>9} {:>7}   {:<28} {:>7}",
        "function", "inputs", "different", "worst ulp", "stated", "at", "seconds"
    );
    let mut all = true;
    let wanted = |function: &&Function| args.only.is_empty() || args.only.iter().any(|name| name == function.name);
    for function in FUNCTIONS.iter().filter(wanted) {
        let start = Instant::now();
        let tally = sweep(function, args.stride, |range| range.on_device(&mut arena, function))?;
        let at = format!("{:e} ({:#010x})", tally.worst_input, tally.worst_input.to_bits());
        println!(
            "{:<16} {:>10} {:>10} {:>9.4} {:>7.3}   {at:<28} {:>7.1}",
            function.name,
            tally.inputs,
            tally.differences,
            tally.worst_ulps,
            function.stated_ulps,
            start.elapsed().as_secs_f64()
        );
        if let Some(first) = tally.first_difference {
            println!("  {first}");
        }
        all &= tally.holds(function);
    }
    println!("{}", if all { "all bits equal, all errors within the stated bounds" } else { "FAILED" });
    Ok(all)
}
