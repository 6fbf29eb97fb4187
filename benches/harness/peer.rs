//! The peer of a bench: a program in `benches/peers/`, run as its child and so in the same run.
//!
//! It prints one JSON value per line, so measurements before a failure are kept. Some peers measure
//! a case when they read it, so that both sides measure it one after the other.

use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

/// A peer.
#[derive(Debug)]
pub(crate) struct Peer {
    path: String,
    running: Option<Running>,
    failed: Option<String>,
}

/// The process of a peer.
#[derive(Debug)]
struct Running {
    child: Child,
    requests: ChildStdin,
    lines: BufReader<ChildStdout>,
    errors: JoinHandle<String>,
}

impl Peer {
    /// Starts `benches/peers/PROGRAM` with `arguments`.
    pub(crate) fn start(program: &str, arguments: &[String]) -> Self {
        Self::of("python3", &format!("benches/peers/{program}"), arguments)
    }

    /// Starts `program`, which an interpreter runs, with `arguments`.
    pub(crate) fn of(interpreter: &str, program: &str, arguments: &[String]) -> Self {
        let mut command = Command::new(interpreter);
        command.arg(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (running, failed) = match command.spawn() {
            Ok(child) => (Some(Running::new(child)), None),
            Err(error) => (None, Some(format!("{interpreter} cannot run: {error}"))),
        };
        Self { path: program.to_owned(), running, failed }
    }

    /// Returns the next line, or none at the peer's end.
    pub(crate) fn line<T: DeserializeOwned>(&mut self) -> Option<T> {
        let running = self.running.as_mut()?;
        let mut line = String::new();
        match running.lines.read_line(&mut line) {
            Ok(0) => {}
            Ok(_) => match serde_json::from_str(&line) {
                Ok(value) => return Some(value),
                Err(error) => self.failed = Some(format!("{} printed `{}`: {error}", self.path, line.trim_end())),
            },
            Err(error) => self.failed = Some(format!("{}: {error}", self.path)),
        }
        // The error of a failed program explains more than its unfinished line.
        let failed = self.running.take()?.end();
        self.failed = failed.map(|reason| format!("{}: {reason}", self.path)).or(self.failed.take());
        None
    }

    /// Sends `case` and returns the line that answers it, or none if the peer ended.
    pub(crate) fn ask<T: DeserializeOwned>(&mut self, case: &str) -> Option<T> {
        // A peer that ended cannot read; why it did is known when its answer is read.
        let _ = writeln!(self.running.as_mut()?.requests, "{case}");
        self.line()
    }

    /// Returns the remaining lines, and the reason if they are incomplete.
    pub(crate) fn rest<T: DeserializeOwned>(mut self) -> (Vec<T>, Option<String>) {
        let lines = std::iter::from_fn(|| self.line()).collect();
        (lines, self.failed)
    }

    /// Returns the reason why the peer ended early or did not start.
    pub(crate) fn failed(&self) -> Option<&str> {
        self.failed.as_deref()
    }
}

impl Running {
    fn new(mut child: Child) -> Self {
        let (requests, lines) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut errors = child.stderr.take().expect("piped");
        // Read at once, because a full pipe would block the peer.
        let errors = std::thread::spawn(move || {
            let mut message = Vec::new();
            let _ = errors.read_to_end(&mut message);
            String::from_utf8_lossy(&message).into_owned()
        });
        Self { child, requests, lines: BufReader::new(lines), errors }
    }

    /// Waits for the end, and returns the reason of a failure.
    fn end(self) -> Option<String> {
        let Self { mut child, requests, lines, errors } = self;
        drop((requests, lines));
        let status = match child.wait() {
            Ok(status) if status.success() => return None,
            Ok(status) => status,
            Err(error) => return Some(error.to_string()),
        };
        let message = errors.join().unwrap_or_default();
        let last = message.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
        Some(format!("{status}: {last}"))
    }
}
