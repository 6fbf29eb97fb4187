//! Runs the programs on other inputs than a folder of a model, on adapters whose training
//! continues, and on sizes beyond any machine.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/mod.rs"]
mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use support::example::{program, run, text};
use support::on_each_device;

fn example(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/finetune").join(file)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A value of `--weights` that is no folder of a model is refused, with what to do.
#[test]
fn other_paths_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let with = |name: &str, files: &[(&str, &str)]| {
        let inside = folder.path().join(name);
        fs::create_dir(&inside).unwrap();
        files.iter().for_each(|(file, contents)| fs::write(inside.join(file), contents).unwrap());
        inside.to_str().unwrap().to_owned()
    };
    let tiny = fs::read_to_string(example("tiny/config.json")).unwrap();
    let tokenizer = fs::read_to_string(example("tiny/tokenizer.json")).unwrap();
    let model =
        |name: &str, file: (&str, &str)| with(name, &[("config.json", &tiny), ("tokenizer.json", &tokenizer), file]);
    let gguf = folder.path().join("model-Q4_K_M.gguf");
    fs::write(&gguf, "GGUF").unwrap();
    let weights = example("tiny/model.safetensors");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    for (path, words) in [
        ("meta-llama/Llama-3.2-1B".to_owned(), &["hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"][..]),
        ("nowhere".into(), &["is no folder"]),
        ("/nowhere/at all".into(), &["is no folder"]),
        (gguf.to_str().unwrap().into(), &["is a GGUF file", "config.json"]),
        (weights.to_str().unwrap().into(), &["is a file", "folder of a model"]),
        (with("gguf", &[("model.gguf", "GGUF")]), &["has GGUF files", "original model"]),
        (with("adapter", &[("adapter_config.json", "{}")]), &["is an adapter", "--adapter"]),
        (
            with("meta", &[("consolidated.00.pth", ""), ("params.json", "{}")]),
            &["the version of the model for transformers"],
        ),
        (with("gated", &[("README.md", ""), (".gitattributes", "")]), &["has no config.json", "hf auth login"]),
        (model("bin", ("pytorch_model.bin", "")), &["pytorch_model.bin", "safe_serialization=True"]),
        (model("lfs", ("model.safetensors", pointer)), &["git lfs pull"]),
    ] {
        let chats = example("chats.jsonl");
        for arguments in [
            vec![
                "finetune",
                "--weights",
                &path,
                "--data",
                chats.to_str().unwrap(),
                "--out",
                folder.path().join("out").to_str().unwrap(),
            ],
            vec!["generate", "--weights", &path, "--prompt", "a"],
        ] {
            let output = program(arguments[0]).args(&arguments[1..]).output().unwrap();
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{path}: {error}");
            assert!(words.iter().all(|word| error.contains(word)), "{path}: {error}");
            assert!(!error.contains("::"), "{path}: {error}");
        }
    }
}

/// A model of 6e11 weights, and one whose sizes overflow, end at once.
#[test]
fn sizes_beyond_memory_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (width, hidden, more, word) in [
        (1 << 20, 3072, &[][..], "the most that can be predicted"),
        (1 << 20, 3072, &["--precision", "bf16", "--batch", "1"], "the most that can be predicted"),
        (1 << 26, 1 << 26, &[], "check its sizes"),
        (1024, 3072, &["--batch", "1048576", "--context", "1048576"], "smaller --batch"),
    ] {
        let config = json!({
            "model_type": "qwen3", "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960, "vocab_size": 151_936,
        });
        fs::write(file.path(), config.to_string()).unwrap();
        let output = program("predict").arg("--config").arg(file.path()).args(more).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(word), "{error}");
    }
}

on_each_device! {
    /// The training of an adapter continues with its weights and settings. Other settings next to
    /// it are refused.
    fn training_of_an_adapter_continues(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let finetune = |name: &str, more: &[&str]| {
            let (weights, data, out) = (example("tiny"), example("chats.jsonl"), folder.path().join(name));
            let paths = [&weights, &data, &out].map(|path| path.to_str().unwrap());
            let mut arguments = vec!["--weights", paths[0], "--data", paths[1], "--out", paths[2]];
            arguments.extend("--context 64 --batch 8 --learning-rate 2e-2".split(' ').chain(more.iter().copied()));
            (run("finetune", device, &arguments), out)
        };
        let losses = |out: &Path| -> Vec<f64> {
            json_of(&out.join("report.json"))["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
        };
        let (output, first) = finetune("first", &"--epochs 8 --lora 4 --lora-targets all-linear".split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let adapter = first.join("adapter");
        // The layers that a regular expression chooses, which the export keeps.
        let mut settings = json_of(&adapter.join("adapter_config.json"));
        settings["target_modules"] = json!(r"model\.layers\.\d+\..*_proj");
        fs::write(adapter.join("adapter_config.json"), settings.to_string()).unwrap();
        let of_adapter = ["--adapter", adapter.to_str().unwrap(), "--epochs", "2"];
        for (name, more) in [("more", &[][..]), ("quantized", &["--quantize", "nf4"])] {
            let (output, out) = finetune(name, &[&of_adapter, more].concat());
            assert!(output.status.success(), "{}", text(&output.stderr));
            let (before, after) = (losses(&first), losses(&out));
            assert!((after[0] - before[before.len() - 1]).abs() < 0.3 * (before[0] - before[before.len() - 1]), "{before:?} {after:?}");
            let again = json_of(&out.join("adapter/adapter_config.json"));
            for key in ["r", "lora_alpha", "target_modules"] {
                assert_eq!(again[key], settings[key], "{key}");
            }
        }
        for (more, word) in [
            (&["--lora", "4"][..], "--lora"),
            (&["--lora-alpha", "4"], "--lora"),
            (&["--lora-targets", "q_proj"], "--lora"),
            (&["--lora-dropout", "0.1"], "--lora"),
        ] {
            let (output, _) = finetune("refused", &[&of_adapter, more].concat());
            assert_eq!(output.status.code(), Some(2), "{more:?}");
            assert!(text(&output.stderr).contains(word), "{}", text(&output.stderr));
        }
        let tiny = example("tiny");
        for (adapter, word) in [(tiny.to_str().unwrap(), "is no folder of an adapter"), ("someone/adapter", "is no folder of an adapter")] {
            let (output, _) = finetune("refused", &["--adapter", adapter]);
            assert_eq!(output.status.code(), Some(2));
            assert!(text(&output.stderr).contains(word), "{}", text(&output.stderr));
        }
        let (output, _) = finetune("refused", &["--lora", "4", "--lora-targets", "q_proj,no_proj"]);
        let error = text(&output.stderr);
        assert!(error.contains("--lora-targets") && error.contains("no_proj") && !error.contains("Targets"), "{error}");
    }
}
