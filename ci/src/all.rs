//! All checks, one after the other.

use std::process::Command;
use std::thread;
use std::time::Instant;

use crate::tools::{Outcome, output, run, say};

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
    let results = thread::scope(|scope| {
        let running: Vec<_> = concurrent.iter().map(|step| scope.spawn(|| Ended::of(step, output))).collect();
        let mut results = Vec::new();
        for step in steps {
            let ended = Ended::of(step, |command| run(command).map(|()| String::new()));
            println!("{}", ended.log);
            results.push(ended);
        }
        for thread in running {
            let ended = thread.join().expect("the thread of a check does not panic");
            println!("{}", ended.log);
            results.push(ended);
        }
        results
    });
    say("seconds and result of each check");
    println!("{}", results.iter().map(Ended::line).collect::<Vec<_>>().join("\n"));
    let failed: Vec<&str> = results.iter().filter(|ended| !ended.is_passed).map(|ended| ended.step).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// A check that has ended.
struct Ended {
    step: &'static str,
    is_passed: bool,
    seconds: u64,
    /// Messages that were not printed while it ran.
    log: String,
}

impl Ended {
    /// Runs a check in a process of its own.
    fn of(step: &'static str, end: impl FnOnce(&mut Command) -> Outcome<String>) -> Self {
        let started = Instant::now();
        // This file, even if a check has built another in its place.
        let mut command = Command::new("/proc/self/exe");
        // No debugger is used here, nothing is compiled twice, and incremental data costs a sixth
        // of the time.
        command.args(step.split(' ')).env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        let outcome = end(&mut command);
        let is_passed = outcome.is_ok();
        let (Ok(log) | Err(log)) = outcome;
        Self { step, is_passed, seconds: started.elapsed().as_secs(), log }
    }

    fn line(&self) -> String {
        format!("{:6} s  {}  {}", self.seconds, if self.is_passed { "passed" } else { "FAILED" }, self.step)
    }
}
