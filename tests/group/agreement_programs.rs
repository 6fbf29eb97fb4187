//! Ranks of programs that start with different arguments or files. Each process names the
//! differences, and none trains.

#![cfg(unix)]
#![forbid(unsafe_code)]

use crate::support::example::{command, text};
use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use stepscope::{Checkpoint, DeviceKind};

/// The time that a rank waits for the others, in seconds.
const DEADLINE: u64 = 60;
const GPT: &str = "--context 16 --batch 2 --shards 2 --sample-tokens 1 --updates 3";
const CROSSASSET: &str = "--limit 60 --horizon 2 --batch 8 --shards 2 --folds 1 --epochs 1 --arena-mib 64";

/// Returns a port on which no program listens.
fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// Starts one of two ranks, with a secret.
fn start(program: &str, (rank, port): (usize, &str), (words, secret): (&str, Option<&[u8]>), out: &Path) -> Child {
    let deadline = DEADLINE.to_string();
    let words: Vec<&str> = words.split_whitespace().collect();
    let more: &[&str] = if words.contains(&"--deadline") { &[] } else { &["--deadline", &deadline] };
    let words = [&words[..], more].concat();
    let mut command = command(program, &crate::support::open(DeviceKind::Emulated), &words);
    command.args(["--out".as_ref(), out.as_os_str()]).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
    if let Some(secret) = secret {
        command.env("STEPSCOPE_GROUP_SECRET", OsStr::from_bytes(secret));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs two ranks to their ends. Returns the success and the output of each.
fn run(program: &str, words: [&str; 2], folder: &Path) -> [(bool, String); 2] {
    let port = free_port();
    let began = Instant::now();
    let start = |rank: usize| start(program, (rank, &port), (words[rank], None), &folder.join(rank.to_string()));
    let ranks = [0, 1].map(start);
    let ended = ranks.map(|rank| {
        let output = rank.wait_with_output().unwrap();
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    });
    assert!(began.elapsed() < Duration::from_secs(2 * DEADLINE), "{ended:?}");
    ended
}

/// Returns the arguments of a rank, in which `more` replaces the argument that it names.
fn replaced(words: &str, more: &str) -> String {
    let name = more.split(' ').next().unwrap();
    let is_other = |word: &&str| word.split(' ').next() != Some(name.trim_start_matches("--"));
    let kept = words.trim_start_matches("--").split(" --").filter(is_other).map(|word| format!("--{word} "));
    kept.collect::<String>() + more
}

/// Checks that both ranks fail, name these settings with both values (digests are not printed), and
/// leave no checkpoint.
#[track_caller]
fn refuses(program: &str, base: &str, more: &str, settings: &[[&str; 3]]) {
    let folder = tempfile::tempdir().unwrap();
    let ended = run(program, [base, &replaced(base, more)], folder.path());
    for (rank, (succeeded, output)) in ended.iter().enumerate() {
        assert!(!succeeded, "{more}: rank {rank}: {output}");
        for [name, here, there] in settings {
            let expected = format!("`{name}`: `{here}` on rank 0, `{there}` on rank 1");
            let found = output.contains(&expected) || here.is_empty() && output.contains(&format!("`{name}`: `"));
            assert!(found, "{more}: the output of rank {rank} lacks {expected}: {output}");
        }
    }
    assert!(!folder.path().join("0/model.safetensors").exists(), "{more}: a rank trained and wrote a checkpoint");
}

fn texts(folder: &Path) -> [String; 3] {
    let whole = include_str!("../../docs/architecture.md");
    let [base, edited, short] = ["base.txt", "edited.txt", "short.txt"].map(|name| folder.join(name));
    fs::write(&base, whole).unwrap();
    fs::write(&edited, whole.replacen("tensor", "tenSor", 1)).unwrap();
    fs::write(&short, &whole[..whole.floor_char_boundary(5000)]).unwrap();
    [base, edited, short].map(|path| path.to_str().unwrap().to_owned())
}

#[test]
fn gpt_ranks_name_differences() {
    let folder = tempfile::tempdir().unwrap();
    let [base, edited, short] = texts(folder.path());
    let words = format!("{GPT} --data {base}");
    for (more, settings) in [
        (&*format!("--data {edited}"), &[["text", "", ""]][..]),
        (&format!("--data {short}"), &[["text", "", ""]]),
        ("--precision bf16 --optimizer muon", &[["precision", "f32", "bf16"]]),
        ("--updates 4", &[["updates", "3", "4"]]),
        ("--warmup 2", &[["warmup", "0", "2"]]),
        ("--learning-rate 1e-3", &[["learning-rate", "4e-3", "1e-3"]]),
        ("--arch llama", &[["arch", "Qwen3", "Llama"]]),
        ("--context 32", &[["context", "16", "32"]]),
        ("--batch 4", &[["batch", "2", "4"]]),
        ("--accumulate 4", &[["accumulate", "2", "4"]]),
        ("--shards 4", &[["shards", "2", "4"], ["accumulate", "2", "4"]]),
        ("--seed 8", &[["seed", "7", "8"]]),
        ("--seed 8 --batch 4", &[["seed", "7", "8"], ["batch", "2", "4"]]),
        // All ranks stop together for evaluation and for checkpoints.
        ("--evaluate-every 2", &[["evaluate-every", "1", "2"]]),
        ("--checkpoint-every 2", &[["checkpoint-every", "None", "Some(2)"]]),
    ] {
        refuses("train", &words, more, settings);
    }
}

#[test]
fn crossasset_ranks_name_differences() {
    for (more, settings) in [
        ("--seed 8", &[["seed", "7", "8"], ["bars", "", ""]][..]),
        ("--limit 61", &[["limit", "60", "61"]]),
        ("--horizon 3", &[["horizon", "2", "3"]]),
        ("--epochs 2", &[["epochs", "1", "2"]]),
        ("--folds 2", &[["folds", "1", "2"]]),
        ("--precision tf32", &[["precision", "f32", "tf32"]]),
        ("--stored bf16", &[["stored", "f32", "bf16"]]),
        ("--weight-decay 0.1", &[["weight-decay", "1e-2", "1e-1"]]),
        ("--clip 0.5", &[["clip", "1e0", "5e-1"]]),
        ("--micro-batch 2", &[["micro-batch", "8", "2"]]),
        ("--checkpoint-every 2", &[["checkpoint-every", "None", "Some(2)"]]),
    ] {
        refuses("crossasset", CROSSASSET, more, settings);
    }
}

/// Other bars with the same number of rows: one price differs.
#[test]
fn crossasset_ranks_compare_bars() {
    let folder = tempfile::tempdir().unwrap();
    let bars = |price_of_row: fn(usize) -> f64| {
        let row = |number: usize| {
            let (minute, price) = (number * 60_000 + 1_600_000_000_000, price_of_row(number));
            format!("{minute},{price},{},{},{price},1.5\n", price + 1.0, price - 1.0)
        };
        let rows: String = (0..7600).map(row).collect();
        format!("open_time,open,high,low,close,volume\n{rows}")
    };
    let price = |number: usize| 100.0 + (number % 17) as f64 + (number % 5) as f64 * 0.25;
    let paths = ["one.csv", "other.csv"].map(|name| folder.path().join(name));
    fs::write(&paths[0], bars(price)).unwrap();
    let other =
        |number: usize| if number == 7590 { 101.5 } else { 100.0 + (number % 17) as f64 + (number % 5) as f64 * 0.25 };
    fs::write(&paths[1], bars(other)).unwrap();
    let words = paths.each_ref().map(|path| format!("{CROSSASSET} --bars {}", path.display()));
    let out = tempfile::tempdir().unwrap();
    for (rank, (succeeded, output)) in run("crossasset", [&words[0], &words[1]], out.path()).iter().enumerate() {
        assert!(!succeeded && output.contains("`bars`: `"), "rank {rank}: {output}");
    }
}

#[test]
fn gpt_ranks_share_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let [base, ..] = texts(folder.path());
    let words = format!("{GPT} --data {base}");
    let one = folder.path().join("one");
    let ended = run("train", [&format!("{words} --checkpoint-every 1"); 2], &one);
    assert!(ended.iter().all(|(succeeded, _)| *succeeded), "{ended:?}");
    let end = one.join("0/model.safetensors");
    let resume = |path: &Path| format!("{words} --resume {}", path.display());
    // Only one of them resumes.
    let two = folder.path().join("two");
    for (rank, (succeeded, output)) in run("train", [&resume(&end), &words], &two).iter().enumerate() {
        let expected = "`resumes`: `true` on rank 0, `false` on rank 1";
        assert!(!succeeded && output.contains(expected), "rank {rank}: {output}");
    }
    // Both resume: the run has ended, and has the same weights.
    let three = folder.path().join("three");
    let ended = run("train", [&resume(&end), &resume(&end)], &three);
    assert!(ended.iter().all(|(succeeded, _)| *succeeded), "{ended:?}");
    let weights = |folder: &Path| {
        Checkpoint::load(folder.join("0/model.safetensors")).unwrap().note("stepscope.sha256").map(str::to_owned)
    };
    assert_eq!(weights(&three).unwrap(), weights(&one).unwrap());
}

/// Settings that do not affect the numbers may differ: the weights are those of equal ranks.
#[test]
fn gpt_ranks_may_differ_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let [base, ..] = texts(folder.path());
    let words = format!("{GPT} --data {base}");
    let weights = |more: &str| {
        let out = tempfile::tempdir().unwrap();
        let ended = run("train", [&words, &format!("{words} {more}")], out.path());
        assert!(ended.iter().all(|(succeeded, _)| *succeeded), "{more}: {ended:?}");
        let line = ended[0].1.lines().find(|line| line.starts_with("weights ")).expect("a line").to_owned();
        line.split(';').next().unwrap().to_owned()
    };
    assert_eq!(weights("--eager --recompute --sample-tokens 3 --arena-mib 200"), weights(""));
}

/// A secret consists of bytes. Each byte counts, even if it is not UTF-8.
#[test]
fn secrets_need_not_be_text() {
    let folder = tempfile::tempdir().unwrap();
    let words = CROSSASSET.replace("--limit 60", "--limit 60 --deadline 5");
    let outputs = |secrets: [&[u8]; 2]| {
        let port = free_port();
        let out = |rank: usize| folder.path().join(rank.to_string());
        let ranks = [0, 1].map(|rank| start("crossasset", (rank, &port), (&words, Some(secrets[rank])), &out(rank)));
        ranks.map(|rank| {
            let output = rank.wait_with_output().unwrap();
            (output.status.success(), text(&output.stderr))
        })
    };
    let [first, other] = outputs([&[0xff; 16], &[0xfe; 16]]);
    assert!(!first.0 && !other.0 && other.1.contains("a different secret"), "{first:?} {other:?}");
    let mut last = [0xff; 32];
    last[31] = 0x80;
    let [first, other] = outputs([&[0xff; 32], &last]);
    assert!(!first.0 && !other.0 && other.1.contains("a different secret"), "{first:?} {other:?}");
    for (succeeded, output) in outputs([&[0xff; 6]; 2]) {
        assert!(!succeeded && output.contains("16 bytes or more") && output.contains("one of 6"), "{output}");
    }
    for (succeeded, output) in outputs([&[0xff; 16]; 2]) {
        assert!(succeeded, "{output}");
    }
}
