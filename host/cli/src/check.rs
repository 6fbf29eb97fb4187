//! Runs every kernel on seeded inputs and compares digests of the results with the committed ones.
//!
//! ```text
//! stepscope check  # a GPU if there is one, otherwise the emulator on this CPU
//! stepscope check --plant add  # shows that one wrong bit is detected
//! stepscope check --update  # after a change of a kernel or a case
//! stepscope check --self-test  # the cost of a device's self-test
//! stepscope check --rule  # only the rule of the matrix instructions
//! stepscope check --list  # the kernels and their blocks
//! ```
//! Prints a line per kernel, forward and backward. It contains the name, the first 16 digits of the
//! SHA-256 of the results, and whether they match the committed digest. The digest of all results
//! follows. NaNs count as equal. The device is opened without its self-test, which would be
//! redundant here. Before the kernels it prints the rule by which the device's matrix instructions
//! add, and whether it is the emulator's ([`matrix_rule`]).
//!
//! Exit code 0: all are equal (with `--update`: written; with `--rule`: a rule fits). 1: one
//! differs, or the device failed. 2: the command line is wrong.

use clap::Parser;
use clap::builder::PossibleValuesParser;
use std::collections::HashMap;
use std::process::ExitCode;
use std::time::Instant;
use stepscope::check::matrix_rule::{self, Factors, Found};
use stepscope::check::same_bits::{self, CaseSize, cases, compare, remembered, runs_on};
use stepscope::device::{DeviceBuilder, MatrixInstruction, SelfTest};
use stepscope::{Device, DeviceKind, Result};

/// Compares the bits of every kernel's results with the committed ones
#[derive(Parser)]
#[command(name = "stepscope check")]
pub(crate) struct Args {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,

    /// Instruction of the device, whose kernels are checked [default: the fastest that it has]
    #[arg(long, value_name = "mma-sync|wgmma")]
    matrix_instruction: Option<MatrixInstruction>,

    /// Run each case in its smallest size, as the self-test on opening a device does
    #[arg(long)]
    smallest: bool,

    /// Change the last bit of one result of this kernel
    #[arg(long, value_name = "KERNEL", hide_possible_values = true,
        value_parser = PossibleValuesParser::new(cases().into_iter().map(|(name, _)| name)))]
    plant: Option<String>,

    /// Write the digests of both sizes to the source folder and show what changed
    #[arg(long, conflicts_with_all = ["plant", "smallest"])]
    update: bool,

    /// Time the self-test on opening a device, and openings with and without it
    #[arg(long, conflicts_with_all = ["plant", "smallest", "update"])]
    self_test: bool,

    /// Print only the rule by which the device's matrix instructions add
    #[arg(long, conflicts_with_all = ["plant", "smallest", "update", "self_test"])]
    rule: bool,

    /// Print only the kernels that run on a GPU: the name, the threads and dynamic shared bytes of
    /// a block, and `sm_90a` if only its PTX contains the kernel
    #[arg(long, exclusive = true)]
    list: bool,
}

/// The file of the committed digests.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../check/src/same_bits/golden.txt");

/// Runs the kernels, and returns the exit code.
pub(crate) fn main(args: &Args) -> ExitCode {
    if args.list {
        list();
        return ExitCode::SUCCESS;
    }
    match if args.self_test { time(args).map(|()| true).map_err(Into::into) } else { run(args) } {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line per kernel, which `cargo xtask ptx` reads.
fn list() {
    let entries: HashMap<_, _> = stepscope::kernel::entries().map(|entry| (entry.name, entry)).collect();
    for (name, _) in cases() {
        let entry = entries[name];
        let arch = if entry.is_warpgroup { " sm_90a" } else { "" };
        println!("{name} {} {}{arch}", entry.block, entry.shared_bytes);
    }
}

fn open(args: &Args, when: SelfTest) -> Result<Device> {
    let builder = Device::builder(args.device).self_test(when);
    args.matrix_instruction.into_iter().fold(builder, DeviceBuilder::matrix_instruction).open()
}

/// Returns true if all digests are equal or written.
fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let device = open(args, SelfTest::Never)?;
    let (description, count) =
        (device.description(), cases().iter().filter(|(name, _)| runs_on(&device, name)).count());
    println!("{}, {count} kernels, multiplies by {}", description.name, description.matrix_instruction());
    if args.update {
        let [(_, whole), (_, smallest)] =
            [digests(&device, CaseSize::Whole, args)?, digests(&device, CaseSize::Smallest, args)?];
        stepscope::files::replace_file(GOLDEN, same_bits::to_commit(&whole, &smallest).as_bytes())?;
        println!("written to {GOLDEN}");
        return Ok(true);
    }
    let rules = rules(&device)?;
    if args.rule {
        return Ok(rules.iter().all(|found| found.rule.is_some()));
    }
    Ok(rules.iter().all(|found| found.different == 0)
        & digests(&device, if args.smallest { CaseSize::Smallest } else { CaseSize::Whole }, args)?.0)
}

/// Finds and prints the rule of the device's matrix instructions for each format.
fn rules(device: &Device) -> Result<[Found; 2]> {
    let [bf16, tf32] = Factors::ALL.map(|factors| matrix_rule::check(device, factors));
    let rules = [bf16?, tf32?];
    rules.iter().for_each(|found| println!("{found}"));
    Ok(rules)
}

/// Returns true if the digests of every kernel at this size are the committed ones, and their text.
fn digests(device: &Device, form: CaseSize, args: &Args) -> Result<(bool, String)> {
    let start = Instant::now();
    let mut found = String::new();
    for (name, case) in cases().into_iter().filter(|(name, _)| runs_on(device, name)) {
        let mut results = same_bits::run(device, &case, form)?;
        if args.plant.as_deref() == Some(name) {
            results[0][0] ^= 1;
        }
        found += &same_bits::line(name, &results);
    }
    let seconds = start.elapsed().as_secs_f64();
    let verdicts = compare(&found, form.golden());
    let verdicts: Vec<_> = verdicts.into_iter().filter(|verdict| runs_on(device, verdict.name)).collect();
    verdicts.iter().filter(|verdict| !(args.update && verdict.equal())).for_each(|verdict| println!("{verdict}"));
    let different = verdicts.iter().filter(|verdict| !verdict.equal()).count();
    println!("{:<24} {}", "all", same_bits::of_all(&found));
    eprintln!("in {seconds:.2} s");
    match different {
        0 => println!("all equal"),
        count => println!("{count} DIFFERENT"),
    }
    Ok((different == 0, found))
}

/// Prints the cost of the self-test. It reads and writes the cache as any program does.
fn time(args: &Args) -> Result<()> {
    // The first opening of a process also loads the driver.
    let known = |device: &Device| remembered(device).map_or("no".into(), |path| path.display().to_string());
    let device = open(args, SelfTest::Never)?;
    println!("{}: remembered before: {}", device.description().name, known(&device));
    drop(device);
    for (name, when) in [
        ("never", SelfTest::Never),
        ("new", SelfTest::WhenNew),
        ("new", SelfTest::WhenNew),
        ("always", SelfTest::Always),
    ] {
        let start = Instant::now();
        let device = open(args, when)?;
        println!("{:7.3} s  opened with STEPSCOPE_SELF_TEST={name}", start.elapsed().as_secs_f64());
        drop(device);
    }
    let device = open(args, SelfTest::Never)?;
    for time in ["first", "second"] {
        let tested = device.self_test()?;
        println!("{:7.3} s  {time} self-test of {} kernels", tested.elapsed.as_secs_f64(), tested.kernels);
    }
    println!("remembered after: {}", known(&device));
    Ok(())
}
