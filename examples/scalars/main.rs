//! Proof of the scalar functions: every float32 input, on a device and on this CPU.
//!
//! ```text
//! cargo run --release --example scalars                                    # the emulator, all 2^32 inputs a function
//! cargo run --release --features cuda --example scalars -- --device cuda   # the GPU, the same
//! cargo run --release --example scalars -- --stride 4099                   # every 4099th input
//! ```
//! For each function of `device/src/math.rs`: how many results of the device differ from the CPU's in a bit (NaNs aside),
//! and the largest error against float64, in units in the last place, with its input. The device runs the kernel `scalars`;
//! the CPU calls the function, which the compiler has compiled for any processor.
//! Exit code 0: no bit differs and no error is above what `math.rs` states. 1: not so, or the device failed. 2: the command
//! line is wrong.

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

/// Compares the scalar functions on a device with the CPU and with float64, over all inputs.
#[derive(Parser)]
#[command(name = "scalars")]
struct Args {
    /// Where the kernel runs
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Take only the inputs whose bits are a multiple of this
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    stride: u32,

    /// Take only the functions of these names
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

/// True when all is as `math.rs` says.
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
    println!("{}", if all { "all bits equal, all errors within what is stated" } else { "FAILED" });
    Ok(all)
}
