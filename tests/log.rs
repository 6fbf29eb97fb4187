//! What `crossasset` says on standard error when nobody sits before it: lines, or JSON objects.
//!
//! Invariant: with `--log json` each line is one object, also when spans end and when the run fails.

#![allow(dead_code, reason = "not every part of the shared support is used here")]

#[path = "support/example.rs"]
mod example;

use example::{SMALL, command, text};
use serde_json::Value;
use stepscope::{Device, DeviceKind};

/// Runs `crossasset` with arguments, listening as closely as `level` says; whether it succeeded, and its lines.
fn lines(arguments: &[&str], level: Option<&str>) -> (bool, Vec<String>) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let mut command = command("crossasset", &device, &[&SMALL[..], &["--out", out], arguments].concat());
    level.map(|level| command.env("RUST_LOG", level));
    let output = command.output().unwrap();
    (output.status.success(), text(&output.stderr).lines().map(str::to_owned).collect())
}

/// The same with `--log json`: an object a line.
fn objects(arguments: &[&str], level: Option<&str>) -> (bool, Vec<Value>) {
    let (success, lines) = lines(&[&["--log", "json"], arguments].concat(), level);
    let parse = |line: &String| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in `{line}`"));
    (success, lines.iter().map(parse).collect())
}

#[test]
fn without_a_terminal_there_are_lines() {
    let (success, lines) = lines(&[], None);
    assert!(success && lines.len() == 1, "{lines:?}");
    let [line] = &lines[..] else { unreachable!() };
    assert!(line.starts_with("fold 0, epoch 0  35 samples in ") && line.ends_with(" samples/s"), "{line}");
    assert!(!line.contains(['\r', '\x1b']), "control characters in {line:?}");
}

#[test]
fn json_tells_what_was_trained() {
    let (success, objects) = objects(&[], None);
    let trained = objects.iter().find(|object| object["message"] == "trained").unwrap_or_else(|| panic!("{objects:?}"));
    assert!(success && trained["level"] == "INFO" && trained["epoch"] == "fold 0, epoch 0", "{trained}");
    assert_eq!(trained["samples"], 35);
    for figure in ["seconds", "samples_per_second", "loss"] {
        assert!(trained[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure} in {trained}");
    }
    let opened =
        objects.iter().find(|object| object["message"] == "arena ready").unwrap_or_else(|| panic!("{objects:?}"));
    assert_eq!(opened["capacity_bytes"], 1 << 30);
}

#[test]
fn json_tells_each_span_as_it_ends() {
    let (success, objects) = objects(&["--capture", "off"], Some("stepscope=debug"));
    assert!(success);
    let ended = |name: &str| {
        let spans = objects.iter().filter(|object| object["message"] == "close" && object["span"]["name"] == name);
        spans.collect::<Vec<_>>()
    };
    for name in ["upload", "forward", "backward", "optimizer", "step"] {
        assert!(!ended(name).is_empty(), "no `{name}` in {objects:?}");
    }
    let step = ended("step")[0];
    assert!(step["span"]["bytes"].as_u64().is_some() && step["time.busy"].is_string(), "{step}");
}

#[test]
fn json_tells_why_a_run_failed() {
    let (success, objects) = objects(&["--arena-mib", "100000000"], None);
    let last = objects.last().unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(!success && last["level"] == "ERROR" && message.contains("of device memory refused"), "{last}");
}
