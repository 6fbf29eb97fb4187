//! `cargo xtask COMMAND`: the checks of this repository. Without a command it lists them.
//!
//! `ci/setup` installs tools. Each check must first refuse a planted violation, here or in a test
//! of this package, and fails if a tool is missing.

mod all;
mod bundle;
mod contracts;
mod docs;
mod gb10;
mod generate;
mod hosts;
mod kernels;
mod lint;
mod names;
mod nightly;
mod pages;
mod peers;
mod pressure;
mod prose;
mod ptx_rules;
mod publish;
mod sanitize;
mod suite;
mod tools;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use tools::Outcome;

/// A command: its name, its function and what it does.
type Step = (&'static str, fn(&[String]) -> Outcome, &'static str);

const STEPS: &[Step] = &[
    ("all", all::all, "every check, or with --quick those of .ci/run"),
    ("lint", lint::lint, "formatting, prose, contracts and clippy"),
    ("prose", |_| prose::check_all(), "the rules of prose, in pages, comments, names and messages"),
    ("contracts", |_| contracts::check(Path::new("device/src")), "a reason for each kernel's contract"),
    ("test", suite::test, "every test; takes arguments of nextest"),
    ("docs", docs::docs, "rustdoc, links and paths, and the pages' commands; --quick: no commands"),
    ("long", suite::long, "the emulator's longest tests, release builds, faults of groups"),
    ("loom", suite::loom, "the driver thread under loom"),
    ("miri", nightly::miri, "the host's unsafe code under Miri; --quick: less of it"),
    ("fuzz", nightly::fuzz, "fuzz targets; takes seconds (60) and names"),
    ("ptx", kernels::ptx, "the kernels' PTX keeps its rules; takes architectures"),
    ("ptx-rules", kernels::rules, "the same for files: NVIDIA LIST FOLDER ARCH.."),
    ("rust-cuda", kernels::rust_cuda, "the kernels use only what rust-cuda has; --quick: no PTX"),
    ("oracle", peers::oracle, "ops and training against JAX and PyTorch; --quick: less, no PyTorch"),
    ("families", peers::families, "models against transformers; takes names of families"),
    ("publish", publish::publish, "all that must hold before a release; takes names of parts"),
    ("flake", hosts::flake, "flake.nix, against stand-ins"),
    ("generate", generate::generate, "rewrite generated data; takes names of parts"),
    ("pressure", pressure::pressure, "training under memory pressure; --quick: less"),
    ("gpu", bundle::pack, "pack what runs on a GPU machine"),
    ("gb10", gb10::gb10, "the first run on a machine with a GPU"),
    ("aarch64", suite::aarch64, "programs and tests for aarch64, under qemu; --quick: link only what runs"),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    let name = Path::new(&program).file_name().and_then(OsStr::to_str).unwrap_or_default();
    if name == "cargo" {
        eprintln!("{}", docs::cargo(&arguments));
        return ExitCode::FAILURE;
    }
    if let Some(outcome) = bundle::bundled(name, &arguments) {
        outcome.as_ref().inspect_err(|message| println!("{message}")).ok();
        return if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("ci/ is in the repository");
    let step = arguments.first().and_then(|name| STEPS.iter().find(|step| step.0 == name));
    let Some((name, function, _)) = step else {
        eprintln!("usage: cargo xtask COMMAND");
        STEPS.iter().for_each(|(name, _, what)| eprintln!("  {name:<12} {what}"));
        return ExitCode::from(2);
    };
    let (started, line) = (Instant::now(), arguments.join(" "));
    println!("ci: {line}: started");
    let outcome = tools::at(root, std::env::set_current_dir(root)).and_then(|()| function(&arguments[1..]));
    let seconds = started.elapsed().as_secs();
    if let Err(message) = outcome {
        println!("{message}\nci: {name}: FAILED after {seconds} s");
        return ExitCode::FAILURE;
    }
    println!("ci: {line}: passed in {seconds} s");
    ExitCode::SUCCESS
}
