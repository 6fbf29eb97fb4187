//! Runs the built `crossasset` example on bad input: exit code 2, the file, line, column and rule,
//! and no file touched.
//!
//! `cargo test` and `cargo nextest run` build the example first. `STEPSCOPE_CROSSASSET` names
//! another program to run.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const HEADER: &str = "open_time,open,high,low,close,volume\n";
const GOOD: &str = "2023-03-01 00:00:00+00:00,10,12,9,11,0.5\n";

/// A folder with the results of an earlier run in `out`.
struct Workplace {
    folder: TempDir,
}

impl Workplace {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let workplace = Self { folder };
        fs::create_dir(workplace.out()).unwrap();
        for name in ["report.json", "model.safetensors"] {
            fs::write(workplace.out().join(name), format!("an earlier run's {name}")).unwrap();
        }
        workplace
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Runs the example with these files of bars and more arguments.
    fn run(&self, bars: &[&Path], more: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.args(["--device", "emulated", "--out"]).arg(self.out()).args(more);
        for path in bars {
            command.arg("--bars").arg(path);
        }
        command.current_dir(self.folder.path()).output().expect("the example starts")
    }

    /// Returns every file below the folder and its contents.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut files, mut folders) = (BTreeMap::new(), vec![self.folder.path().to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let contents = fs::read(&path).unwrap();
                    files.insert(path, contents);
                }
            }
        }
        files
    }

    /// Checks that the example refuses these arguments with exit code 2, reports every word of
    /// `expected`, and changes no file.
    fn refuses(&self, bars: &[&Path], more: &[&str], expected: &[&str]) {
        let before = self.files();
        let output = self.run(bars, more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{expected:?}: {message}");
        for words in expected {
            assert!(message.contains(words), "\"{words}\" is not in: {message}");
        }
        assert!(self.files() == before, "{expected:?}: a file was changed, made or removed");
    }
}

/// Returns `STEPSCOPE_CROSSASSET`, or the example next to this test's folder.
fn program() -> PathBuf {
    if let Some(program) = std::env::var_os("STEPSCOPE_CROSSASSET") {
        return program.into();
    }
    let test = std::env::current_exe().expect("the path of this test");
    let name = format!("crossasset{}", std::env::consts::EXE_SUFFIX);
    let program = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST").join("examples").join(name);
    assert!(program.is_file(), "{} is missing; run: cargo build --example crossasset", program.display());
    program
}

/// Checks that a single file of bars is refused, at this line and column, by this rule.
fn refused(text: &str, line: u64, column: &str, rule: &str) {
    let workplace = Workplace::new();
    let file = workplace.file("bars.csv", text);
    let place = format!("{}, line {line}, column {column}: ", file.display());
    workplace.refuses(&[&file], &[], &[&place, rule]);
}

/// Checks that a row after a good one is refused.
fn row_refused(row: &str, column: &str, rule: &str) {
    refused(&format!("{HEADER}{GOOD}{row}\n"), 3, column, rule);
}

/// Returns `count` valid bars, one a minute from 2023-03-01 00:00 UTC.
fn sound(count: u64) -> String {
    let mut text = HEADER.to_owned();
    for minute in 0..count {
        let price = 100.0 + (minute % 17) as f64;
        let time = 1_677_628_800 + 60 * minute;
        writeln!(text, "{time},{price},{},{},{price},{}", price + 1.0, price - 1.0, minute % 5).unwrap();
    }
    text
}

#[test]
fn a_missing_file() {
    let workplace = Workplace::new();
    let file = workplace.folder.path().join("missing.csv");
    workplace.refuses(&[&file], &[], &[&file.display().to_string(), "cannot be read"]);
}

/// A reader never reaches the end of these files; each is refused at once.
#[cfg(unix)]
#[test]
fn only_plain_files() {
    let workplace = Workplace::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let pipe = elsewhere.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, kind) in [
        (pipe.as_path(), "a pipe"),
        (Path::new("/dev/zero"), "a pipe, a socket or a device"),
        (Path::new("/"), "a folder"),
    ] {
        workplace.refuses(
            &[path],
            &[],
            &[&format!("{}: cannot be read: expected a plain file, got {kind}", path.display())],
        );
    }
}

/// A sparse tebibyte of NUL bytes, which takes no disk space.
#[test]
fn a_row_without_end() {
    let workplace = Workplace::new();
    let file = workplace.file("bars.csv", "");
    fs::File::options().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
    let mut command = Command::new(program());
    command.args(["--device", "emulated", "--out"]).arg(workplace.out()).arg("--bars").arg(&file);
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("line 1, column number 1: the row is longer than 1048576 bytes"), "{errors}");
}

#[test]
fn a_missing_column() {
    refused("open_time,open,high,low,volume\n", 1, "close", "the column is missing");
    refused("open,high,low,close,volume\n", 1, "open_time (or timestamp)", "the column is missing");
    refused("", 1, "open_time (or timestamp)", "the column is missing");
}

#[test]
fn a_ragged_row() {
    row_refused("2023-03-01 00:01:00+00:00,10,12,9", "close", "the row has 4 fields, the header 6");
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,11,1,1", "number 7", "the row has 7 fields, the header 6");
}

#[test]
fn text_for_a_number() {
    row_refused("2023-03-01 00:01:00+00:00,ten,12,9,11,1", "open", "\"ten\" is not a number");
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,11,", "volume", "\"\" is not a number");
    row_refused("tomorrow,10,12,9,11,1", "open_time", "\"tomorrow\" is not a time");
}

#[test]
fn nan_and_infinity() {
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,NaN,1", "close", "\"NaN\" is not finite");
    row_refused("2023-03-01 00:01:00+00:00,10,inf,9,11,1", "high", "\"inf\" is not finite");
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,11,nan", "volume", "\"nan\" is not finite");
}

#[test]
fn a_price_at_or_below_zero() {
    row_refused("2023-03-01 00:01:00+00:00,10,12,0,11,1", "low", "\"0\" is a price at or below zero");
    row_refused("2023-03-01 00:01:00+00:00,-10,12,9,11,1", "open", "\"-10\" is a price at or below zero");
}

#[test]
fn prices_out_of_order() {
    row_refused("2023-03-01 00:01:00+00:00,10,8,9,11,1", "high", "\"8\" is a high below the row's low 9");
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,13,1", "close", "\"13\" is outside the row's low 9 to high 12");
}

#[test]
fn a_negative_volume() {
    row_refused("2023-03-01 00:01:00+00:00,10,12,9,11,-0.5", "volume", "\"-0.5\" is a negative volume");
}

#[test]
fn time_must_increase() {
    row_refused("2023-02-28 23:59:00+00:00,10,12,9,11,1", "open_time", "is earlier than the row before");
    row_refused("2023-03-01T01:00:00+01:00,10,12,9,11,1", "open_time", "repeats the time of the row before");
}

#[test]
fn too_few_bars() {
    let workplace = Workplace::new();
    let file = workplace.file("bars.csv", &sound(7_524));
    let expected = format!("{}: too few bars: 7524 found, at least 7525 needed: ", file.display());
    workplace.refuses(&[&file], &[], &[&expected]);
}

#[test]
fn the_second_of_two_files() {
    let workplace = Workplace::new();
    let good = workplace.file("good.csv", &sound(9_000));
    let bad = workplace.file("bad.csv", &format!("{HEADER}{GOOD}\n{GOOD}"));
    let expected = format!("{}, line 4, column open_time: ", bad.display());
    workplace.refuses(&[&good, &bad], &[], &[&expected, "repeats the time"]);
}

#[test]
fn a_wrong_argument() {
    let workplace = Workplace::new();
    let file = workplace.file("bars.csv", &sound(9_000));
    for (arguments, expected) in [
        (["--batch", "0"], "--batch"),
        (["--micro-batch", "257"], "--micro-batch 257 is more than --batch 256"),
        (["--learning-rate", "NaN"], "a finite number above zero"),
        (["--limit", "10"], "too few samples: the limit keeps 10, at least 54 needed"),
    ] {
        workplace.refuses(&[&file], &arguments, &[expected]);
    }
}
