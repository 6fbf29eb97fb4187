//! `cargo xtask COMMAND`: the checks of this repository. Without a command it lists them.
//!
//! `ci/setup` installs tools. Each check must first refuse a planted violation, here or in a test
//! of this package, and fails if a tool is missing.

#![allow(dead_code)]
mod contracts;
mod prose;
mod tools;

use std::path::Path;
use std::process::ExitCode;

use tools::{Outcome, Tools};

/// A command: its name, its function and what it does.
type Step = (&'static str, fn(&[String]) -> Outcome, &'static str);

const STEPS: &[Step] = &[
    ("prose", |_| prose(), "the rules of prose, in pages and comments"),
    ("contracts", |_| contracts::check(Path::new("device/src/kernels")), "a reason for each kernel's contract"),
];

/// Checks all pages and Rust files but docs/lab, which keeps notes as they were written.
fn prose() -> Outcome {
    let tools = Tools::install(&[])?;
    let files = tools.output("git ls-files *.md *.rs")?;
    let files: Vec<String> = files.lines().filter(|file| !file.starts_with("docs/lab/")).map(str::to_owned).collect();
    prose::check(&files)?;
    println!("{} files", files.len());
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("ci/ is in the repository");
    let step = arguments.first().and_then(|name| STEPS.iter().find(|step| step.0 == name));
    let Some((name, function, _)) = step else {
        eprintln!("usage: cargo xtask COMMAND");
        STEPS.iter().for_each(|(name, _, what)| eprintln!("  {name:<12} {what}"));
        return ExitCode::from(2);
    };
    let outcome = tools::at(root, std::env::set_current_dir(root)).and_then(|()| function(&arguments[1..]));
    if let Err(message) = outcome {
        eprintln!("{message}\ncargo xtask {name}: FAILED");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
