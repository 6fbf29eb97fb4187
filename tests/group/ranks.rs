//! A hundred updates of both programs give the same weights with 1, 2, 4 and 8 ranks, captured and
//! eager. The number of ranks may also change on the way.

#![cfg(unix)]
#![forbid(unsafe_code)]

use crate::support::example::{command, text};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use stepscope::DeviceKind;

/// Fifteen epochs of seven updates.
const CROSSASSET: &str =
    "--limit 105 --horizon 2 --batch 8 --shards 8 --folds 1 --epochs 15 --arena-mib 64 --checkpoint-every 20";
const CROSSASSET_EAGER: &str = "--capture off";
/// A model of a million weights; the text is added.
const GPT: &str = "--size tiny --context 16 --batch 1 --shards 8 --updates 100 --sample-tokens 1 --checkpoint-every 20";
const GPT_EAGER: &str = "--eager";

/// A program, by its name and its arguments.
struct Program<'w> {
    name: &'static str,
    words: String,
    eager: &'w str,
}

impl Program<'_> {
    fn command(&self, out: &Path, ranks: usize, more: &str) -> Command {
        let (ranks, device) = (ranks.to_string(), crate::support::open(DeviceKind::Emulated));
        let words: Vec<&str> =
            self.words.split(' ').chain(["--ranks", &ranks]).chain(more.split_whitespace()).collect();
        let mut command = command(self.name, &device, &words);
        command.arg("--out").arg(out).stdin(Stdio::null());
        command
    }

    /// Runs to the end, and returns the digest of the weights and the number of updates.
    #[track_caller]
    fn digest(&self, out: &Path, ranks: usize, more: &str) -> (String, u64) {
        let output = self.command(out, ranks, more).output().unwrap();
        assert!(output.status.success(), "{ranks} ranks {more}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
        let checkpoint = stepscope::Checkpoint::load(out.join("model.safetensors")).unwrap();
        (
            report["weights_sha256"].as_str().unwrap().to_owned(),
            checkpoint.note("stepscope.updates").unwrap().parse().unwrap(),
        )
    }

    /// Interrupts a run after its first checkpoint.
    fn is_interrupted(&self, out: &Path, ranks: usize) {
        let mut child = self.command(out, ranks, "").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while !out.join("model.safetensors").exists() {
            assert!(start.elapsed() < Duration::from_secs(300), "no checkpoint was written in time");
            sleep(Duration::from_millis(5));
        }
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130));
    }

    fn has_one_set_of_weights(&self) {
        let folder = tempfile::tempdir().unwrap();
        let out = |name: &str| folder.path().join(name);
        let expected = self.digest(&out("one"), 1, "");
        assert!(expected.1 >= 100, "{expected:?}");
        assert_eq!(self.digest(&out("two"), 2, self.eager), expected, "two ranks, eager: the digest differs");
        assert_eq!(self.digest(&out("eight"), 8, ""), expected, "eight");
        let changing = out("changing");
        self.is_interrupted(&changing, 4);
        let resume = format!("{} --resume {}", self.eager, changing.join("model.safetensors").display());
        assert_eq!(self.digest(&changing, 8, &resume), expected, "resuming four ranks as eight: the digest differs");
    }
}

#[test]
fn crossasset_has_one_set_of_weights() {
    Program { name: "crossasset", words: CROSSASSET.into(), eager: CROSSASSET_EAGER }.has_one_set_of_weights();
}

#[test]
fn gpt_has_one_set_of_weights() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    fs::write(&data, include_str!("../../docs/architecture.md")).unwrap();
    let words = format!("{GPT} --data {}", data.display());
    Program { name: "train", words, eager: GPT_EAGER }.has_one_set_of_weights();
}
