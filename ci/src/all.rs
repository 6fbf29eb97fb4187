//! All checks, one after the other.

use std::fs::File;
use std::process::{Child, Command};

use crate::tools::{Outcome, at, read, scratch};

/// The checks before a release, in order.
pub(crate) const FULL: &[&str] = &[
    "flake",
    "lint",
    "test",
    "docs",
    "oracle",
    "rust-cuda",
    "pressure",
    "publish",
    "long",
    "loom",
    "miri",
    "ptx",
    "fuzz",
    "aarch64",
    "gpu",
];
/// The checks before each change: a short form of each slow one.
const QUICK: &[&str] = &["lint", "test", "docs --quick", "oracle --quick", "pressure --quick", "publish contents"];
/// Checks that mostly download, and so run concurrently with the quick ones.
const CONCURRENT: &[&str] = &["flake", "rust-cuda --quick"];

/// Runs all checks, or with `--quick` those of `.ci/run`. Stops at the first failure.
pub(crate) fn all(arguments: &[String]) -> Outcome {
    let (steps, concurrent): (&[&str], &[&str]) = match arguments {
        [] => (FULL, &[]),
        [quick] if quick == "--quick" => (QUICK, CONCURRENT),
        _ => return Err("usage: ci/all [--quick]".to_owned()),
    };
    let logs = scratch()?;
    let mut running = Vec::new();
    for (step, number) in concurrent.iter().zip(0..) {
        let log = logs.path().join(format!("{number}"));
        let file = at(&log, File::create(&log))?;
        let errors = at(&log, file.try_clone())?;
        running.push((Running::start(step, |command| command.stdout(file).stderr(errors))?, log));
    }
    for step in steps {
        Running::start(step, |command| command)?.end()?;
    }
    for (process, log) in running {
        let outcome = process.end();
        println!("{}", read(&log)?);
        outcome?;
    }
    Ok(())
}

/// A check that runs in a process of its own, which ends with this value.
struct Running(Child);

impl Running {
    fn start(step: &str, set: impl FnOnce(&mut Command) -> &mut Command) -> Outcome<Self> {
        let program = at(".", std::env::current_exe())?;
        // No debugger is used here, nothing is compiled twice, and incremental data costs a sixth
        // of the time.
        let mut command = Command::new(program);
        command.args(step.split(' ')).env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        Ok(Self(at(step, set(&mut command).spawn())?))
    }

    fn end(mut self) -> Outcome {
        let status = at("a check", self.0.wait())?;
        if status.success() { Ok(()) } else { Err(format!("a check failed: {status}")) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
    }
}
