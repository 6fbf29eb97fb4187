//! Writes what every op computes on random shapes, forward and backward, for an independent
//! computation to check.
//!
//! ```text
//! cargo run --release --example trace_ops -- ops.safetensors
//! cargo run --release --features cuda --example trace_ops -- --device cuda ops.safetensors
//! ```
//! `cargo xtask oracle` runs it and checks the file with JAX. With `--graphs N`, the file has N
//! random expressions instead (see `graphs.rs`). A case is an op and a seed:
//!
//! | name | contents |
//! |---|---|
//! | `OP.SEED.in.NAME` | an operand; `in.dy` is the gradient of the result |
//! | `OP.SEED.out.y` | the result |
//! | `OP.SEED.out.dNAME` | the gradient of an operand |
//! | note `OP.SEED` | the largest allowed relative L2 error |
//! | note `y of OP`, `dx of OP` | the formulas of a declared op, which JAX evaluates |
//!
//! `OP_bf16` is the op on BF16 tensors. Its operands are BF16 values. `half` instead of `out` means
//! that the result was rounded to BF16. A rounded activation that backward reads is also an
//! operand.
//!
//! Exit code 0: the file is written. 1: it is not, or the device failed. 2: the command line is
//! wrong.

#![forbid(unsafe_code)]

#[path = "../../tests/support/mod.rs"]
mod support;
#[path = "../crossasset/tensor_file.rs"]
mod tensor_file;

mod activations;
mod attention;
mod case;
mod declared;
mod elementwise;
mod graphs;
mod losses;
mod places;
mod products;
mod rows;
mod updates;

use case::{Case, Run};
use clap::Parser;
use declared::RunRow;
use std::cell::RefCell;
use std::path::PathBuf;
use std::process::ExitCode;
use stepscope::{Arena, Capacity, Device, DeviceKind, Result};
use support::Random;
use tensor_file::TensorFile;

/// Writes the operands and results of every op
#[derive(Parser)]
#[command(name = "trace_ops")]
struct Args {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Number of random expressions to write instead of ops
    #[arg(long, value_name = "N", default_value = "0")]
    graphs: u64,

    /// The safetensors file to write
    file: PathBuf,
}

/// The seeds of each case's shapes and values.
const SEEDS: std::ops::Range<u64> = 0..4;

/// The ops of a random expression.
const GRAPH_OPS: usize = 8;

/// The cases of ops without a declaration. Each gives the length of the longest sum in the op or
/// its backward: 1 for a single rounding, 0 for no rounding.
const GROUPS: [&[&[(&str, Run)]]; 8] = [
    activations::CASES,
    elementwise::CASES,
    places::CASES,
    rows::CASES,
    losses::CASES,
    attention::CASES,
    products::CASES,
    updates::CASES,
];

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let device = Device::open(args.device)?;
    let mut file = TensorFile::default();
    if args.graphs > 0 {
        graphs::trace(&device, &mut file, args.graphs, GRAPH_OPS)?;
        println!("{} expressions of {GRAPH_OPS} ops, on the {}", args.graphs, device.description().name);
        return file.write(&args.file);
    }
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build()?;
    for (name, formula) in declared::formulas() {
        file.note(name, formula);
    }
    let mut cases = declared::cases();
    cases.extend(
        GROUPS
            .iter()
            .flat_map(|group| group.iter().copied().flatten())
            .map(|&(name, run)| -> (String, RunRow) { (name.into(), Box::new(run)) }),
    );
    for (op, run) in &cases {
        for seed in SEEDS {
            arena.step(|step| {
                let (name, random) = (format!("{op}.{seed}"), Random::new(seed).into());
                run(&Case { step, name, seed, random, file: RefCell::new(&mut file) })
            })?;
        }
    }
    file.write(&args.file)?;
    println!("{} ops, {} shapes each, on the {}", cases.len(), SEEDS.end, device.description().name);
    Ok(())
}
