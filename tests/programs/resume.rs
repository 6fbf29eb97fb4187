//! The example, killed or interrupted in the middle and resumed, ends with the weights of an
//! undisturbed run.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stepscope::{Checkpoint, EpochProgress};

/// Three epochs of three updates.
const THREE_EPOCHS: [&str; 6] = ["--limit", "78", "--batch", "8", "--epochs", "3"];

/// Returns a command for the built example: next to the test programs, or at
/// `STEPSCOPE_CROSSASSET`.
fn crossasset(out: &Path, more: &[&str]) -> Command {
    let built = std::env::var_os("STEPSCOPE_CROSSASSET").map_or_else(
        || std::env::current_exe().unwrap().parent().unwrap().join("../examples/crossasset"),
        PathBuf::from,
    );
    let mut command = Command::new(&built);
    command.args(["--folds", "1", "--device", "emulated", "--out"]);
    command.arg(out).args(more).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn report(out: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap()
}

fn wait_for(checkpoint: &Path) {
    let start = Instant::now();
    while !checkpoint.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "no {}", checkpoint.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn killed_run_resumes_to_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let [straight, killed, resumed] = ["straight", "killed", "resumed"].map(|name| folder.path().join(name));
    assert!(crossasset(&straight, &THREE_EPOCHS).status().unwrap().success());

    let mut child = crossasset(&killed, &THREE_EPOCHS).spawn().unwrap();
    let checkpoint = killed.join("model.safetensors");
    wait_for(&checkpoint);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.join("report.json").exists(), "the killed run finished first");

    let checkpoint = checkpoint.to_str().unwrap().to_owned();
    assert!(
        crossasset(&resumed, &[&THREE_EPOCHS[..], &["--resume", &checkpoint]].concat()).status().unwrap().success()
    );
    let (straight, resumed_report) = (report(&straight), report(&resumed));
    assert_eq!(straight["weights_sha256"], resumed_report["weights_sha256"]);
    let losses = |report: &serde_json::Value| {
        let epochs = report["epochs"].as_array().unwrap();
        epochs.iter().map(|epoch| epoch["train_loss"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(losses(&straight), losses(&resumed_report), "the resumed run's report must contain all losses");

    // Other settings would make it another run.
    let other = crossasset(
        &folder.path().join("other"),
        &[&THREE_EPOCHS[..], &["--resume", &checkpoint, "--seed", "8"]].concat(),
    )
    .status()
    .unwrap();
    assert_eq!(other.code(), Some(1));
}

/// Ctrl-C ends the update, and the run writes a checkpoint within the epoch and prints its path.
/// Eager and captured runs resume from it to the same weights.
#[cfg(unix)]
#[test]
fn interrupted_run_resumes_to_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let straight = folder.path().join("straight");
    let small = ["--limit", "100", "--batch", "4", "--micro-batch", "2"];
    let run = |out: &Path, capture: &str, more: &[&str]| {
        let mut command = crossasset(out, &[&small[..], &["--capture", capture], more].concat());
        command.stdout(Stdio::piped());
        command
    };
    assert!(run(&straight, "off", &[]).status().unwrap().success());
    for (capture, resumed_as) in [("on", "off"), ("off", "on")] {
        let [interrupted, resumed] =
            ["interrupted", "resumed"].map(|name| folder.path().join(format!("{name}-{capture}")));
        let child = run(&interrupted, capture, &["--checkpoint-every", "2"]).spawn().unwrap();
        let checkpoint = interrupted.join("model.safetensors");
        wait_for(&checkpoint);
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "the run must stop before its end");
        let screen = String::from_utf8(output.stdout).unwrap();
        let expected = format!("stopped; continue with --resume {}", checkpoint.display());
        assert_eq!(screen.lines().last(), Some(&*expected), "{screen}");
        assert!(!interrupted.join("report.json").exists());
        let progress = EpochProgress::of(&Checkpoint::load(&checkpoint).unwrap()).unwrap();
        assert!((3..9).contains(&progress.updates), "in the middle of an epoch of 9 updates: {progress:?}");

        let output = run(&resumed, resumed_as, &["--resume", checkpoint.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success());
        let (straight, resumed) = (report(&straight), report(&resumed));
        assert_eq!(straight["weights_sha256"], resumed["weights_sha256"], "interrupted with --capture {capture}");
        assert_eq!(straight["batches"], resumed["batches"]);
        for (straight, resumed) in
            straight["epochs"].as_array().unwrap().iter().zip(resumed["epochs"].as_array().unwrap())
        {
            assert_eq!(
                straight["train_loss"], resumed["train_loss"],
                "the resumed run's report must contain all losses"
            );
            assert_eq!(straight["valid_loss"], resumed["valid_loss"]);
        }
    }
}
