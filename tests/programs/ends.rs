//! Resuming: however a run of the example ends, `--resume` continues to the weights of an
//! undisturbed run. The run leaves only a checkpoint in its folder.

#![cfg(unix)]
#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::example::{command, text};
use crate::support::forged::forge;
use serde_json::json;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use stepscope::{Checkpoint, DeviceKind};
use tempfile::TempDir;

/// Three epochs of three updates, the last with fewer samples, and a checkpoint after each update
/// and each epoch. The samples are few, because these tests are about the ends of runs.
const SMALL: [&str; 12] =
    ["--limit", "20", "--horizon", "2", "--batch", "3", "--folds", "1", "--epochs", "3", "--checkpoint-every", "1"];
/// The files that a run leaves.
const RESULTS: [&str; 2] = ["model.safetensors", "report.json"];

/// The folder of a run.
struct Run {
    _folder: TempDir,
    out: PathBuf,
}

impl Run {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        Self { _folder: folder, out }
    }

    fn checkpoint(&self) -> PathBuf {
        self.out.join("model.safetensors")
    }

    /// Returns the example's command, which resumes from the folder's checkpoint if there is one.
    fn command(&self, more: &[&str]) -> Command {
        let mut command = command("crossasset", &crate::support::open(DeviceKind::Emulated), &SMALL);
        command.arg("--out").arg(&self.out).args(more).stdin(Stdio::null());
        if self.checkpoint().exists() {
            command.arg("--resume").arg(self.checkpoint());
        }
        command
    }

    fn spawn(&self) -> Child {
        self.command(&[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Starts a run and waits for its first checkpoint.
    fn running(&self) -> Child {
        let (child, start) = (self.spawn(), Instant::now());
        while !self.checkpoint().exists() {
            assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint was written in time");
            sleep(Duration::from_millis(2));
        }
        child
    }

    /// Runs to the end.
    #[track_caller]
    fn finish(&self) {
        let output = self.command(&[]).output().unwrap();
        assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    }

    fn names(&self) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(&self.out).unwrap().map(name).collect();
        names.sort();
        names
    }

    /// Returns the digest of the final weights, and checks that the folder holds only the results.
    #[track_caller]
    fn digest(&self) -> String {
        assert_eq!(self.names(), RESULTS);
        let report: serde_json::Value =
            serde_json::from_slice(&fs::read(self.out.join("report.json")).unwrap()).unwrap();
        report["weights_sha256"].as_str().unwrap().to_owned()
    }
}

/// Checks that the exit code is 1, and returns the last message.
#[track_caller]
fn failed(output: &Output) -> String {
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(!printed.contains("panicked"), "{printed}");
    printed.lines().skip_while(|line| !line.starts_with("error: ")).collect::<Vec<_>>().join("\n")
}

/// Returns how many runs a test ends at random moments: `STEPSCOPE_KILLS`, or `usual`.
fn ends(usual: usize) -> usize {
    let Some(number) = std::env::var_os("STEPSCOPE_KILLS") else { return usual };
    number.to_str().and_then(|number| number.parse().ok()).expect("STEPSCOPE_KILLS is a number")
}

/// Ends runs by these signals at random moments, this many in all. Each run resumes where the last
/// one ended, until one finishes.
fn ended_at_random(ends: usize, signals: &[&str]) {
    let (straight, start) = (Run::new(), Instant::now());
    straight.finish();
    let (expected, took) = (straight.digest(), start.elapsed());
    let mut random = Random::new(ends as u64);
    let (mut ended, mut resumed, mut left, mut finished) = (0, 0, 0, 0);
    while ended < ends {
        let run = Run::new();
        loop {
            resumed += usize::from(run.checkpoint().exists());
            let child = run.spawn();
            if ended < ends {
                sleep(took.mul_f32(random.unit()));
                let signal = signals[random.below(signals.len() as u32) as usize];
                // It may have ended by itself.
                Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
            }
            let Output { status, stderr, .. } = child.wait_with_output().unwrap();
            if status.success() {
                break;
            }
            // Either the signal ended it, before the program had installed its handler, or it wrote
            // a checkpoint.
            let by_signal = status.signal().is_some();
            assert!(by_signal || status.code() == Some(130), "{status}: {}", text(&stderr));
            ended += 1;
            if run.out.exists() {
                let names = run.names();
                left += usize::from(names.iter().any(|name| name.ends_with("-tmp")));
                // Before the first update there is no checkpoint.
                let expected = [".stepscope-lock", "model.safetensors"];
                assert!(by_signal || names.iter().all(|name| expected.contains(&name.as_str())), "{names:?}");
            }
        }
        assert_eq!(run.digest(), expected, "after {ended} ends the digest differs");
        finished += 1;
    }
    println!(
        "{ended} ends by {signals:?}: {resumed} resumed, {left} left temporary files, {finished} finished with the same weights"
    );
    assert!(ends < 50 || resumed > 0, "no run reached its first checkpoint");
}

#[test]
#[cfg(target_os = "linux")]
fn memory_shortage_exits_with_75() {
    let (straight, run) = (Run::new(), Run::new());
    straight.finish();
    // Before any update, and after the first.
    for _ in 0..2 {
        let output = run.command(&["--memory-floor-mib", "4294967295"]).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(75), "{printed}");
        assert!(printed.contains("error: the host has") && printed.contains("less than the floor of"), "{printed}");
        assert_eq!(run.names(), ["model.safetensors"]);
        let mut child = run.spawn();
        let (start, before) = (Instant::now(), fs::metadata(run.checkpoint()).unwrap().modified().unwrap());
        while fs::metadata(run.checkpoint()).unwrap().modified().unwrap() == before {
            assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint was written in time");
            sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    run.finish();
    assert_eq!(run.digest(), straight.digest());
}

#[test]
fn killed_runs_resume_to_same_weights() {
    ended_at_random(ends(3), &["-KILL"]);
}

#[test]
fn signalled_runs_resume_to_same_weights() {
    ended_at_random(ends(15) / 5, &["-TERM", "-HUP", "-INT"]);
}

/// Sends each signal after its handler is installed: the run writes a checkpoint within the epoch,
/// and exits with the code of Ctrl-C.
#[test]
fn each_signal_saves_and_ends_run() {
    for signal in ["-TERM", "-HUP", "-INT"] {
        let run = Run::new();
        let child = run.running();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{signal}: {}", text(&output.stderr));
        assert_eq!(run.names(), ["model.safetensors"], "{signal}");
        Checkpoint::load(run.checkpoint()).unwrap();
    }
}

/// Starts a program as `nohup` does: it must survive the loss of its terminal.
#[test]
fn ignored_hangup_ends_nothing() {
    let run = Run::new();
    let inner = run.command(&[]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(inner.get_program()).args(inner.get_args());
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !run.checkpoint().exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint was written in time");
        sleep(Duration::from_millis(2));
    }
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
}

#[test]
fn second_run_in_folder_is_refused() {
    let run = Run::new();
    let first = run.running();
    let second = failed(&run.command(&[]).output().unwrap());
    let expected = format!("error: {}: another run (process {}) writes here", run.out.display(), first.id());
    assert!(second.starts_with(&expected), "{second}");
    let output = first.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(run.names(), RESULTS);
}

/// Simulates a full disk: a file may not grow beyond a megabyte, and a checkpoint has 26.
#[test]
fn full_disk_keeps_old_checkpoint() {
    let run = Run::new();
    let child = run.running();
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    child.wait_with_output().unwrap();
    let before = fs::read(run.checkpoint()).unwrap();
    let inner = run.command(&[]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 2000; exec \"$0\" \"$@\""]).arg(inner.get_program());
    let error = failed(&command.args(inner.get_args()).output().unwrap());
    assert!(error.starts_with(&format!("error: {}: ", run.checkpoint().display())), "{error}");
    assert_eq!((run.names(), fs::read(run.checkpoint()).unwrap() == before), (vec!["model.safetensors".into()], true));
}

#[test]
fn moved_folder_is_an_error() {
    let run = Run::new();
    let child = run.running();
    let moved = run.out.with_file_name("moved");
    fs::rename(&run.out, &moved).unwrap();
    let error = failed(&child.wait_with_output().unwrap());
    assert!(error.starts_with(&format!("error: {}", run.out.display())), "{error}");
    assert!(!run.out.exists());
    Checkpoint::load(moved.join("model.safetensors")).unwrap();
}

/// Writes a file of valid bars, one a minute, whose prices begin here.
fn bars(path: &Path, first: u32) {
    let mut text = "timestamp,open,high,low,close,volume\n".to_owned();
    for minute in 0..9_000 {
        let price = first + minute * 7 % 31;
        text += &format!("{},{price},{},{},{price},1\n", 1_677_628_800 + 60 * minute, price + 1, price - 1);
    }
    fs::write(path, text).unwrap();
}

/// Other numbers, another order, another setting: each is refused, and the error has both digests.
#[test]
fn other_bars_are_refused() {
    let run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a.csv", "b.csv", "c.csv"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    bars(Path::new(&a), 100);
    bars(Path::new(&b), 200);
    // Only the last bar differs.
    let other = fs::read_to_string(&b).unwrap();
    let (start, last) = other.trim_end().rsplit_once('\n').unwrap();
    fs::write(&c, format!("{start}\n{}\n", last.replace(",1", ",2"))).unwrap();
    let with = |files: [&str; 2], more: &[&str]| {
        let files = files.iter().flat_map(|file| ["--bars", file]);
        run.command(&[&files.collect::<Vec<_>>()[..], more].concat()).output().unwrap()
    };
    let first = with([&a, &b], &[]);
    assert!(first.status.success(), "{}", text(&first.stderr));
    let before = fs::read(run.checkpoint()).unwrap();
    for (files, more, same) in
        [([&a, &c], &[][..], false), ([&b, &a], &[], false), ([&a, &a], &[], false), ([&a, &b], &["--clip", "9"], true)]
    {
        let error = failed(&with(files.map(String::as_str), more));
        assert!(error.contains("was made with other settings:") && error.contains("without --resume"), "{error}");
        let line = |name: &str| error.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::to_owned);
        if same {
            assert_eq!(line("clip: ").unwrap(), "1e0 in the checkpoint, 9e0 here");
            assert_eq!(line("bars: "), None, "{error}");
            continue;
        }
        let bars = line("bars: ").unwrap();
        let (theirs, ours) = bars.split_once(" in the checkpoint, ").unwrap();
        let ours = ours.strip_suffix(" here").unwrap();
        assert!(theirs.len() == 64 && ours.len() == 64 && theirs != ours, "{error}");
    }
    assert_eq!(fs::read(run.checkpoint()).unwrap(), before);
    // Equal bars by another name.
    let moved = folder.path().join("moved.csv").to_str().unwrap().to_owned();
    fs::rename(&a, &moved).unwrap();
    assert!(with([&moved, &b], &[]).status.success());
}

/// Complete checkpoints with a position that no run reaches. Each is refused in few words, without
/// a panic or an endless loop.
#[test]
fn impossible_positions_are_refused() {
    let run = Run::new();
    let child = run.running();
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    child.wait_with_output().unwrap();
    let before = fs::read(run.checkpoint()).unwrap();
    let most = u64::MAX;
    let half = u64::MAX / 2;
    let epoch = |number: usize| {
        json!({ "fold": 0, "epoch": number, "train_loss": 1, "valid_loss": 1, "valid_accuracy": 1, "baseline_accuracy": 1,
            "seconds": 1, "samples_per_second": 1 })
    };
    let position = |numbers: &[usize]| {
        let epochs: Vec<_> = numbers.iter().map(|&number| epoch(number)).collect();
        json!({ "epochs": epochs, "batches": [] }).to_string()
    };
    // A valid position after one update of three samples, and invalid variants of it.
    let sound = [
        ("stepscope.epoch", "1 3 0"),
        ("stepscope.updates", "1"),
        ("crossasset.position", r#"{"epochs":[],"batches":[]}"#),
    ];
    let resume = |notes: &[(&str, &str)]| {
        fs::write(run.checkpoint(), &before).unwrap();
        forge(&run.checkpoint(), &[&sound[..], notes].concat());
        run.command(&[]).output().unwrap()
    };
    for (note, text) in [
        ("stepscope.epoch", format!("{most} {most} 0")),
        ("stepscope.epoch", format!("{half} {half} 0")),
        ("stepscope.epoch", format!("1 {half} 0")),
        ("stepscope.epoch", "1 2 0".into()),
        ("stepscope.epoch", "2 8 0".into()),
        ("stepscope.epoch", "3".repeat(1 << 20)),
        ("stepscope.updates", half.to_string()),
        ("stepscope.updates", most.to_string()),
        ("crossasset.position", position(&[0, 1, 2, 3])),
        ("crossasset.position", position(&[1])),
        ("crossasset.position", position(&[0])),
        ("crossasset.position", format!("\"{}\"", "x".repeat(1 << 20))),
        ("crossasset.settings", "y".repeat(1 << 20)),
    ] {
        let error = failed(&resume(&[(note, &text)]));
        assert!(error.len() < 2500, "{note}: {error}");
    }
    assert!(resume(&[]).status.success());
}
