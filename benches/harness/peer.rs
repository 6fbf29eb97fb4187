//! The peer of a bench: a Python program in `benches/peers/`, run as its child and so in the same
//! run.
//!
//! It prints one JSON value per line, so measurements before a failure are kept.

use serde::de::DeserializeOwned;
use std::process::Command;

/// The measurements of a peer, and the reason if they are incomplete.
#[derive(Debug)]
pub(crate) struct Peer<T> {
    /// Its lines.
    pub(crate) lines: Vec<T>,
    /// The reason why it ended early or did not start.
    pub(crate) failed: Option<String>,
}

impl<T: DeserializeOwned> Peer<T> {
    /// Runs `benches/peers/PROGRAM` with `arguments` to its end.
    pub(crate) fn run(program: &str, arguments: &[String]) -> Self {
        let path = format!("benches/peers/{program}");
        let mut peer = Self { lines: Vec::new(), failed: None };
        let output = match Command::new("python3").arg(&path).args(arguments).output() {
            Ok(output) => output,
            Err(error) => {
                peer.failed = Some(format!("python3 cannot run: {error}"));
                return peer;
            }
        };
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            match serde_json::from_str(line) {
                Ok(line) => peer.lines.push(line),
                Err(error) => {
                    peer.failed = Some(format!("{path} printed `{line}`: {error}"));
                    break;
                }
            }
        }
        // The error of a failed program explains more than its unfinished line.
        if !output.status.success() {
            let told = String::from_utf8_lossy(&output.stderr);
            let last = told.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
            peer.failed = Some(format!("{path}: {}: {last}", output.status));
        }
        peer
    }
}
