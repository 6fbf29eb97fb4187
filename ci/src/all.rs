//! All checks, one after the other.

use std::fs::File;
use std::process::{Child, Command};
use std::time::Instant;

use crate::tools::{Outcome, at, read, say, scratch};

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

/// Runs all checks, or with `--quick` those of `.ci/run`. A failure does not keep the others from
/// running. Ends with the seconds and the result of each.
pub(crate) fn all(arguments: &[String]) -> Outcome {
    let (steps, concurrent): (&[&'static str], &[&'static str]) = match arguments {
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
    let mut results = Vec::new();
    for step in steps {
        results.push(Running::start(step, |command| command)?.end());
    }
    for (process, log) in running {
        results.push(process.end());
        println!("{}", read(&log)?);
    }
    say("seconds and result of each check");
    println!("{}", results.iter().map(Ended::line).collect::<Vec<_>>().join("\n"));
    let failed: Vec<&str> = results.iter().filter(|ended| !ended.is_passed).map(|ended| ended.step).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// A check that runs in a process of its own, which ends with this value.
struct Running {
    step: &'static str,
    process: Child,
    started: Instant,
}

/// A check that has ended.
struct Ended {
    step: &'static str,
    is_passed: bool,
    seconds: u64,
}

impl Ended {
    fn line(&self) -> String {
        format!("{:6} s  {}  {}", self.seconds, if self.is_passed { "passed" } else { "FAILED" }, self.step)
    }
}

impl Running {
    fn start(step: &'static str, set: impl FnOnce(&mut Command) -> &mut Command) -> Outcome<Self> {
        // This file, even if a check has built another in its place.
        let program = "/proc/self/exe";
        // No debugger is used here, nothing is compiled twice, and incremental data costs a sixth
        // of the time.
        let mut command = Command::new(program);
        command.args(step.split(' ')).env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        Ok(Self { step, process: at(step, set(&mut command).spawn())?, started: Instant::now() })
    }

    fn end(mut self) -> Ended {
        let is_passed = self.process.wait().is_ok_and(|status| status.success());
        Ended { step: self.step, is_passed, seconds: self.started.elapsed().as_secs() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.process.kill();
    }
}
