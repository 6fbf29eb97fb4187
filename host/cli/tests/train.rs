//! Runs `stepscope train`: the files that it leaves, and the input that it refuses with exit
//! code 2 and without writing.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/mod.rs"]
mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use stepscope::Device;
use support::example::{run, text};
use support::on_each_device;
use support::tokenizer_json::byte_level;
use tempfile::TempDir;

const SMALL: &str = "--context 16 --batch 2 --updates 4 --sample-tokens 5";

/// Returns a folder with a text.
fn workplace() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    fs::write(&path, "let x = 1;\nlet y = x + 1;\n".repeat(40)).unwrap();
    (folder, path)
}

fn gpt(device: &Device, data: &Path, out: &Path, more: &str) -> Output {
    let paths = [data, out].map(|path| path.to_str().expect("a path in UTF-8"));
    let arguments = ["--data", paths[0], "--out", paths[1]].into_iter().chain(SMALL.split(' '));
    run("train", device, &arguments.chain(more.split_whitespace()).collect::<Vec<_>>())
}

/// Returns the names of the files in a folder.
fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

on_each_device! {
    fn run_writes_report_and_resumes(device: &Device) {
        let (folder, data) = workplace();
        let out = folder.path().join("out");
        let output = gpt(device, &data, &out, "--checkpoint-every 2");
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{screen}{errors}");
        assert!(screen.contains("--- a sample\nfn "), "{screen}");
        assert!(errors.contains("held-out loss") && errors.contains("tokens/s"), "{errors}");
        let expected =
            ["best.safetensors", "log.jsonl", "model.safetensors", "report.json", "tensorboard", "transformers"];
        assert_eq!(names(&out), expected.map(String::from).into());
        let report: Value = serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap();
        let losses = report["losses"].as_array().unwrap();
        assert!(losses.len() == 4 && losses[0].as_f64().unwrap() > losses[3].as_f64().unwrap(), "{report}");
        assert_eq!(report["device"], device.description().kind.to_string());
        assert_eq!(report["weights_sha256"].as_str().unwrap().len(), 64);
        assert!(report["tokens_per_second"].as_f64().unwrap() > 0.0 && report["sample"].is_string(), "{report}");
        assert!(report["bytes"]["steps"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["evaluations"].as_array().unwrap().len(), 4, "a fifth of four updates is rounded up to one");

        // The run has ended. Resuming it gives the same report, and training continues from the
        // weights for transformers.
        let checkpoint = out.join("model.safetensors");
        let output = gpt(device, &data, &out, &format!("--resume {}", checkpoint.display()));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let again: Value = serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap();
        for same in ["weights_sha256", "losses", "sample"] {
            assert_eq!(report[same], again[same], "{same}");
        }
        let theirs = out.join("transformers");
        let (on, weights) = (folder.path().join("on"), format!("--weights {} --tokenizer bytes", theirs.display()));
        let first = on.join("model.safetensors");
        for more in ["", &format!("--resume {}", first.display())] {
            let output = gpt(device, &data, &on, &format!("{weights} {more}"));
            assert!(output.status.success(), "{more}: {}", text(&output.stderr));
        }
    }

    /// Weights in shards equal those of one file. A `tokenizer.json` makes the tokens, and turns
    /// generated tokens into text.
    fn shards_and_custom_tokenizer_work(device: &Device) {
        let (folder, data) = workplace();
        let file = folder.path().join("tokenizer.json");
        fs::write(&file, byte_level().to_string()).unwrap();
        let tokenizer = format!("--tokenizer {}", file.display());
        let (whole, sharded) = (folder.path().join("whole"), folder.path().join("sharded"));
        for (out, more) in [(&whole, ""), (&sharded, "--max-shard-size 1mb --sample-tokens 12 --temperature 2")] {
            let output = gpt(device, &data, out, &format!("{tokenizer} {more}"));
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        let report = |out: &Path| -> Value { serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap() };
        assert_eq!(report(&whole)["weights_sha256"], report(&sharded)["weights_sha256"]);
        assert!(report(&sharded)["sample"].as_str().is_some_and(|sample| !sample.is_empty()), "{}", report(&sharded)["sample"]);
        let theirs = sharded.join("transformers");
        let shards = names(&theirs);
        assert!(shards.contains("model.safetensors.index.json") && !shards.contains("model.safetensors"), "{shards:?}");
        let [one, other] = [&whole, &sharded].map(|out| {
            let loaded = stepscope::files::StateDict::from_pretrained(out.join("transformers"), |_| false).unwrap();
            loaded.iter().map(|(name, shape, values)| (name.to_owned(), shape.to_vec(), support::bits(values))).collect::<Vec<_>>()
        });
        assert!(one == other && !one.is_empty(), "the tensors must have the same bits");
        let output = gpt(device, &data, &folder.path().join("on"), &format!("{tokenizer} --weights {}", theirs.display()));
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

on_each_device! {
    /// A tokenizer that is trained on documents is exported with the model, which then learns
    /// chats. Evaluations report bits per byte.
    fn documents_lead_to_chats(device: &Device) {
        let (folder, data) = workplace();
        let row = |at: u32| format!("{{\"text\": \"let x{} = y + {at};\"}}\n", at % 100);
        let more = folder.path().join("more.jsonl");
        fs::write(&more, (0..2_000).map(row).collect::<String>()).unwrap();
        let out = folder.path().join("out");
        let mixed = format!("--tokenizer bpe --updates 2 --context 32 --sample let --data {} --mixture 1 3", more.display());
        let output = gpt(device, &data, &out, &mixed);
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{screen}{errors}");
        assert!(screen.contains(" by gzip, ") && errors.contains(" bits per byte"), "{screen}{errors}");
        let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
        let [gzip, xz] = ["gzip", "xz"].map(|name| report["data"]["compressed"][name].as_f64().unwrap());
        assert!(0.1 < xz && xz < gzip && gzip < 4.0, "{gzip} by gzip, {xz} by xz");
        let last = &report["evaluations"][1];
        let bytes = last["loss"].as_f64().unwrap() / last["bits_per_byte"].as_f64().unwrap() / std::f64::consts::LN_2;
        assert!(1.5 < bytes && bytes < 6.0, "{bytes} bytes for each token");
        let theirs = out.join("transformers");
        let output = gpt(device, &data, &folder.path().join("on"), &format!("--weights {} --updates 1", theirs.display()));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let chats = folder.path().join("chats.jsonl");
        let row = json!({ "messages": [{ "role": "user", "content": "let" }, { "role": "assistant", "content": "x" }] });
        fs::write(&chats, format!("{row}\n")).unwrap();
        let [theirs, chats, chat] = [theirs, chats, folder.path().join("chat")].map(|path| path.display().to_string());
        let output = run("finetune", device, &["--weights", &theirs, "--data", &chats, "--out", &chat, "--sample", "let"]);
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && screen.contains("--- let\n"), "{screen}{errors}");
    }

    /// `generate` writes the text that the training run wrote as its sample.
    fn generated_text_is_the_sample(device: &Device) {
        let (folder, data) = workplace();
        let out = folder.path().join("out");
        let output = gpt(device, &data, &out, "--sample let --temperature 0 --sample-tokens 12");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
        let theirs = out.join("transformers");
        let generate = |more: &[&str]| {
            let arguments = ["--weights", theirs.to_str().unwrap(), "--tokenizer", "bytes", "--temperature", "0", "--tokens", "12"];
            run("generate", device, &[&arguments[..], more].concat())
        };
        let output = generate(&["--prompt", "let"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), format!("{}\n", report["sample"].as_str().unwrap()));
        let output = generate(&["--chat", "let"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("has no chat template"), "{}", text(&output.stderr));
    }

    /// Weights of every family train, are exported, and generate text.
    fn every_family_trains(device: &Device) {
        let (folder, data) = workplace();
        let words = ["let", "x", "y", "=", "1", ";", "+"].into_iter().enumerate().map(|(id, word)| (word.to_owned(), id.into()));
        let vocabulary: serde_json::Map<String, Value> = words.chain([("?".to_owned(), 7.into())]).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "?" },
        });
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/cases");
        for case in fs::read_dir(cases).unwrap().map(|entry| entry.unwrap().path()) {
            let theirs = folder.path().join("theirs");
            let _ = fs::remove_dir_all(&theirs);
            fs::create_dir(&theirs).unwrap();
            for file in ["config.json", "model.safetensors"] {
                fs::copy(case.join(file), theirs.join(file)).unwrap();
            }
            fs::write(theirs.join("tokenizer.json"), tokenizer.to_string()).unwrap();
            let out = folder.path().join(case.file_name().unwrap());
            let output = gpt(device, &data, &out, &format!("--weights {}", theirs.display()));
            assert!(output.status.success(), "{}: {}", case.display(), text(&output.stderr));
            let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
            let losses: Vec<f64> = report["losses"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
            assert!(losses.len() == 4 && losses.iter().all(|loss| loss.is_finite()), "{}: {losses:?}", case.display());
            let written = out.join("transformers");
            fs::copy(theirs.join("tokenizer.json"), written.join("tokenizer.json")).unwrap();
            let output = run("generate", device, &["--weights", written.to_str().unwrap(), "--prompt", "let x", "--tokens", "5"]);
            assert!(output.status.success(), "{}: {}", case.display(), text(&output.stderr));
        }
    }
}

/// Checks that the input is refused with exit code 2 and these words, and that nothing is written.
fn refused(data: &Path, more: &str, expected: &str) {
    let device = support::open(stepscope::DeviceKind::Emulated);
    let out = data.parent().unwrap().join("none");
    let output = gpt(&device, data, &out, more);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{expected}: {message}");
    assert!(message.contains(expected), "expected `{expected}` in: {message}");
    assert!(!out.exists(), "{expected}: something was written");
}

#[test]
fn bad_input_writes_nothing() {
    let (folder, data) = workplace();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    refused(&file("empty.txt", b""), "", "empty.txt: is empty");
    refused(&folder.path().join("missing.txt"), "", "missing.txt: ");
    let chat = br#"{"messages": [{"role": "user", "content": "a"}]}"#;
    refused(&file("chats.jsonl", chat), "", "chats.jsonl: has rows with `messages`, which are not read as raw text");
    refused(&file("short.txt", b"let x;"), "", "7 tokens are too few: --context 16 needs 17");
    refused(&data, "--context 4096", "1041 tokens are too few");
    refused(&file("latin.txt", &[0xe4; 100]), "--tokenizer gpt2", "latin.txt: is not valid UTF-8");
    refused(
        &file("odd.bin", &[0; 101]),
        "",
        "odd.bin: is truncated: 101 bytes are not a whole number of 2-byte tokens",
    );
    refused(&file("none.bin", b""), "", "none.bin: is empty");
    let mut header: Vec<u8> = [20_240_520_u32, 1, 1000].iter().flat_map(|number| number.to_le_bytes()).collect();
    header.resize(1024 + 1998, 0);
    refused(
        &file("cut.bin", &header),
        "",
        "is truncated: its header states 1000 tokens, which take 3024 bytes; it has 3022",
    );
    header[4] = 9;
    refused(&file("new.bin", &header), "", "new.bin: expected llm.c version 1, got 9");
    let beyond: Vec<u8> = [5_u16, 60_000].repeat(100).iter().flat_map(|token| token.to_le_bytes()).collect();
    let beyond = file("beyond.bin", &beyond);
    refused(&beyond, "", "token 60000 at place 1 is outside the vocabulary of 50257");
    refused(&beyond, "--tokenizer bytes", "token 60000 at place 1 is outside the vocabulary of 256");
    let words = r#"{ "version": "1.0", "added_tokens": [], "model": { "type": "WordLevel", "vocab": { "x": 0 }, "unk_token": "x" } }"#;
    let words = file("words.json", words.as_bytes());
    refused(
        &data,
        &format!("--documents --tokenizer {}", words.display()),
        "the tokenizer has no token that ends a document",
    );
    let output = run("train", &support::open(stepscope::DeviceKind::Emulated), &["--sample", ""]);
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("--sample: is empty"));
    let other = file("tokenizer.json", b"{}");
    refused(&data, &format!("--tokenizer {}", other.display()), "tokenizer.json: is not a tokenizer.json");
    refused(&data, "--tokenizer nothing.json", "nothing.json: ");
    let whole = byte_level().to_string();
    for length in [0, whole.len() / 2, whole.len() - 1] {
        let cut = file("cut.json", &whole.as_bytes()[..length]);
        refused(&data, &format!("--tokenizer {}", cut.display()), "cut.json: is not a tokenizer.json");
    }
    let moved = whole.replace("\"id\":262", "\"id\":300");
    assert_ne!(moved, whole);
    let moved = file("moved.json", moved.as_bytes());
    refused(
        &data,
        &format!("--tokenizer {}", moved.display()),
        "`<|pad|>`: the file gives it the number 300, but it loads as 262",
    );
    for wrong in ["0", "-1", "5PB", "GB", "1.5GB", "99999999999TB"] {
        refused(&data, &format!("--max-shard-size={wrong}"), "--max-shard-size");
    }
    refused(&data, "--resume nothing.safetensors", "nothing.safetensors");
    refused(&data, "--weights nothing", "nothing: is no folder: give the folder of a model");
    refused(&data, "--batch 0", "--batch");
    refused(&data, "--top-p 0", "--top-p");
}

#[test]
fn files_of_another_model_are_refused() {
    let device = support::open(stepscope::DeviceKind::Emulated);
    let (folder, data) = workplace();
    let out = folder.path().join("out");
    assert!(gpt(&device, &data, &out, "--arch gpt2").status.success());
    let theirs = out.join("transformers");
    // A vocabulary of 256, and one of 50,257.
    refused(
        &data,
        &format!("--weights {}", theirs.display()),
        "the weights have a vocabulary of 256, but gpt2 has 50257",
    );
    refused(
        &data,
        &format!("--weights {} --context 17 --tokenizer bytes", theirs.display()),
        "has a context of 16, got --context 17",
    );
    let config = theirs.join("config.json");
    let before = fs::read_to_string(&config).unwrap();
    fs::write(&config, before.replace("\"n_layer\": 4", "\"n_layer\": 5")).unwrap();
    refused(
        &data,
        &format!("--weights {} --tokenizer bytes", theirs.display()),
        "has no `transformer.h.4.ln_1.weight` [128]",
    );
    fs::write(&config, before).unwrap();
    weights_of_another_model_are_refused(&data, &theirs);

    // A setting that decides the weights differs: the run does not begin, and existing files stay.
    let checkpoint = out.join("model.safetensors");
    let before = fs::read(&checkpoint).unwrap();
    for more in ["--arch llama", "--seed 8", "--context 8", "--batch 3"] {
        let output = gpt(
            &device,
            &data,
            &out,
            &format!("--resume {} --arch gpt2 {more}", checkpoint.display()).replace(SMALL, ""),
        );
        let message = text(&output.stderr);
        assert!(
            output.status.code() == Some(2) && message.contains("was made with other settings"),
            "{more}: {message}"
        );
    }
    assert!(fs::read(&checkpoint).unwrap() == before);
}

#[test]
fn mismatched_shards_are_refused() {
    let device = support::open(stepscope::DeviceKind::Emulated);
    let (folder, data) = workplace();
    let out = folder.path().join("out");
    let output = gpt(&device, &data, &out, "--arch gpt2 --max-shard-size 1MB --updates 1 --evaluate-every 1");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let theirs = out.join("transformers");
    let weights = format!("--weights {} --tokenizer bytes", theirs.display());
    let index = theirs.join("model.safetensors.index.json");
    let listed = fs::read_to_string(&index).unwrap();
    let map: Value = serde_json::from_str(&listed).unwrap();
    let (name, norm) = (map["weight_map"]["transformer.wte.weight"].as_str().unwrap(), "transformer.ln_f.weight");
    let shard = theirs.join(name);
    let whole = fs::read(&shard).unwrap();
    for length in [whole.len() - 4, 100, 0] {
        fs::write(&shard, &whole[..length]).unwrap();
        refused(&data, &weights, &format!("{name}: "));
    }
    fs::remove_file(&shard).unwrap();
    refused(&data, &weights, &format!("{name}: is missing, but model.safetensors.index.json lists tensors in it"));
    fs::write(&shard, &whole).unwrap();
    let entry = format!("\"{norm}\": {}", map["weight_map"][norm]);
    assert!(listed.contains(&entry), "{listed}");
    fs::write(&index, listed.replace(&entry, &format!("{entry}, {entry}"))).unwrap();
    refused(&data, &weights, &format!("model.safetensors.index.json: two texts named `{norm}`"));
    fs::write(&index, listed.replace(norm, "transformer.ln_g.weight")).unwrap();
    refused(&data, &weights, "has no `transformer.ln_g.weight`, which model.safetensors.index.json lists there");
    fs::write(&index, listed.replace(&format!("{entry},"), "")).unwrap();
    refused(&data, &weights, &format!("has `{norm}`, which model.safetensors.index.json does not list there"));
    fs::write(&index, &listed[..listed.len() / 2]).unwrap();
    refused(&data, &weights, "model.safetensors.index.json: EOF");
    fs::write(&index, &listed).unwrap();

    // The shards are whole again. The tokenizer has one token more than the weights, its special
    // token, which the text does not contain.
    let mut pairs = byte_level();
    pairs["model"]["merges"] = Value::Array(Vec::new());
    pairs["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64() < Some(256));
    let path = folder.path().join("pairs.json");
    let special = pairs["added_tokens"].as_array_mut().unwrap();
    special.truncate(1);
    special[0]["id"] = 256.into();
    fs::write(&path, pairs.to_string()).unwrap();
    let other = format!("--weights {} --tokenizer {}", theirs.display(), path.display());
    let output = gpt(&device, &data, &folder.path().join("other"), &format!("{other} --updates 1"));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Checks that weights with a wrong shape, length or value are refused, and so is another
/// tokenizer.
fn weights_of_another_model_are_refused(data: &Path, theirs: &Path) {
    let (config, file) = (theirs.join("config.json"), theirs.join("model.safetensors"));
    let (stored, whole) = (fs::read_to_string(&config).unwrap(), fs::read(&file).unwrap());
    let weights = format!("--weights {} --tokenizer bytes", theirs.display());
    fs::write(&config, stored.replace("\"n_inner\": 512", "\"n_inner\": 256")).unwrap();
    refused(data, &weights, "`transformer.h.0.mlp.c_fc.weight`: config.json requires [128, 256], got [128, 512]");
    fs::write(&config, &stored).unwrap();
    for length in [whole.len() - 4, whole.len() / 2, 100, 0] {
        fs::write(&file, &whole[..length]).unwrap();
        refused(data, &weights, "model.safetensors: ");
    }
    for wrong in [f32::NAN, f32::INFINITY] {
        // The last tensor of the file.
        let mut bytes = whole.clone();
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&wrong.to_le_bytes());
        fs::write(&file, bytes).unwrap();
        refused(
            data,
            &weights,
            &format!("`transformer.wte.weight`: expected finite numbers, got {wrong} at index 32767"),
        );
    }
    fs::write(&file, whole).unwrap();

    // A vocabulary of 256 matches neither 100 tokens nor 128, the size to which 100 is rounded up.
    // 200 and 257 tokens fit, and the text, which is one token, is too short.
    let tokenizer = |tokens: usize| {
        let words: Vec<String> = (0..tokens).map(|token| format!("\"w{token}\": {token}")).collect();
        let model = format!(r#"{{ "type": "WordLevel", "vocab": {{ {} }}, "unk_token": "w0" }}"#, words.join(", "));
        let path = data.parent().unwrap().join(format!("{tokens}.json"));
        fs::write(&path, format!(r#"{{ "version": "1.0", "added_tokens": [], "model": {model} }}"#)).unwrap();
        format!("--weights {} --tokenizer {}", theirs.display(), path.display())
    };
    refused(data, &tokenizer(100), "the weights have a vocabulary of 256, but ");
    refused(data, &tokenizer(257), "tokens are too few");
    refused(data, &tokenizer(200), "tokens are too few");
}
