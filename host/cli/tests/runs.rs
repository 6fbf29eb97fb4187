//! Runs `stepscope finetune` and `train` among other files, other runs and other ranks: what they
//! never replace, what goes with a run into another folder, and what ranks compare.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/mod.rs"]
mod support;

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use stepscope::DeviceKind;
use support::Random;
use support::example::{command, text};

/// A run of few updates, whose best evaluation is not the last one.
const WORSE: &str =
    "--context 64 --batch 2 --epochs 4 --eval-share 0.3 --evaluate-every 1 --learning-rate 0.3 --decay constant";
/// The kills of a run.
const KILLS: usize = 4;
const SHORT: &str = "--context 64 --batch 8 --epochs 1 --lora 4";

fn example(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/finetune").join(file)
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A folder in which runs are started.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::write(place.path("text.txt"), "let x = 1;\nlet y = x + 1;\n".repeat(40)).unwrap();
        copy(&example("tiny"), &place.path("tiny"));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns a command that fine-tunes the tiny model, or trains a new one.
    fn command(&self, program: &str, arguments: &str) -> Command {
        let mut command = command(program, &support::open(DeviceKind::Emulated), &[]);
        let chats = example("chats.jsonl");
        match program {
            "finetune" if arguments.contains("--weights") => command.args(["--data", chats.to_str().unwrap()]),
            "finetune" => command.args(["--weights", "tiny", "--data", chats.to_str().unwrap()]),
            _ => command.args("--data text.txt --context 16 --batch 2 --sample-tokens 5".split(' ')),
        };
        command.args(arguments.split_whitespace()).current_dir(self.0.path());
        command
    }

    #[track_caller]
    fn runs(&self, program: &str, arguments: &str) -> Output {
        let output = self.command(program, arguments).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
        output
    }

    /// Checks that a run is refused with these words, and that it changes no file.
    #[track_caller]
    fn refuses(&self, program: &str, arguments: &str, words: &str) {
        let before = self.files();
        let output = self.command(program, arguments).output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {errors}");
        assert!(errors.contains(words), "{arguments}: expected `{words}` in {errors}");
        assert!(!errors.contains("::"), "an error contains a Rust path: {errors}");
        assert!(self.files() == before, "{arguments}: a file was changed");
    }

    /// Returns all files and their contents.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut files, mut folders) = (BTreeMap::new(), vec![self.0.path().to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => drop(files.insert(path.clone(), fs::read(&path).unwrap_or_default())),
                }
            }
        }
        files
    }

    fn report(&self, out: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(out).join("report.json")).unwrap()).unwrap()
    }
}

/// The best weights go with a run into another folder, whatever stands there.
#[test]
fn best_weights_go_with_run() {
    let place = Place::new();
    place.runs("finetune", &format!("{WORSE} --out a"));
    let expected = place.report("a");
    assert!(expected["exported_update"].as_u64() < Some(expected["losses"].as_array().unwrap().len() as u64));
    let resume = format!("{WORSE} --resume a/model.safetensors");
    for (before, more) in [("", ""), ("--seed 8", "--overwrite"), ("--seed 9 --lora 4", "--overwrite")] {
        if !before.is_empty() {
            place.runs("finetune", &format!("{WORSE} {before} --out c --overwrite"));
        }
        place.runs("finetune", &format!("{resume} --out c {more}"));
        let report = place.report("c");
        for same in ["exported_update", "weights_sha256"] {
            assert_eq!(report[same], expected[same], "{before}: {same}");
        }
        let [ours, theirs] = ["a", "c"].map(|out| fs::read(place.path(out).join("best.safetensors")).unwrap());
        assert!(ours == theirs, "{before}");
    }
    // A run that has lost its best weights ends before it trains.
    let best = place.path("a/best.safetensors");
    let bytes = fs::read(&best).unwrap();
    fs::remove_file(&best).unwrap();
    let words = "a/best.safetensors: is missing, or has no notes of a run; the run exports the weights of its best";
    place.refuses("finetune", &format!("{resume} --out d"), words);
    place.refuses("finetune", &format!("{resume} --out a"), words);
    place.runs("finetune", &format!("{WORSE} --seed 8 --out other"));
    for name in ["other/best.safetensors", "a/model.safetensors"] {
        fs::copy(place.path(name), &best).unwrap();
        place.refuses("finetune", &format!("{resume} --epochs 6 --out d"), "a/best.safetensors: ");
    }
    fs::write(&best, bytes).unwrap();

    // `train` exports the last weights, and leaves no best weights of another run.
    let train = "--updates 4 --evaluate-every 1";
    place.runs("train", &format!("{train} --out t"));
    place.runs("train", &format!("{train} --seed 8 --out u"));
    place.runs("train", &format!("{train} --resume t/model.safetensors --out u --overwrite"));
    let [ours, theirs] = ["t", "u"].map(|out| fs::read(place.path(out).join("best.safetensors")).unwrap());
    assert!(ours == theirs);
    fs::remove_file(place.path("t/best.safetensors")).unwrap();
    place.runs("train", &format!("{train} --seed 8 --out u --overwrite"));
    place.runs("train", &format!("{train} --resume t/model.safetensors --out u --overwrite"));
    assert!(!place.path("u/best.safetensors").exists());
}

/// Files of others are refused by name before anything else, with and without `--overwrite`.
#[test]
fn files_of_others_stay() {
    let place = Place::new();
    for folder in ["out/tensorboard", "out/adapter", "model/transformers", "events/tensorboard", "linked"] {
        fs::create_dir_all(place.path(folder)).unwrap();
    }
    for (name, contents) in [
        ("out/log.jsonl", "{\"my\":\"own log\"}\n"),
        ("out/report.json", "mine"),
        ("out/tensorboard/events.out.tfevents.1.other", "three years of logs"),
        ("out/adapter/adapter_model.safetensors", "my adapter"),
        ("model/transformers/model.safetensors", "my model"),
        ("events/tensorboard/events.out.tfevents.1.other", "three years of logs"),
    ] {
        fs::write(place.path(name), contents).unwrap();
    }
    copy(&example("tiny"), &place.path("linked/model"));
    std::os::unix::fs::symlink(place.path("linked/model"), place.path("linked/transformers")).unwrap();
    for program in ["finetune", "train"] {
        for (out, names) in [
            ("out", "report.json, log.jsonl, adapter, tensorboard/events.out.tfevents.1.other"),
            ("model", "transformers"),
            ("events", "tensorboard/events.out.tfevents.1.other"),
            ("linked", "transformers"),
        ] {
            for more in ["", "--overwrite"] {
                let words = format!("and that no run has written: {names}. Move them");
                place.refuses(program, &format!("--context 16 --out {out} {more}"), &words);
            }
        }
    }
    std::os::unix::fs::symlink(place.path("tiny"), place.path("link")).unwrap();
    place.refuses("train", "--out tiny --overwrite", "and that no run has written: model.safetensors. Move them");
    for (weights, out) in [("tiny", "link"), ("link", "tiny"), ("tiny", "tiny/../tiny")] {
        let words = format!("is where --weights reads {weights}");
        place.refuses("finetune", &format!("{SHORT} --weights {weights} --out {out} --overwrite"), &words);
    }
    // The second stage of training begins from the export of the first, in another folder.
    place.runs("finetune", &format!("{SHORT} --out first --merge"));
    let second = format!("{SHORT} --weights first/transformers");
    place.refuses(
        "finetune",
        &format!("{second} --out first --overwrite"),
        "is where --weights reads first/transformers",
    );
    place.runs("finetune", &format!("{second} --out first/transformers/second"));
    // A finished run may be replaced, next to files of other names.
    fs::write(place.path("first/notes.txt"), "mine").unwrap();
    place.refuses("finetune", &format!("{SHORT} --out first"), "holds the checkpoint of an earlier run");
    place.runs("finetune", &format!("{SHORT} --out first --overwrite"));
    assert_eq!(fs::read_to_string(place.path("first/notes.txt")).unwrap(), "mine");
    place.refuses(
        "finetune",
        &format!("{SHORT} --resume tiny/model.safetensors --out new"),
        "is no checkpoint: give the",
    );
}

/// A run that is killed repeats updates and evaluations, and its logs have each once.
#[test]
fn killed_runs_log_each_figure_once() {
    let place = Place::new();
    let run = "--context 64 --batch 8 --epochs 12 --eval-share 0.3 --evaluate-every 2 --checkpoint-every 4 --out out";
    let log = place.path("out/log.jsonl");
    let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let mut child: Child = place.command("finetune", run).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while lines() < 20 && child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(120), "no log");
        sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    place.runs("finetune", &format!("{run} --resume out/model.safetensors"));
    let report = place.report("out");
    let count = |name: &str| report[name].as_array().unwrap().len();
    let text = fs::read_to_string(&log).unwrap();
    let keys: Vec<(u64, bool)> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| (line["update"].as_u64().unwrap(), line["evaluation_loss"].is_number()))
        .collect();
    assert_eq!(keys.len(), count("losses") + count("evaluations"));
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "{keys:?}");
    assert_eq!(fs::read_dir(place.path("out/tensorboard")).unwrap().count(), 1);
}

/// A run with `--memory smallest` that is killed after random updates, and resumed each time, ends
/// with the checkpoint of an undisturbed run, byte for byte. A run of another memory refuses it.
#[test]
fn killed_small_runs_resume_to_same_bits() {
    let place = Place::new();
    let all = "--context 64 --batch 8 --epochs 12 --checkpoint-every 1";
    let small = format!("{all} --memory smallest");
    place.runs("finetune", &format!("{small} --out straight"));
    let updates = place.report("straight")["losses"].as_array().unwrap().len();
    let log = place.path("killed/log.jsonl");
    let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let (mut random, mut resume, mut kills) = (Random::new(64), "", 0);
    for part in 0..KILLS {
        let at = updates * part / KILLS + 1 + random.below((updates / KILLS) as u32 - 1) as usize;
        let arguments = format!("{small} --out killed {resume}");
        let mut child =
            place.command("finetune", &arguments).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while lines() < at && child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(240), "update {at} was not logged in time");
            sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        kills += usize::from(!child.wait().unwrap().success());
        if place.path("killed/model.safetensors").exists() {
            resume = "--resume killed/model.safetensors";
        }
    }
    assert_eq!(kills, KILLS, "a run ended before it was killed");
    // Not `refuses`, because this run may remove the lock and files that a killed one left.
    let other = place.command("finetune", &format!("{all} --out killed {resume}")).output().unwrap();
    let errors = text(&other.stderr);
    assert!(other.status.code() == Some(2) && errors.contains("memory: smallest in the checkpoint"), "{errors}");
    place.runs("finetune", &format!("{small} --out killed {resume}"));
    let [straight, killed] = ["straight", "killed"].map(|out| place.report(out));
    assert_eq!(straight["weights_sha256"], killed["weights_sha256"]);
    assert_eq!(straight["losses"], killed["losses"]);
    let [straight, killed] =
        ["straight", "killed"].map(|out| fs::read(place.path(out).join("model.safetensors")).unwrap());
    assert!(straight == killed, "the checkpoints differ");
}

/// Runs two ranks in folders of their own, and returns their outputs.
fn on_two_ranks(place: &Place, arguments: [&str; 2]) -> [Output; 2] {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = [0, 1].map(|rank| {
        let out = format!("ranks{rank}");
        let mut command =
            place.command("finetune", &format!("{} --shards 2 --deadline 60 --out {out} --overwrite", arguments[rank]));
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_PORT", port.into())] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("STEPSCOPE_GROUP_SECRET", "the secret of this test");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    ranks.map(|rank| rank.wait_with_output().unwrap())
}

/// Ranks may call one model by several paths. They compare its contents, and the data of `--eval`.
/// Like the pods of Kubeflow, they have no `LOCAL_RANK`.
#[test]
fn ranks_compare_contents_not_paths() {
    let place = Place::new();
    copy(&place.path("tiny"), &place.path("other"));
    let eval = fs::read_to_string(example("chats.jsonl")).unwrap();
    let rows: Vec<&str> = eval.lines().collect();
    for (name, rows) in [("one.jsonl", &rows[..8]), ("same.jsonl", &rows[..8]), ("two.jsonl", &rows[8..16])] {
        fs::write(place.path(name), rows.join("\n")).unwrap();
    }
    let short = "--context 64 --batch 8 --epochs 1";
    let same = |first: &str, second: &str| {
        let outputs =
            on_two_ranks(&place, [first, second].map(|more| format!("{short} {more}")).each_ref().map(|it| &**it));
        let errors: String = outputs.iter().map(|output| text(&output.stderr)).collect();
        (outputs.iter().all(|output| output.status.success()), errors)
    };
    let absolute = format!("--lora 4 --weights {}", place.path("other").display());
    for (first, second) in [
        ("--lora 4 --weights tiny", &*absolute),
        ("--weights ./tiny", "--weights tiny/../other"),
        ("--lora 4 --weights tiny --eval one.jsonl", "--lora 4 --weights ./tiny --eval same.jsonl"),
    ] {
        let (well, errors) = same(first, second);
        assert!(well, "{first} and {second}: {errors}");
    }
    let (well, errors) = same("--weights tiny --eval one.jsonl", "--weights tiny --eval two.jsonl");
    assert!(!well && errors.contains("eval"), "{errors}");
    // One bit of a weight.
    let weights = place.path("other/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    for more in ["", "--lora 4"] {
        let (well, errors) = same(&format!("{more} --weights tiny"), &format!("{more} --weights other"));
        assert!(!well && errors.contains("weights"), "{more}: {errors}");
    }
}

/// Variables of launchers that have started one process.
#[test]
fn single_tasks_of_launchers_train() {
    let place = Place::new();
    for variables in [
        &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "12"), ("SLURM_JOB_NODELIST", "gpu[1-2]")][..],
        &[("WORLD_SIZE", "1")],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
    ] {
        let mut command = place.command("train", "--updates 1 --out out --overwrite");
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{variables:?}: {}", text(&output.stderr));
    }
}

/// Errors name options, and no functions of the library.
#[test]
fn errors_name_options() {
    let place = Place::new();
    for (program, arguments, words, code) in [
        ("finetune", "--shards 3", "--shards: expected a power of two that is a multiple of the 1 ranks, got 3", 2),
        ("train", "--ranks 3", "--shards: expected a power of two that is a multiple of the 3 ranks, got 3", 2),
        (
            "train",
            "--ranks 4 --shards 2",
            "--shards: expected a power of two that is a multiple of the 4 ranks, got 2",
            2,
        ),
        ("finetune", "--lora 4 --lora-targets nothing", "--lora-targets: expected targets that the model has", 2),
        ("finetune", "--context 64 --arena-mib 1", "give a larger --arena-mib, or leave it out", 1),
        ("finetune", "--context 64 --arena-mib 1 --eager", "give a larger --arena-mib, or leave it out", 1),
        ("train", "--updates 3 --learning-rate 1e30", "is not finite; the first tensor concerned: ", 1),
    ] {
        let output = place.command(program, &format!("{arguments} --out out --overwrite")).output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {errors}");
        assert!(errors.contains(words) && !errors.contains("::"), "{arguments}: {errors}");
    }
    let output = place.command("finetune", "--out new").env("RANK", "0").output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("a number in WORLD_SIZE") && !errors.contains("::"), "{errors}");
}

/// Weights in four bits train adapters only.
#[test]
fn quantized_weights_need_adapters() {
    let place = Place::new();
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/nf4/model"), &place.path("nf4"));
    let words =
        "nf4: has weights in NF4, which cannot be trained themselves: train adapters next to them with `stepscope";
    place.refuses("finetune", "--weights nf4 --out out", words);
    place.refuses("train", "--weights nf4 --out out --tokenizer bytes", words);
    place.refuses("finetune", "--weights nf4 --lora 4 --out out", "nf4: has no tokenizer.json");
}

/// `finetune` takes the tokenizer of another folder, and exports it with the model.
#[test]
fn other_tokenizer_is_exported() {
    let place = Place::new();
    let file = fs::read_to_string(place.path("tiny/tokenizer.json")).unwrap();
    let other = format!("{}\n", file.trim_end());
    fs::create_dir(place.path("words")).unwrap();
    fs::write(place.path("words/tokenizer.json"), &other).unwrap();
    fs::remove_file(place.path("tiny/tokenizer.json")).unwrap();
    place.refuses("finetune", "--out out", "has no tokenizer.json");
    for tokenizer in ["words", "words/tokenizer.json"] {
        place.runs("finetune", &format!("{SHORT} --merge --tokenizer {tokenizer} --out out --overwrite"));
        assert_eq!(fs::read_to_string(place.path("out/transformers/tokenizer.json")).unwrap(), other);
    }
    place.refuses("finetune", "--tokenizer gpt2 --out new", "--tokenizer gpt2: expected a file");
    place.refuses("finetune", "--tokenizer absent.json --out new", "absent.json");
}
