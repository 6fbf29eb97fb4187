//! Groups of processes, in which one process ends or freezes at a random moment. All others end
//! within the deadline and name it. The remaining processes resume, and reach the weights of an
//! undisturbed run.

#![cfg(unix)]
#![forbid(unsafe_code)]

use crate::support::Random;
use crate::support::cable::free_port;
use crate::support::example::{command, text};
use crate::support::moments::{MARGIN, moments, tell};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use stepscope::DeviceKind;

/// Two epochs of five updates by 8 samples in 4 shards, with a checkpoint after each update.
const RUN: [&str; 16] = [
    "--limit",
    "50",
    "--horizon",
    "2",
    "--batch",
    "8",
    "--shards",
    "4",
    "--folds",
    "1",
    "--epochs",
    "2",
    "--checkpoint-every",
    "1",
    "--arena-mib",
    "64",
];
/// The time that a rank waits for the others when one freezes. It is longer than the ranks take to
/// start on a busy machine.
const SOON: Duration = Duration::from_secs(6);
/// [`SOON`] on GPUs, where NCCL takes longer to start.
const SOON_BY_NCCL: Duration = Duration::from_secs(9);
/// The time that a rank waits for the others when none freezes.
const LATE: Duration = Duration::from_secs(60);
/// The extra time for a process that a busy machine schedules late.
const BUSY: Duration = Duration::from_secs(10);

/// A process of one rank.
struct Rank(Child);

impl Rank {
    fn signal(&self, signal: &str) {
        Command::new("kill").args([signal, &self.0.id().to_string()]).stderr(Stdio::null()).status().unwrap();
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // A frozen process would outlive the test.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a rank as `torchrun` would. The rank resumes from the checkpoint in `out`, if there is
/// one.
fn start(out: &Path, (port, deadline): (u16, Duration), rank: usize, ranks: usize, more: &[&str]) -> Rank {
    start_on(DeviceKind::Emulated, out, (port, deadline), rank, ranks, more)
}

fn start_on(
    kind: DeviceKind,
    out: &Path,
    (port, deadline): (u16, Duration),
    rank: usize,
    ranks: usize,
    more: &[&str],
) -> Rank {
    let mut command = command("crossasset", &crate::support::open(kind), &RUN);
    for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_PORT", port.into())] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("STEPSCOPE_GROUP_SECRET", "the secret of this test");
    command.arg("--deadline").arg(deadline.as_secs().to_string()).arg("--out").arg(out).args(more);
    let checkpoint = checkpoint(out);
    if checkpoint.exists() {
        command.arg("--resume").arg(checkpoint);
    }
    Rank(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

fn checkpoint(out: &Path) -> PathBuf {
    out.join("model.safetensors")
}

fn started(kind: DeviceKind, out: &Path, ranks: usize, deadline: Duration) -> Vec<Rank> {
    let port = free_port();
    (0..ranks).map(|rank| start_on(kind, out, (port, deadline), rank, ranks, &[])).collect()
}

/// Waits for all of these processes to end, and returns their output.
fn ended(ranks: Vec<Rank>, within: Duration) -> Vec<String> {
    let begun = Instant::now();
    let wait = |mut rank: Rank| {
        while !rank.has_ended() {
            assert!(begun.elapsed() < within, "a rank still runs after {:?}", begun.elapsed());
            sleep(Duration::from_millis(5));
        }
        let mut printed = String::new();
        std::io::Read::read_to_string(&mut rank.0.stderr.take().unwrap(), &mut printed).unwrap();
        printed
    };
    ranks.into_iter().map(wait).collect()
}

/// Runs to the end with this many ranks, and returns the digest of the weights.
#[track_caller]
fn digest(kind: DeviceKind, out: &Path, ranks: usize) -> String {
    let printed = ended(started(kind, out, ranks, LATE), Duration::from_secs(600));
    let report = fs::read(out.join("report.json")).unwrap_or_else(|error| panic!("{error}: {printed:?}"));
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    report["weights_sha256"].as_str().unwrap().to_owned()
}

/// Runs groups in which one process gets this signal at a random moment after the first checkpoint,
/// by the number of ranks.
fn one_gets(signal: &str, kind: DeviceKind, of: usize, usual: u64) {
    // A connection that closes is noticed at once.
    let soon = if kind == DeviceKind::Emulated { SOON } else { SOON_BY_NCCL };
    let (deadline, within) = if signal == "-STOP" { (soon, soon) } else { (LATE, Duration::ZERO) };
    let straight = tempfile::tempdir().unwrap();
    let expected = digest(kind, straight.path(), of);
    let of_one = digest(DeviceKind::Emulated, tempfile::tempdir().unwrap().path(), 1);
    assert_eq!(of_one, expected, "the digest depends on the number of ranks or on the device");
    let mut all = Vec::new();
    let at = |moment: u64, out: &Path| {
        let mut random = Random::new(1000 * moment + of as u64);
        let mut ranks = started(kind, out, of, deadline);
        let begun = Instant::now();
        while !checkpoint(out).exists() {
            assert!(begun.elapsed() < Duration::from_secs(120), "no checkpoint was written in time");
            sleep(Duration::from_millis(2));
        }
        sleep(Duration::from_millis(random.below(150).into()));
        let victim = random.below(of as u32) as usize;
        let struck = ranks.remove(victim);
        let (at, finished) = (Instant::now(), ranks.iter_mut().any(Rank::has_ended));
        struck.signal(signal);
        let printed = ended(ranks, within + MARGIN + BUSY);
        let took = at.elapsed();
        let in_time = !finished && !out.join("report.json").exists();
        if in_time {
            let named = format!("rank {victim} of {of}");
            for printed in &printed {
                // The op's name, number and line.
                assert!(
                    printed.contains(&named)
                        && printed.contains("(number ")
                        && printed.contains("examples/crossasset/train.rs:"),
                    "moment {moment}: {printed}"
                );
                assert!(!printed.contains("panicked"), "{printed}");
            }
            println!("{signal} of {of}, seed {moment}: {took:?}: {}", printed[0].trim());
        }
        in_time.then_some(took)
    };
    thread::scope(|scope| {
        for moment in moments(usual) {
            let folder = tempfile::tempdir().unwrap();
            all.extend(at(moment, folder.path()));
            let expected = &expected;
            let left = move || {
                let got = digest(kind, folder.path(), of / 2);
                assert_eq!(got, *expected, "moment {moment}: the remaining ranks must reach the same weights");
            };
            // Programs on GPUs take seconds to start. The next group starts meanwhile.
            if kind == DeviceKind::Emulated { left() } else { drop(scope.spawn(left)) }
        }
    });
    tell(if signal == "-STOP" { "SIGSTOP" } else { "kill -9" }, of, within, all);
}

#[test]
fn killed_rank_of_two_is_named() {
    one_gets("-KILL", DeviceKind::Emulated, 2, 2);
}

#[test]
fn killed_rank_of_four_is_named() {
    one_gets("-KILL", DeviceKind::Emulated, 4, 1);
}

#[test]
fn frozen_rank_of_two_is_named() {
    one_gets("-STOP", DeviceKind::Emulated, 2, 1);
}

#[test]
fn frozen_rank_of_four_is_named() {
    one_gets("-STOP", DeviceKind::Emulated, 4, 1);
}

/// Returns the program's output and its exit code.
fn output(mut rank: Rank) -> Output {
    let mut stderr = Vec::new();
    std::io::Read::read_to_end(&mut rank.0.stderr.take().unwrap(), &mut stderr).unwrap();
    Output { status: rank.0.wait().unwrap(), stdout: Vec::new(), stderr }
}

#[test]
fn failed_rendezvous_gives_its_cause() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path();
    // Another secret.
    let port = free_port();
    let first = start(out, (port, SOON), 0, 2, &[]);
    let mut other = command("crossasset", &crate::support::open(DeviceKind::Emulated), &RUN);
    for (name, value) in [("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")] {
        other.env(name, value);
    }
    other.env("MASTER_PORT", port.to_string()).env("STEPSCOPE_GROUP_SECRET", "the secret of another group");
    other.arg("--deadline").arg(SOON.as_secs().to_string()).arg("--out").arg(out);
    let other = Rank(other.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    for (rank, word) in [(first, "rank 1"), (other, "secret")] {
        let output = output(rank);
        let printed = text(&output.stderr);
        assert!(
            output.status.code() == Some(1) && printed.contains(word) && !printed.contains("panicked"),
            "{printed}"
        );
    }
    // A port that is already taken.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let printed = text(&output(start(out, (port, SOON), 0, 2, &[])).stderr);
    assert!(printed.contains(&port.to_string()), "{printed}");
    // Another model on one rank.
    let port = free_port();
    let ranks = [start(out, (port, SOON), 0, 2, &[]), start(out, (port, SOON), 1, 2, &["--seed", "8"])];
    let printed = ranks.map(|rank| text(&output(rank).stderr));
    assert!(printed.iter().all(|printed| printed.contains("`seed`: `7` on rank 0, `8` on rank 1")), "{printed:?}");
}

/// Repeats tests with NCCL, for four ranks.
#[cfg(feature = "cuda")]
mod four_gpus {
    use super::*;

    #[test]
    #[ignore = "needs four NVIDIA GPUs"]
    fn killed_rank_of_four_is_named() {
        one_gets("-KILL", DeviceKind::Cuda, 4, 3);
    }

    #[test]
    #[ignore = "needs four NVIDIA GPUs"]
    fn frozen_rank_of_four_is_named() {
        one_gets("-STOP", DeviceKind::Cuda, 4, 3);
    }
}

/// Repeats tests with NCCL.
#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn killed_rank_of_two_is_named() {
        one_gets("-KILL", DeviceKind::Cuda, 2, 3);
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn frozen_rank_of_two_is_named() {
        one_gets("-STOP", DeviceKind::Cuda, 2, 3);
    }
}
