//! The example, killed in the middle and resumed, ends with the weights of a run that was never disturbed.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The built example: beside the test programs, or where `STEPSCOPE_CROSSASSET` says.
fn crossasset(out: &Path, more: &[&str]) -> Command {
    let built = std::env::var_os("STEPSCOPE_CROSSASSET").map_or_else(
        || std::env::current_exe().unwrap().parent().unwrap().join("../examples/crossasset"),
        PathBuf::from,
    );
    let mut command = Command::new(&built);
    command.args(["--limit", "160", "--batch", "32", "--folds", "1", "--epochs", "3", "--device", "emulated", "--out"]);
    command.arg(out).args(more).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn report(out: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap()
}

#[test]
fn a_killed_run_goes_on_to_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let [straight, killed, resumed] = ["straight", "killed", "resumed"].map(|name| folder.path().join(name));
    assert!(crossasset(&straight, &[]).status().unwrap().success());

    let mut child = crossasset(&killed, &[]).spawn().unwrap();
    let (checkpoint, start) = (killed.join("model.safetensors"), Instant::now());
    while !checkpoint.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint after the first epoch");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.join("report.json").exists(), "it was killed before its end");

    let checkpoint = checkpoint.to_str().unwrap().to_owned();
    assert!(crossasset(&resumed, &["--resume", &checkpoint]).status().unwrap().success());
    let (straight, resumed_report) = (report(&straight), report(&resumed));
    assert_eq!(straight["weights_sha256"], resumed_report["weights_sha256"]);
    let losses = |report: &serde_json::Value| {
        let epochs = report["epochs"].as_array().unwrap();
        epochs.iter().map(|epoch| epoch["train_loss"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(losses(&straight), losses(&resumed_report), "the report is whole");

    // With other settings it would be another run.
    let other = crossasset(&folder.path().join("other"), &["--resume", &checkpoint, "--seed", "8"]).status().unwrap();
    assert_eq!(other.code(), Some(1));
}
