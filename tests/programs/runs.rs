//! The training programs, as processes: their errors for wrong files, their exits, and the files
//! that they never overwrite.

#![cfg(unix)]
#![forbid(unsafe_code)]

mod signals;

use crate::support::example::{command, text};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use stepscope::{Checkpoint, DeviceKind};
use tempfile::TempDir;

/// A run for tests of signals and files, not of weights.
const GPT: &str = "--context 16 --batch 1 --sample-tokens 2";
/// Far more than a refusal takes on a busy machine.
const SOON: Duration = Duration::from_secs(30);
const LATE: Duration = Duration::from_secs(200);

/// A folder with a text in it.
struct Workplace(TempDir);

impl Workplace {
    fn new() -> Self {
        let new = Self(tempfile::tempdir().unwrap());
        new.file("text.txt", "let x = 1;\nlet y = x + 1;\n".repeat(40));
        new
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), contents).unwrap();
        self.path(name)
    }

    fn pipe(&self, name: &str) -> PathBuf {
        assert!(Command::new("mkfifo").arg(self.path(name)).status().unwrap().success());
        self.path(name)
    }

    /// Returns the command of `gpt`, which reads the text and writes to `out`, unless `more` sets
    /// others.
    fn gpt(&self, more: &str) -> Command {
        let mut command =
            command("train", &crate::support::open(DeviceKind::Emulated), &GPT.split(' ').collect::<Vec<_>>());
        for (option, name) in [("--data", "text.txt"), ("--out", "out")] {
            if !more.contains(option) {
                command.arg(option).arg(self.path(name));
            }
        }
        command.args(more.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    fn crossasset(&self, more: &str) -> Command {
        let small = ["--limit", "20", "--horizon", "2", "--batch", "3", "--folds", "1"];
        let mut command = command("crossasset", &crate::support::open(DeviceKind::Emulated), &small);
        if !more.contains("--out") {
            command.arg("--out").arg(self.path("out"));
        }
        command.args(more.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    /// Checks that the command is refused within a short time with this exit code and these words,
    /// and that nothing is written.
    #[track_caller]
    fn refuses(&self, mut command: Command, code: i32, expected: &[&str]) -> String {
        let output = within(&mut command, SOON);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{expected:?}: {message}");
        for words in expected {
            assert!(message.contains(words), "expected `{words}` in: {message}");
        }
        assert!(message.len() < 3000 && !message.contains("panicked"), "{message}");
        message
    }
}

/// Returns the output of a command, which must end within this time.
#[track_caller]
fn within(command: &mut Command, limit: Duration) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    ends_within(child, limit)
}

#[track_caller]
fn ends_within(mut child: Child, limit: Duration) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > limit {
            child.kill().unwrap();
            panic!("still running after {limit:?}: {}", text(&child.wait_with_output().unwrap().stderr));
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[track_caller]
fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[track_caller]
fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < LATE, "no {}", path.display());
        sleep(Duration::from_millis(2));
    }
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap()
}

/// Writes the weights of a small model in the format of transformers.
fn theirs(place: &Workplace) -> PathBuf {
    let output = within(&mut place.gpt("--arch gpt2 --updates 1 --out first"), LATE);
    assert!(output.status.success(), "{}", text(&output.stderr));
    place.path("first/transformers")
}

/// A pipe without a writer, an endless device and a folder are refused at once, whatever opens
/// them.
#[test]
fn paths_without_a_plain_file() {
    let place = Workplace::new();
    let (pipe, tokens) = (place.pipe("pipe"), place.pipe("pipe.bin"));
    let weights = place.path("weights");
    fs::create_dir(&weights).unwrap();
    let inside = |name: &str| {
        let _ = fs::remove_file(weights.join("config.json"));
        let _ = fs::remove_file(weights.join("model.safetensors"));
        let sizes = json!({ "model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1 });
        fs::write(weights.join("config.json"), sizes.to_string()).unwrap();
        let path = weights.join(name);
        let _ = fs::remove_file(&path);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    };
    for (option, path, kind) in [
        ("--data", pipe.as_path(), "a pipe"),
        ("--data", &tokens, "a pipe"),
        ("--data", Path::new("/dev/zero"), "a device"),
        ("--tokenizer", &pipe, "a pipe"),
        ("--tokenizer", Path::new("/dev/zero"), "a device"),
        ("--resume", &pipe, "a pipe"),
        ("--resume", Path::new("/dev/urandom"), "a device"),
    ] {
        let gpt = place.gpt(&format!("{option} {}", path.display()));
        place.refuses(gpt, 2, &["expected a plain file", kind]);
    }
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        inside(name);
        place.refuses(
            place.gpt("--weights weights --tokenizer bytes"),
            2,
            &[name, "expected a plain file, got a pipe"],
        );
        fs::remove_file(weights.join(name)).unwrap();
    }
    place.refuses(place.crossasset("--resume pipe"), 1, &["pipe: expected a plain file, got a pipe"]);
    assert!(!place.path("out").join("model.safetensors").exists());
}

/// Sparse files of a tebibyte each, which take no disk space. They are refused before they are
/// read, with their size and the limit.
#[test]
fn files_without_bounds() {
    let place = Workplace::new();
    let huge = |name: &str| {
        let path = place.file(name, "{");
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    };
    let (size, folder) = ((1u64 << 40).to_string(), place.path("weights"));
    fs::create_dir(&folder).unwrap();
    huge("huge.txt");
    place.refuses(place.gpt("--data huge.txt"), 2, &[&size, "bytes of memory; the host", " available: give less text"]);
    place.refuses(place.gpt("--data text.txt huge.txt text.txt"), 2, &[" available: give less text"]);
    place.refuses(place.gpt("--tokenizer huge.txt"), 2, &[&size, "may have at most 268435456"]);
    place.refuses(place.gpt("--resume huge.txt"), 2, &["huge.txt: "]);
    huge("weights/config.json");
    place.refuses(place.gpt("--weights weights"), 2, &["config.json: ", &size, "may have at most 1048576"]);
    let sizes =
        json!({ "model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1 });
    place.file("weights/config.json", sizes.to_string());
    huge("weights/model.safetensors.index.json");
    place.refuses(place.gpt("--weights weights"), 2, &["index.json: ", &size, "may have at most 33554432"]);
    // Small enough to be parsed, and only brackets.
    place.file("weights/model.safetensors.index.json", "[".repeat(30 << 20));
    place.refuses(place.gpt("--weights weights"), 2, &["index.json: "]);
    place.refuses(
        place.gpt("--batch 1048576 --context 1048576"),
        2,
        &["--batch: 1048576 samples", "bytes of the host's memory"],
    );
}

/// Impossible numbers: an error that names the key, the value and the bounds, before anything is
/// created.
#[test]
fn impossible_configuration_numbers() {
    let place = Workplace::new();
    let theirs = theirs(&place);
    let before: Value = serde_json::from_slice(&fs::read(theirs.join("config.json")).unwrap()).unwrap();
    let weights = "--weights first/transformers --tokenizer bytes";
    for (key, value, words) in [
        ("n_layer", json!(1e300), "`n_layer`: expected a whole number from 1 to 16384, got 1e+300"),
        ("n_layer", json!(1u64 << 63), "got 9223372036854775808"),
        ("n_layer", json!(i32::MAX), "got 2147483647"),
        ("n_layer", json!(0), "got 0"),
        ("n_layer", json!(-1), "got -1"),
        ("n_layer", json!(1.5), "got 1.5"),
        ("n_layer", json!("4"), "got \"4\""),
        ("n_embd", json!(1u64 << 63), "`n_embd`: expected a whole number"),
        ("n_embd", json!(1 << 26), "weights, but the most are 4398046511104: check its sizes"),
        ("n_inner", json!(1 << 26), "config.json requires [128, 67108864]"),
        ("n_positions", json!(u64::MAX), "`n_positions`: expected"),
        ("vocab_size", json!(1u64 << 40), "`vocab_size`: expected"),
        ("n_head", json!(3), "`n_head`: expected a number that divides the width 128, got 3"),
        ("n_head", json!(1 << 26), "got 67108864"),
        ("layer_norm_epsilon", json!(1e300), "`layer_norm_epsilon`: expected a number from 1e-30 to 1e0, got 1e+300"),
        ("layer_norm_epsilon", json!(0), "`layer_norm_epsilon`: expected a number"),
        ("layer_norm_epsilon", json!("1e-5"), "`layer_norm_epsilon`: expected a number"),
        ("tie_word_embeddings", json!("yes"), "`tie_word_embeddings`: expected true or false, got \"yes\""),
        (
            "model_type",
            json!("x".repeat(1 << 19)),
            "qwen3_moe or mixtral: give a model of one of these families, got \"xxx",
        ),
    ] {
        let mut sizes = before.clone();
        sizes[key] = value;
        fs::write(theirs.join("config.json"), sizes.to_string()).unwrap();
        place.refuses(place.gpt(weights), 2, &[words]);
    }
    let text = before.to_string().replacen('{', "{\"layer_norm_epsilon\":1e999,", 1);
    fs::write(theirs.join("config.json"), text).unwrap();
    place.refuses(place.gpt(weights), 2, &["config.json: "]);
    let llama = json!({ "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 3, "max_position_embeddings": 16, "num_hidden_layers": 1, "intermediate_size": 64 });
    fs::write(theirs.join("config.json"), llama.to_string()).unwrap();
    place.refuses(place.gpt(weights), 2, &["`num_key_value_heads`: expected a number that divides 4 heads, got 3"]);
}

/// The error names the kind of a file, wherever it is given in place of another.
#[test]
fn errors_name_the_file_kind() {
    let place = Workplace::new();
    let wide: Vec<u8> =
        "timestamp,open,high,low,close,volume\n".repeat(50).encode_utf16().flat_map(u16::to_le_bytes).collect();
    place.file("wide.txt", [&[0xff, 0xfe][..], &wide].concat());
    place.file("bare_wide.txt", &wide);
    place.file("gzip.txt", b"\x1f\x8b\x08\0\0\0\0\0".repeat(50));
    place.file("model.pt", [&b"PK\x03\x04"[..], &[0; 22], &[16, 0, 0, 0], b"archive/data.pkl", &[0; 100]].concat());
    place.file("pickle.bin", [&b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."[..], &[0xff; 100]].concat());
    place.file("pointer.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
    place.file("page.html", "<!DOCTYPE html><html>".repeat(20));
    place.file("latin.txt", b"let \xe4 = 1;\n".repeat(50));
    let state = theirs(&place).join("model.safetensors").display().to_string();
    fs::create_dir(place.path("weights")).unwrap();
    fs::copy(place.path("pointer.bin"), place.path("weights/config.json")).unwrap();
    for (more, words) in [
        ("--data wide.txt", "wide.txt: is text in UTF-16"),
        ("--data bare_wide.txt", "text in UTF-16"),
        (
            "--data gzip.txt",
            "is compressed by gzip; expected text, JSON lines, a Parquet file, or tokens in a file that ends in .bin: unpack it",
        ),
        ("--data model.pt", "is a zip archive, as `torch.save` writes it"),
        ("--data latin.txt --tokenizer gpt2", "latin.txt: is not valid UTF-8"),
        ("--data pickle.bin", "It is a pickle, as `torch.save` writes it"),
        ("--data pointer.bin", "a pointer of git-lfs; expected tokens"),
        ("--tokenizer gzip.txt", "is not a tokenizer.json: is compressed by gzip"),
        ("--tokenizer pointer.bin", "fetch the file itself with `git lfs pull`"),
        ("--tokenizer page.html", "is a web page; expected JSON"),
        ("--resume text.txt", "text.txt: is text; expected a safetensors file"),
        ("--resume gzip.txt", "is compressed by gzip; expected a safetensors file"),
        ("--resume pointer.bin", "a pointer of git-lfs"),
        ("--resume model.pt", "`safetensors.torch.save_file(model.state_dict(), path)`"),
        ("--resume first/best.safetensors --arch gpt2 --updates 1", "has weights but no optimizer state"),
        ("--weights weights", "config.json: is a pointer of git-lfs; expected a model's configuration in JSON"),
        (
            &format!("--resume {state}"),
            "has weights, but is no checkpoint: give the model.safetensors in the --out of a run",
        ),
    ] {
        place.refuses(place.gpt(more), 2, &[words]);
    }
    let output = within(&mut place.crossasset("--epochs 1 --out market"), LATE);
    assert!(output.status.success(), "{}", text(&output.stderr));
    place.refuses(
        place.gpt("--resume market/model.safetensors"),
        2,
        &["is a checkpoint of `crossasset`; expected a checkpoint of `gpt`"],
    );
    place.refuses(
        place.crossasset("--resume first/model.safetensors"),
        1,
        &["is a checkpoint of `gpt`; expected a checkpoint of `crossasset`"],
    );
    for (file, words) in [
        ("wide.txt", "is text in UTF-16"),
        ("gzip.txt", "is compressed by gzip; expected bars as CSV in UTF-8: unpack it, for example with `gunzip`"),
        ("model.pt", "is a zip archive"),
        ("page.html", "is a web page; expected bars"),
        ("pointer.bin", "is a pointer of git-lfs"),
    ] {
        place.refuses(place.crossasset(&format!("--bars {file}")), 2, &[words]);
    }
}

/// Runs the same command a second time, for both programs. It is refused, and each piece of advice
/// is right.
#[test]
fn earlier_runs_are_not_overwritten() {
    for program in ["gpt", "crossasset"] {
        let place = Workplace::new();
        let run = |more: &str| match program {
            "gpt" => place.gpt(&format!("--updates 3 {more}")),
            _ => place.crossasset(&format!("--epochs 1 {more}")),
        };
        assert!(within(&mut run(""), LATE).status.success());
        let checkpoint = place.path("out/model.safetensors");
        let before = fs::read(&checkpoint).unwrap();
        let message = place.refuses(
            run(""),
            2,
            &["holds the checkpoint of an earlier run: model.safetensors, ", " updates, written 20"],
        );
        let go_on = message.lines().map(str::trim).find(|line| line.starts_with("--resume ")).unwrap();
        let go_on = go_on.split("   ").next().unwrap();
        for (more, file) in [("--seed 8", "out"), ("--resume copy.safetensors", "out")] {
            fs::copy(&checkpoint, place.path("copy.safetensors")).unwrap();
            place.refuses(run(more), 2, &[&format!("{file} holds the checkpoint")]);
        }
        assert!(fs::read(&checkpoint).unwrap() == before, "{program}: a refused run changed the checkpoint");
        for advice in [go_on, "--out another", "--overwrite", "--overwrite --seed 8"] {
            let output = within(&mut run(advice), LATE);
            assert!(output.status.success(), "{program} {advice}: {}", text(&output.stderr));
        }
        assert!(fs::read(&checkpoint).unwrap() != before, "{program}: a different seed must change the checkpoint");
        // A file that no run has written stays, also with `--overwrite`.
        fs::create_dir(place.path("weights")).unwrap();
        place.file("weights/model.safetensors", "somebody's");
        for more in ["", "--overwrite"] {
            let expected =
                ["weights holds files that this run would replace, and that no run has written: model.safetensors. "];
            place.refuses(run(&format!("--out weights {more}")), 2, &expected);
        }
        assert_eq!(fs::read_to_string(place.path("weights/model.safetensors")).unwrap(), "somebody's");
    }
}

/// A finished run reports no speed, and the error names other settings.
#[test]
fn finished_run_suggests_next_command() {
    let place = Workplace::new();
    assert!(within(&mut place.gpt("--updates 4 --evaluate-every 2"), LATE).status.success());
    let seconds: Vec<f64> =
        report(&place.path("out"))["seconds"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect();
    assert!(seconds.len() == 4 && seconds[0] == seconds[1] && seconds[2] == seconds[3], "{seconds:?}");
    let resume = "--evaluate-every 2 --resume out/model.safetensors";
    let output = within(&mut place.gpt(&format!("--updates 4 {resume}")), LATE);
    let printed = text(&output.stdout) + &text(&output.stderr);
    assert!(
        output.status.success() && !printed.contains("NaN") && printed.contains("all updates had already been made"),
        "{printed}"
    );
    assert!(report(&place.path("out"))["tokens_per_second"].is_null());
    let message = place.refuses(
        place.gpt(&format!("--updates 9 --seed 8 {resume}")),
        2,
        &["was made with other settings:", "  seed: 7 in the checkpoint, 8 here"],
    );
    assert!(!message.contains("  batch: "), "{message}");
    let expected = ["made update 1 at a learning rate of 3.", ", which is ", " here\n"];
    let message = place.refuses(place.gpt(&format!("--updates 9 {resume}")), 2, &expected);
    // The advice, as printed.
    let advice = message.split("--weights ").nth(1).unwrap().split(' ').next().unwrap();
    let mut longer = place.gpt("--updates 2 --tokenizer bytes --out longer");
    assert!(within(longer.arg("--weights").arg(advice), LATE).status.success(), "{message}");
}

/// A run whose learning rate has not fallen yet is extended, and its fall begins at its checkpoint,
/// with the weights of the run that was planned so.
#[test]
fn constant_rate_is_extended() {
    let place = Workplace::new();
    let run = |arguments: &str| {
        let output = within(&mut place.gpt(&format!("--warmup 1 --evaluate-every 9 {arguments}")), LATE);
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    };
    let falls = "--updates 6 --decay sqrt --decay-updates 2 --floor 0";
    run(&format!("{falls} --out whole"));
    run("--updates 2 --decay constant --out first");
    run("--updates 4 --decay constant --resume first/model.safetensors --out second");
    run(&format!("{falls} --resume second/model.safetensors --out third"));
    let [whole, third] = ["whole", "third"].map(|out| report(&place.path(out))["weights_sha256"].clone());
    assert_eq!(whole, third);
    let extended = "--updates 8 --warmup 1 --evaluate-every 9 --resume third/model.safetensors --decay constant";
    place.refuses(place.gpt(extended), 2, &["made update 5 at a learning rate of "]);
}

/// Tokens that are rewritten during training, with the old time of modification restored, end the
/// run.
#[test]
fn changing_tokens_end_a_run() {
    let place = Workplace::new();
    let tokens: Vec<u8> = (0..40_000u32).flat_map(|at| ((at * 7 % 50_257) as u16).to_le_bytes()).collect();
    let path = place.file("tokens.bin", &tokens);
    let mut gpt = place.gpt("--updates 100000 --checkpoint-every 1 --evaluate-every 100000 --data tokens.bin");
    let child = gpt.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&place.path("out/model.safetensors"));
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let mut file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all(&[1; 80_000]).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(modified)).unwrap();
    let output = ends_within(child, LATE);
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains("tokens.bin: has changed since it was opened: tokens ") && printed.contains("have changed"),
        "{printed}"
    );
    Checkpoint::load(place.path("out/model.safetensors")).unwrap();
}

/// A run with limited threads works with few, or fails with an error.
#[test]
#[cfg(target_os = "linux")]
fn scarce_threads_make_no_panic() {
    let place = Workplace::new();
    assert!(within(&mut place.gpt("--updates 2"), LATE).status.success());
    let expected = report(&place.path("out"))["weights_sha256"].clone();
    // The threads of rayon's pools, 13 GB of stacks, do not fit the smaller address spaces. The
    // program's own need there depends on how fast the pools' threads end.
    for more in ["--updates 2 --resume out/model.safetensors", "--updates 2 --overwrite"] {
        let ended_well = [3, 4, 5, 6, 8, 20].into_iter().find(|gigabytes| {
            let inner = place.gpt(more);
            let mut command = Command::new("sh");
            let limited = format!("ulimit -v {gigabytes}000000; exec \"$0\" \"$@\"");
            command.args(["-c", &limited]).arg(inner.get_program()).args(inner.get_args());
            command
                .env("RAYON_NUM_THREADS", "200")
                .env("RUST_MIN_STACK", (64 << 20).to_string())
                .current_dir(place.0.path());
            let output = within(&mut command, LATE);
            let printed = text(&output.stderr);
            assert!(!printed.contains("panicked") && matches!(output.status.code(), Some(0..=2)), "{more}: {printed}");
            assert!(output.status.success() || printed.contains("error: "), "{more}: {printed}");
            output.status.success()
        });
        assert!(
            ended_well.is_some_and(|gigabytes| gigabytes < 13),
            "{more}: needed {ended_well:?} GB, but fewer threads need less"
        );
        assert_eq!(report(&place.path("out"))["weights_sha256"], expected, "{more}");
    }
    // No thread at all.
    let mut gpt = place.gpt("--updates 2 --overwrite");
    let output = within(gpt.env("RUST_MIN_STACK", (1u64 << 46).to_string()), SOON);
    let printed = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && printed.contains("error: ") && !printed.contains("panicked"),
        "{printed}"
    );
}
