//! Runs `stepscope finetune` on the tiny model of the example: the files that it leaves, and the
//! input that it refuses with exit code 2 and without writing.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/mod.rs"]
mod support;

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use stepscope::{Device, DeviceKind};
use support::example::{run, text};
use support::on_each_device;

fn example(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/finetune").join(file)
}

/// Fine-tunes the tiny model.
fn finetune(device: &Device, data: &Path, out: &Path, more: &str) -> Output {
    let weights = example("tiny");
    let paths = [&weights, data, out].map(|path| path.to_str().expect("a path in UTF-8"));
    let arguments = ["--weights", paths[0], "--data", paths[1], "--out", paths[2]];
    run("finetune", device, &arguments.into_iter().chain(more.split_whitespace()).collect::<Vec<_>>())
}

/// Returns the names of the files in a folder.
fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap()
}

on_each_device! {
    /// The first command of docs/finetune.md learns the chats, and its model answers.
    fn first_command_of_the_page(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let more = "--context 64 --batch 8 --epochs 40 --learning-rate 2e-2 --eval-share 0.1 --sample Hello";
        let output = finetune(device, &example("chats.jsonl"), &out, more);
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{screen}{errors}");
        assert!(screen.contains("tokens, of which") && screen.contains("with padding"), "{screen}");
        let report = report(&out);
        let losses: Vec<f64> = report["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
        assert!(losses[losses.len() - 1] < 0.5 * losses[0], "{losses:?}");
        let [real, all] = ["real_tokens_per_second", "tokens_per_second"].map(|name| report[name].as_f64().unwrap());
        assert!(real > 0.0 && real < all, "{real} {all}");
        assert!(report["sample"].is_string() && screen.contains("--- Hello\n"), "{screen}");
        let looks = report["evaluations"].as_array().unwrap();
        let best = looks.iter().min_by(|one, other| one["loss"].as_f64().unwrap().total_cmp(&other["loss"].as_f64().unwrap()));
        assert_eq!(report["exported_update"], best.unwrap()["update"], "{report}");

        // Both logs have all updates and evaluations.
        let log = fs::read_to_string(out.join("log.jsonl")).unwrap();
        let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), losses.len() + looks.len());
        let first = &lines[0];
        assert_eq!((&first["update"], &first["loss"]), (&1.into(), &report["losses"][0]));
        for figure in ["gradient_norm", "learning_rate", "real_tokens_per_second", "tokens_per_second", "arena_bytes"] {
            assert!(first[figure].as_f64().unwrap() > 0.0, "{figure}: {first}");
        }
        assert_eq!(fs::read_dir(out.join("tensorboard")).unwrap().count(), 1);

        // The model is BF16, as it was, and complete.
        let model = out.join("transformers");
        let [theirs, ours] = [&example("tiny"), &model].map(|folder| names(folder));
        assert_eq!(theirs, ours);
        let config = |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
        assert_eq!(config(&model), config(&example("tiny")));
        let size = |folder: &Path| fs::metadata(folder.join("model.safetensors")).unwrap().len();
        assert!(size(&model).abs_diff(size(&example("tiny"))) < 512, "{} and {} bytes", size(&model), size(&example("tiny")));
        let arguments = ["--weights", model.to_str().unwrap(), "--chat", "What is 2+3?", "--temperature", "0", "--tokens", "16"];
        let output = run("generate", device, &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).starts_with("It is "), "{}", text(&output.stdout));
    }

    /// The QLoRA commands of docs/finetune.md: adapters next to four-bit weights learn, and their
    /// model answers correctly.
    fn quantized_commands_of_the_page(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/finetune.md")).unwrap();
        let (_, section) = page.split_once("## Frozen weights in four bits").unwrap();
        let block = section.split("```").nth(1).unwrap().replace("\\\n", " ");
        let losses = |out: &str| -> Vec<f64> {
            let report = report(&folder.path().join(out));
            report["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
        };
        for line in block.lines().filter_map(|line| line.split_once("-- finetune ")) {
            let line = line.1.replace("examples/finetune", example("").to_str().unwrap().trim_end_matches('/'));
            let line = line.replace("target/", &format!("{}/", folder.path().display()));
            let (line, sample) = line.split_once(" --sample \"").unwrap_or((&line, "Hello?\""));
            let sample = ["--sample", sample.trim_end_matches('"')];
            let output = run("finetune", device, &line.split_whitespace().chain(sample).collect::<Vec<_>>());
            assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        }
        let [base, adapted] = ["base", "qlora"].map(losses);
        assert!(base[0] > 5.0 && base[base.len() - 1] < 0.2, "{base:?}");
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let [first, last] = [&adapted[..10], &adapted[adapted.len() - 10..]].map(mean);
        assert!(last < 0.5 * first && last < 0.1, "{first} and {last}");
        assert_eq!(report(&folder.path().join("qlora"))["sample"], "It is 5.");
    }

    /// Adapters learn preferences, from a loss of log 2. The reference of a run that continues with
    /// an adapter is the model without it.
    fn adapters_learn_preferences(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let run_with = |name: &str, more: &str| {
            let out = folder.path().join(name);
            let more = format!("--preferences dpo --context 64 --batch 4 --epochs 8 --learning-rate 5e-3 {more}");
            let output = finetune(device, &example("pairs.jsonl"), &out, &more);
            let progress = text(&output.stderr);
            assert!(output.status.success(), "{}{progress}", text(&output.stdout));
            (report(&out), progress)
        };
        let (first, progress) = run_with("first", "--lora 8 --eval-share 0.25");
        let number = |report: &Value, pointer: &str| report.pointer(pointer).and_then(Value::as_f64).unwrap();
        assert!((number(&first, "/losses/0") - std::f64::consts::LN_2).abs() < 1e-6, "{first}");
        assert_eq!(number(&first, "/rewards/0/rewards~1margins"), 0.0);
        let last = first["evaluations"].as_array().unwrap().len() - 1;
        let last = |name: &str| number(&first, &format!("/evaluations/{last}/{name}"));
        assert!(last("loss") < 0.6 && last("rewards~1accuracies") > 0.9 && last("rewards~1margins") > 0.25, "{first}");
        assert!(progress.contains("held-out loss") && progress.contains("accuracy "), "{progress}");
        assert!(!progress.contains("perplexity"), "{progress}");
        let log = fs::read_to_string(folder.path().join("first/log.jsonl")).unwrap();
        let update: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        assert_eq!(update["rewards/accuracies"], first["rewards"][0]["rewards/accuracies"]);

        let adapter = folder.path().join("first/adapter");
        let (second, _) = run_with("second", &format!("--adapter {} --epochs 1", adapter.display()));
        assert!(number(&second, "/losses/0") < 0.6 && number(&second, "/rewards/0/rewards~1margins") > 0.25, "{second}");
    }

    /// Adapters learn too. They are exported by themselves, in PEFT's files, or merged into the
    /// model.
    fn adapters_are_exported(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let run_with = |name: &str, more: &str| {
            let out = folder.path().join(name);
            let more = format!("--context 64 --batch 8 --epochs 12 --lora 8 --learning-rate 2e-2 {more}");
            let output = finetune(device, &example("chats.jsonl"), &out, &more);
            assert!(output.status.success(), "{}", text(&output.stderr));
            let losses: Vec<f64> = report(&out)["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
            // PEFT learns as little on a model of random weights.
            assert!(losses[losses.len() - 1] < losses[0] - 0.1, "{losses:?}");
            out
        };
        let alone = run_with("alone", "").join("adapter");
        let adapter = names(&alone);
        assert!(adapter.contains("adapter_config.json") && adapter.contains("adapter_model.safetensors"), "{adapter:?}");
        let adapter = names(&run_with("quantized", "--quantize nf4").join("adapter"));
        assert!(adapter.contains("adapter_model.safetensors"), "{adapter:?}");
        let merged = run_with("merged-nf4", "--merge --quantize nf4").join("transformers");
        assert_eq!(names(&merged), names(&example("tiny")));
        let merged = run_with("merged", "--merge").join("transformers");
        assert_eq!(names(&merged), names(&example("tiny")));
        // Applied or merged, the adapter gives one text, which is not the model's own.
        let answer = |weights: &Path, more: &[&str]| {
            let own = ["--weights", weights.to_str().unwrap(), "--chat", "What is 2+3?", "--tokens", "8", "--temperature", "0"];
            let output = run("generate", device, &own.iter().chain(more).copied().collect::<Vec<_>>());
            assert!(output.status.success(), "{}", text(&output.stderr));
            text(&output.stdout)
        };
        let (tiny, alone) = (example("tiny"), alone.to_str().unwrap());
        let applied = answer(&tiny, &["--adapter", alone]);
        assert_eq!(answer(&tiny, &["--adapter", alone, "--merge"]), applied);
        assert_ne!(answer(&tiny, &[]), applied);
        answer(&merged, &[]);
        let output = run("generate", device, &["--weights", tiny.to_str().unwrap(), "--adapter", "nowhere", "--prompt", "a"]);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    }

    /// Adapters in small memory learn as in f32, next to frozen weights in their own type and in
    /// NF4.
    fn adapters_learn_in_small_memory(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        for (name, frozen) in [("own", ""), ("nf4", "--quantize nf4")] {
            let [full, small] = ["", "--memory small"].map(|memory| {
                let out = folder.path().join(format!("{name}{}", memory.len()));
                let more = format!("--context 64 --batch 8 --epochs 12 --lora 8 --learning-rate 5e-3 {frozen} {memory}");
                let output = finetune(device, &example("chats.jsonl"), &out, &more);
                assert!(output.status.success(), "{}", text(&output.stderr));
                assert!(names(&out.join("adapter")).contains("adapter_model.safetensors"));
                let losses = report(&out)["losses"].clone();
                losses.as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect::<Vec<_>>()
            });
            assert!(small != full && small[small.len() - 1] < small[0] - 0.3, "{small:?}");
            let worst = small.iter().zip(&full).map(|(small, full)| (small - full).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-3, "{worst}: {small:?} {full:?}");
        }
    }
}

/// Checks that one rank with two shards and two ranks give the same bits, also with frozen weights
/// in NF4 and for preferences.
fn ranks_give_same_bits(kind: DeviceKind) {
    let (device, folder) = (support::open(kind), tempfile::tempdir().unwrap());
    let run = |name: &str, more: &str| {
        let out = folder.path().join(name);
        let data = if more.contains("--preferences") { example("pairs.jsonl") } else { example("chats.jsonl") };
        let more = format!("--context 64 --batch 2 --epochs 1 --overwrite {more}");
        let output = finetune(&device, &data, &out, &more);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report = report(&out);
        (report["weights_sha256"].clone(), report["losses"].clone(), report["rewards"].clone())
    };
    let lora = "--lora 4 --lora-targets q_proj,v_proj,down_proj --lora-dropout 0.1";
    let quantized = format!("{lora} --quantize nf4");
    let small = "--precision bf16 --memory small";
    let preferences = format!("{lora} --preferences dpo");
    for settings in ["", lora, &format!("{lora} --precision bf16 --recompute"), &quantized, small, &preferences] {
        let [one, two] =
            [("one", "--shards 2"), ("two", "--ranks 2")].map(|(name, more)| run(name, &format!("{more} {settings}")));
        assert_eq!(one, two, "{settings}");
    }
}

#[test]
fn emulated_ranks_give_same_bits() {
    ranks_give_same_bits(DeviceKind::Emulated);
}

#[cfg(feature = "cuda")]
mod two_gpus {
    use super::*;

    #[test]
    #[ignore = "needs two NVIDIA GPUs"]
    fn ranks_give_same_bits() {
        super::ranks_give_same_bits(DeviceKind::Cuda);
    }
}

/// Asserts that a run is refused with these words, and that nothing is written.
fn refused(data: &Path, more: &str, words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let output = finetune(&device, data, &out, more);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{more}: {errors}");
    assert!(errors.contains(words), "{more}: {errors}");
    assert!(!out.exists(), "{more}");
}

#[test]
fn bad_input_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let data = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let chats = example("chats.jsonl");
    refused(&data("empty.jsonl", "\n"), "", "has no rows");
    refused(&data("text.jsonl", "Once upon a time\n"), "", "line 1: ");
    refused(&data("user.jsonl", r#"{"messages": [{"role": "user", "content": "a"}]}"#), "", "line 1: `messages`");
    refused(
        &data("pointer.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "",
        "git lfs pull",
    );
    let two = |second: &str| format!("{{\"text\": \"Once upon\"}}\n\n{second}\n");
    refused(&data("row.jsonl", &two(r#"{"text": ""}"#)), "", "row.jsonl: line 3: `text` is empty");
    refused(&data("row.jsonl", &two(r#"{"messages": []}"#)), "", "row.jsonl: line 3: `messages` is empty");
    let answer = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}"#;
    refused(
        &data("row.jsonl", &two(answer)),
        "",
        "line 3: `messages`, message 2: `content`: expected a text, got nothing",
    );
    let role = r#"{"messages": [{"role": "human", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    refused(
        &data("row.jsonl", &two(role)),
        "",
        "line 3: message 1: the chat template does not know the role \"human\"",
    );
    refused(folder.path(), "", "expected a plain file, got a folder");
    refused(&chats, "--context 4", "give a larger --context");
    refused(&chats, "--context 4096", "has a context of 2048");
    refused(&chats, "--lora 4 --lora-targets nothing", "--lora-targets: ");
    refused(&chats, "--patience 2", "add --eval or --eval-share");
    refused(&chats, "--eval-share 0.001", "give another share");
    refused(&chats, "--accumulate 1 --shards 2", "fewer than 2 shards");
    refused(&chats, "--preferences dpo", "line 1: expected `prompt`, `chosen` and `rejected`");
    refused(&chats, "--beta 0.2", "--preferences <PREFERENCES>");
    refused(
        &example("pairs.jsonl"),
        "",
        "line 1: `chosen` and `rejected`: train preferences with `stepscope finetune --preferences dpo`",
    );
    refused(&example("pairs.jsonl"), "--preferences dpo --batch 3", "--batch: 3 contexts cannot be divided into twos");
    refused(&example("pairs.jsonl"), "--preferences dpo --context 8", "give a larger --context");

    let bare = folder.path().join("bare");
    fs::create_dir(&bare).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(example("tiny").join(file), bare.join(file)).unwrap();
    }
    let bare = |more: &str| format!("--weights {} {more}", bare.display());
    refused(&chats, &bare(""), "line 1: the row has `messages`, but the model has no chat template");
    let double = "{% set ns = namespace(s='a') %}\n{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    fs::write(folder.path().join("bare/chat_template.jinja"), double).unwrap();
    refused(&chats, &bare(""), "bare/chat_template.jinja: makes a value of more than 16777216 bytes");
    fs::remove_file(folder.path().join("bare/tokenizer.json")).unwrap();
    refused(&chats, &bare(""), "has no tokenizer.json");
}

/// A run that does not fit into memory is refused before its first update.
#[test]
fn large_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let output = finetune(&device, &example("chats.jsonl"), &out, "--context 2048 --batch 8192");
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("the run needs ") && errors.contains("give a smaller --batch"), "{errors}");
    assert!(!out.join("model.safetensors").exists() && !out.join("log.jsonl").exists());
}

/// BF16 weights give a text too. Prompts that do not fit, and the tokenizer of other weights, are
/// refused.
#[test]
fn generation_in_bf16() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let generate = |more: &[&str]| {
        let weights = example("tiny");
        let own =
            ["--weights", weights.to_str().unwrap(), "--prompt", "What is", "--temperature", "0", "--tokens", "4"];
        run("generate", &device, &own.iter().chain(more).copied().collect::<Vec<_>>())
    };
    // The weights are BF16, and the likeliest tokens are clear.
    let [wide, narrow] = ["f32", "bf16"].map(|precision| generate(&["--precision", precision]));
    assert!(wide.status.success() && narrow.status.success(), "{}{}", text(&wide.stderr), text(&narrow.stderr));
    assert_eq!(text(&wide.stdout), text(&narrow.stdout));
    assert!(!text(&narrow.stdout).trim().is_empty());

    // Nothing of a long prompt is left out without a word.
    let output = generate(&["--context", "1"]);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("--prompt: has ") && errors.contains("a context of 1 for an answer"), "{errors}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let larger = fs::read_to_string(example("tiny").join("tokenizer.json")).unwrap();
    let mut larger: Value = serde_json::from_str(&larger).unwrap();
    for id in larger["model"]["vocab"].as_object_mut().unwrap().values_mut() {
        *id = (id.as_u64().unwrap() + 1000).into();
    }
    fs::write(&path, larger.to_string()).unwrap();
    let output = generate(&["--tokenizer", path.to_str().unwrap()]);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("`What`, but the model's table has 384 rows: remove it from the text"), "{errors}");
}

/// A conversation answers each line of standard input after all earlier messages, and a stop ends
/// an answer.
#[test]
fn conversation_continues_after_each_answer() {
    let weights = example("tiny");
    let generate = |more: &[&str], lines: &str| {
        let own = ["generate", "--device", "emulated", "--temperature", "0", "--tokens", "3", "--weights"];
        let mut child = Command::new(env!("CARGO_BIN_EXE_stepscope"))
            .args(own)
            .arg(&weights)
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    let (answers, report) = generate(&["--chat", "--system", "Be short."], "What is 2+3?\n\n And 4+4?");
    let answers: Vec<&str> = answers.lines().collect();
    let first = "<|begin|><|system|>Be short.<|end|><|user|>What is 2+3?<|end|><|assistant|>";
    let second = format!("{first}{}<|end|><|user|>And 4+4?<|end|><|assistant|>", answers[0]);
    let read = |report: &str| -> usize {
        let words: Vec<&str> = report.split_whitespace().collect();
        let at = words.iter().position(|&word| word == "read").unwrap();
        words[at - 2].parse().unwrap()
    };
    let mut tokens = 0;
    for (answer, prompt) in answers.iter().zip([first, &second]) {
        let (alone, report) = generate(&["--prompt", prompt], "");
        assert_eq!(alone.trim_end_matches('\n'), *answer);
        tokens += read(&report);
    }
    assert_eq!((answers.len(), read(&report)), (2, tokens), "{report}");
    assert!(report.contains("the likeliest tokens; ") && report.contains(" tokens/s)"), "{report}");
    let (alone, _) = generate(&["--chat", "What is 2+3?", "--system", "Be short."], "");
    assert_eq!(alone.trim_end_matches('\n'), answers[0]);
    let stop = &answers[0][1..answers[0].len().min(4)];
    let (stopped, _) = generate(&["--chat", "What is 2+3?", "--system", "Be short.", "--stop", stop], "");
    assert_eq!(stopped.trim_end_matches('\n'), &answers[0][..1]);
}
