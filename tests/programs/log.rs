//! The output of `crossasset` on standard error without a terminal: lines, or JSON objects. The
//! program also runs when nothing reads it.
//!
//! Invariant: with `--log json` each line is one object, also when spans end and when the run
//! fails.

use crate::support::example::{SMALL, command, text};
use serde_json::Value;
use std::fs::File;
use std::process::Stdio;
use stepscope::{Device, DeviceKind};

/// Runs `crossasset` with arguments and this log level. Returns its success and its lines.
fn lines(arguments: &[&str], level: Option<&str>) -> (bool, Vec<String>) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let mut command = command("crossasset", &device, &[&SMALL[..], &["--out", out], arguments].concat());
    level.map(|level| command.env("RUST_LOG", level));
    let output = command.output().unwrap();
    (output.status.success(), text(&output.stderr).lines().map(str::to_owned).collect())
}

/// Runs it with `--log json`, and returns an object per line.
fn objects(arguments: &[&str], level: Option<&str>) -> (bool, Vec<Value>) {
    let (success, lines) = lines(&[&["--log", "json"], arguments].concat(), level);
    let parse = |line: &String| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in `{line}`"));
    (success, lines.iter().map(parse).collect())
}

#[test]
fn output_without_terminal_is_lines() {
    let (success, lines) = lines(&[], None);
    assert!(success && !lines.is_empty(), "{lines:?}");
    // On a busy machine, progress is reported before the end.
    let [progress @ .., line] = &lines[..] else { unreachable!() };
    let is_progress = |line: &String| line.starts_with("fold 0, epoch 0  ") && line.contains("/35 samples  step ");
    assert!(progress.iter().all(is_progress), "{progress:?}");
    assert!(line.starts_with("fold 0, epoch 0  35 samples in ") && line.ends_with(" samples/s"), "{line}");
    assert!(lines.iter().all(|line| !line.contains(['\r', '\x1b'])), "control characters in {lines:?}");
}

#[test]
fn json_reports_training() {
    let (success, objects) = objects(&[], None);
    let trained = objects.iter().find(|object| object["message"] == "trained").unwrap_or_else(|| panic!("{objects:?}"));
    assert!(success && trained["level"] == "INFO" && trained["epoch"] == "fold 0, epoch 0", "{trained}");
    assert_eq!(trained["done"], 35);
    for figure in ["seconds", "per_second", "loss"] {
        assert!(trained[figure].as_f64().is_some_and(|figure| figure > 0.0), "`{figure}` must be above 0 in {trained}");
    }
    let opened =
        objects.iter().find(|object| object["message"] == "arena ready").unwrap_or_else(|| panic!("{objects:?}"));
    assert_eq!(opened["capacity_bytes"], 1 << 30);
}

#[test]
fn json_reports_each_closed_span() {
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
fn json_reports_failure() {
    let (success, objects) = objects(&["--arena-mib", "100000000"], None);
    let last = objects.last().unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(!success && last["level"] == "ERROR" && message.contains("device memory refused"), "{last}");
}

/// The run continues to its report and checkpoint, whichever output is closed, abandoned by its
/// reader or full. The exit code reports a lost line that was requested.
#[cfg(target_os = "linux")]
#[test]
fn closed_outputs_do_not_stop_runs() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    // A pipe without a reader.
    let left = || Stdio::from(std::io::pipe().unwrap().1);
    for (number, (output, errors, code)) in [
        (left(), Stdio::piped(), 0),
        (full(), Stdio::piped(), 1),
        (Stdio::piped(), left(), 0),
        (Stdio::piped(), full(), 0),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = tempfile::tempdir().unwrap();
        let log = if number % 2 == 0 { "json" } else { "text" };
        let mut command = command("crossasset", &device, &[&SMALL[..], &["--log", log, "--out"]].concat());
        command.arg(folder.path()).env("RUST_LOG", "info").stdout(output).stderr(errors);
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{number}: {printed}");
        assert!(!printed.contains("panicked"), "{printed}");
        assert!(number != 1 || printed.contains("error: standard output: No space left"), "{printed}");
        for name in ["report.json", "model.safetensors"] {
            assert!(folder.path().join(name).exists(), "{number}: {name}");
        }
    }
    // Closed before the start: the shell's `>&-`.
    let folder = tempfile::tempdir().unwrap();
    let mut inner = command("crossasset", &device, &[&SMALL[..], &["--out"]].concat());
    inner.arg(folder.path());
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" >&- 2>&-"]).arg(inner.get_program()).args(inner.get_args());
    assert!(shell.status().unwrap().success());
    assert!(folder.path().join("report.json").exists());
}
