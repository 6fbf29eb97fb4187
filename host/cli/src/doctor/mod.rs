//! The doctor: examines a machine before a run. It reports good and bad findings, why each matters,
//! and how to fix it.
//!
//! ```text
//! stepscope doctor  # the host and, with feature cuda, the GPU under load for 3 s
//! stepscope doctor --json  # facts and findings, for programs
//! stepscope doctor --report FILE.tar.gz --add target/gb10
//! stepscope doctor --facts FILE.json  # judges facts recorded elsewhere
//! ```
//! Facts are gathered first, and then judged by functions that depend on nothing else. Each part of
//! the gathering has a deadline, so the program ends within a minute.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | nothing would stop training |
//! | 1 | a finding would stop training, or the report could not be written |
//! | 2 | the command line is wrong, or the facts could not be read |

mod facts;
mod findings;
mod report;

use self::facts::Facts;
use self::findings::{Finding, Level};
use clap::Parser;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};
use std::path::PathBuf;

/// Examines this machine: what is good, what is wrong, why it matters, and how to fix it
#[derive(Parser)]
#[command(name = "stepscope doctor")]
pub(crate) struct Args {
    /// Print facts and findings as JSON
    #[arg(long)]
    json: bool,

    /// Judge these recorded facts instead of this machine
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,

    /// Folder for checkpoints, whose disk is examined
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    checkpoints: PathBuf,

    /// Write the files for a problem report: a .tar.gz with facts, findings and /proc/meminfo
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Add these files and folders to the report
    #[arg(long, value_name = "PATH", requires = "report")]
    add: Vec<PathBuf>,
}

/// Examines the machine, and ends the process, even if a thread is stuck in a driver call.
pub(crate) fn main(args: &Args) -> ! {
    std::process::exit(run(args))
}

fn run(args: &Args) -> i32 {
    let facts = match &args.facts {
        None => Facts::gather(&args.checkpoints),
        Some(path) => match Facts::read(path) {
            Ok(facts) => facts,
            Err(error) => {
                eprintln!("error: {}: {error}", path.display());
                return 2;
            }
        },
    };
    let findings = findings::of(&facts);
    let stops = findings.iter().any(|finding| finding.level == Level::StopsTraining);
    let json = report::json(&facts, &findings);
    let shown = if args.json { json.clone() } else { text(&findings) };
    let mut failed = false;
    if let Err(error) = io::stdout().write_all(shown.as_bytes()).and_then(|()| io::stdout().flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("error: standard output: {error}");
        failed = true;
    }
    if let Some(path) = &args.report {
        match report::write(path, &json, &text(&findings), &args.add) {
            Ok(()) => eprintln!("report: {}", path.display()),
            Err(error) => {
                eprintln!("error: {}: {error}", path.display());
                failed = true;
            }
        }
    }
    i32::from(stops || failed)
}

/// Returns a line per finding, with reason and remedy unless all is well, and a summary.
fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { check, level, what, why, todo } in findings {
        let _ = writeln!(text, "{:<14} {check:<18} {what}", level.word());
        for (name, value) in [("why", *why), ("do", todo.as_str())] {
            if !value.is_empty() {
                let _ = writeln!(text, "{:15}{name}: {value}", "");
            }
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (stops, warnings) = (count(Level::StopsTraining), count(Level::Warning));
    let (well, skipped) = (count(Level::Well), count(Level::NotLookedAt));
    let _ = writeln!(text, "{stops} stop training, {warnings} warnings, {well} well, {skipped} not looked at");
    text
}
