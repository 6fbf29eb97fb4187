//! The language models give the same bits however they run, and refuse unsuitable files.
//! `tests/train.rs` runs the program.

mod documents;
mod token_files;
mod tokenizer_json;

use super::cli::{Arch, Args, Size};
use super::plan::Plan;
use super::text::Text;
use super::tokenizer::Tokenizer;
use super::{model, registry, sample, weights};
use crate::program::workers::Workers;
use crate::run::cli::RunArgs;
use crate::run::folder::ModelFolder;
use crate::run::memory;
use crate::support::{self, on_each_device};
use crate::train::cli::Precision;
use clap::Parser;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use stepscope::data::{SplitMix64, TokenSampler, TokenSamplerConfig};
use stepscope::files::StateDict;
use stepscope::models::{Transformer, Weights};
use stepscope::ops::Activation;
use stepscope::{Arena, Capacity, Device, Tape, TrainState, ops};
use tempfile::TempDir;

/// Returns a folder with a text of this many random words.
fn folder(words: usize) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut random = SplitMix64::new(5);
    let text: String =
        (0..words).map(|_| ["let ", "mut ", "fn ", "x = ", "y;\n", "\0"][(random.next_u64() % 6) as usize]).collect();
    let path = folder.path().join("text.txt");
    fs::write(&path, text).unwrap();
    (folder, path)
}

/// Returns the arguments of a small run, and `more`.
fn arguments(data: &Path, out: &Path, more: &str) -> Args {
    let own = format!(
        "gpt --data {} --out {} --context 16 --batch 2 --updates 5 --evaluate-every 3 --warmup 1 --optimizer adamw",
        data.display(),
        out.display()
    );
    Args::parse_from(own.split(' ').chain(more.split_whitespace()))
}

/// The digest of the weights after a captured run of [`arguments`] on 400 words of [`folder`].
const GOLDEN: &str = "9e590e3687fc98b6b99d0488d3b91666e9dca93214474bfa96f30272b55a8cea";

/// The results of a run: the digest of its weights, and the bits of all losses.
type Bits = (String, Vec<u64>);

/// Runs to the end, or to the stop.
fn trained(device: &Device, args: &Args, stopped: bool) -> Option<Bits> {
    match args.run.precision {
        Precision::Bf16 => trained_as::<half::bf16>(device, args, stopped),
        _ => trained_as::<f32>(device, args, stopped),
    }
}

fn trained_as<S: Activation>(device: &Device, args: &Args, stopped: bool) -> Option<Bits> {
    let plan = Plan::load(args, 1).unwrap();
    let state = plan.state::<S>(device).unwrap();
    let mut arena = memory::arena(device, args.run.arena_mib, plan.memory::<S>(device).unwrap()).unwrap();
    let stop = AtomicBool::new(stopped);
    let trainer = plan.trainer(&mut arena, state).unwrap();
    let mut trainer = trainer.checkpoint(args.out.join("model.safetensors"), None).stop_when(&stop);
    let position = plan.train(&mut trainer, &args.out, true).unwrap()?.position;
    let losses = position.losses.iter().chain(position.evaluations.iter().map(|evaluation| &evaluation.loss));
    let losses = losses.map(|loss| loss.to_bits()).collect();
    Some((trainer.state().parameters.sha256().unwrap(), losses))
}

on_each_device! {
    /// The bits are the same captured and eager, with and without recomputing, and with and without
    /// a stop after each update.
    fn run_modes_give_same_bits(device: &Device) {
        let (folder, data) = folder(400);
        for arch in ["--arch gpt2", "--arch llama --documents --accumulate 2"] {
            let run = |more: &str| {
                trained(device, &arguments(&data, folder.path(), &format!("{arch} {more}")), false).unwrap()
            };
            let captured = run("");
            assert_eq!(captured.1.len(), 5 + 2, "{arch}: 5 updates, and evaluations after the third and the last");
            assert_eq!(run("--eager"), captured, "{arch}: eager");
            assert_eq!(run("--recompute"), captured, "{arch}: recomputed");
            assert_eq!(run("--eager --recompute"), captured, "{arch}: eager and recomputed");
            assert_ne!(run("--seed 8"), captured, "{arch}: another seed");

            let checkpoint = folder.path().join("model.safetensors");
            let resume = format!("{arch} --resume {}", checkpoint.display());
            let mut stops = 0;
            assert_eq!(trained(device, &arguments(&data, folder.path(), arch), true), None);
            let resumed = loop {
                stops += 1;
                if let Some(bits) = trained(device, &arguments(&data, folder.path(), &resume), true) {
                    break bits;
                }
            };
            assert_eq!((stops, resumed), (5, captured), "{arch}: resuming after each update must change nothing");
        }
    }

    /// Muon's runs have the same bits captured, eager and resumed, and are not resumed with AdamW.
    fn muon_modes_give_same_bits(device: &Device) {
        let (folder, data) = folder(400);
        let config = folder.path().join("config.json");
        let json = model::config(Size::Tiny, Arch::Llama, 256, 16).to_json("float32");
        let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
        for (name, value) in [("hidden_size", 32), ("head_dim", 8), ("intermediate_size", 64), ("num_hidden_layers", 1)] {
            json[name] = value.into();
        }
        fs::write(&config, json.to_string()).unwrap();
        let of = |more: &str| arguments(&data, folder.path(), &format!("--config {} {more}", config.display()));
        let run = |more: &str, stopped: bool| trained(device, &of(more), stopped);
        let captured = run("--optimizer muon", false).unwrap();
        assert_eq!(run("--optimizer muon --eager", false).unwrap(), captured);
        assert_ne!(run("", false).unwrap(), captured);
        assert_eq!(run("--optimizer muon", true), None);
        let resume = format!("--resume {}", folder.path().join("model.safetensors").display());
        let args = of(&resume);
        let plan = Plan::load(&args, 1).unwrap();
        let state = plan.state::<f32>(device).unwrap();
        let mut arena = memory::arena(device, None, plan.memory::<f32>(device).unwrap()).unwrap();
        let error = plan.train(&mut plan.trainer(&mut arena, state).unwrap(), folder.path(), true).err().unwrap();
        assert!(error.to_string().contains("optimizer"), "{error}");
        assert_eq!(run(&format!("--optimizer muon {resume}"), false).unwrap(), captured);
        let error = Plan::load(&of("--optimizer muon --memory small"), 1).err().unwrap().to_string();
        assert!(error.contains("--optimizer: muon needs --memory full"), "{error}");
    }

    /// A short f32 training ends with the same weights on every device, in every run and in every
    /// version. A change that alters a bit must declare it.
    fn training_matches_golden_digest(device: &Device) {
        let (folder, data) = folder(400);
        assert_eq!(trained(device, &arguments(&data, folder.path(), "--arch gpt2"), false).unwrap().0, GOLDEN);
    }

    /// BF16 and TF32 learn nearly as well as f32.
    fn low_precision_products_learn(device: &Device) {
        let (folder, data) = folder(400);
        let loss = |more: &str| {
            let (_, losses) = trained(device, &arguments(&data, folder.path(), more), false).unwrap();
            f64::from_bits(losses[4])
        };
        for arch in ["gpt2", "llama"] {
            let exact = loss(&format!("--arch {arch}"));
            for precision in ["tf32", "bf16"] {
                let other = loss(&format!("--arch {arch} --precision {precision}"));
                assert!(other != exact && (other - exact).abs() < 0.02, "{arch} {precision}: {other}, f32 {exact}");
            }
        }
    }

    /// A seed always writes the same text, and another seed writes another.
    fn seed_determines_sampled_text(device: &Device) {
        let (folder, data) = folder(400);
        let args = arguments(&data, folder.path(), "");
        let plan = Plan::load(&args, 1).unwrap();
        let state = plan.state::<f32>(device).unwrap();
        let write = |seed, temperature| {
            let config = TokenSamplerConfig { temperature, top_k: Some(40), top_p: Some(0.9) };
            let sampler = TokenSampler::new(config, seed).unwrap();
            sample::write(device, &state.model, &state.parameters, &[5, 6, 7], 10, &[], &sampler).unwrap()
        };
        let text = write(7, 1.0);
        assert!(text == write(7, 1.0) && text != write(8, 1.0) && text.len() == 10, "{text:?}");
        assert_eq!(write(7, 0.0), write(8, 0.0), "with temperature 0 the seed must not matter");
    }

    /// Generation token by token with a key-value cache gives the same greedy text as recomputing
    /// the whole text for each token. A batch-invariant step takes more memory for it.
    fn cache_keeps_greedy_text(device: &Device) {
        let (folder, data) = folder(400);
        let greedy = TokenSamplerConfig { temperature: 0.0, ..TokenSamplerConfig::default() };
        let mut greedy = TokenSampler::new(greedy, 0).unwrap();
        for arch in ["gpt2", "llama"] {
            let args = arguments(&data, folder.path(), &format!("--arch {arch} --updates 30"));
            let plan = Plan::load(&args, 1).unwrap();
            let state = plan.state::<f32>(device).unwrap();
            let mut arena = memory::arena(device, args.run.arena_mib, plan.memory::<f32>(device).unwrap()).unwrap();
            let mut trainer = plan.trainer(&mut arena, state).unwrap();
            plan.train(&mut trainer, &args.out, true).unwrap().unwrap();
            let TrainState { model, parameters, .. } = trainer.state();
            let mut other = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
            let mut tokens = b"let".map(u32::from).to_vec();
            while tokens.len() < 16 {
                let logits = other.step(|step| {
                    let tape = Tape::new(step, parameters).evaluating();
                    let hidden = model.hidden(&tape, step.upload_indices(&tokens, [1, tokens.len()])?, None)?;
                    let last = ops::slice(step, hidden.value(), 1, tokens.len() - 1..tokens.len())?;
                    step.read(&model.layers.logits(step, parameters, &last)?)
                });
                tokens.push(greedy.next(&logits.unwrap()).unwrap());
            }
            let written = &tokens[3..];
            assert!(written.iter().any(|&token| token != written[0]), "{arch} must write different tokens: {written:?}");
            let [fast, invariant] = [false, true].map(|batch_invariant| {
                let (sampler, repetition_penalty) = (&greedy, 1.0);
                let (beginning, ends) = (&tokens[..3], &[]);
                let text =
                    sample::Text { beginning, count: 100, ends, sampler, repetition_penalty, batch_invariant };
                let mut got = Vec::new();
                let mut each = |token| {
                    got.push(token);
                    true
                };
                sample::stream(device, model, parameters, &text, &mut each).unwrap();
                assert_eq!(got, written, "{arch}, batch-invariant: {batch_invariant}");
                let empty = |device: &Device| {
                    let state = plan.state::<f32>(device).unwrap();
                    Ok((state.model, state.parameters))
                };
                sample::needed_bytes(device, empty, &text).unwrap()
            });
            assert!(invariant > fast, "{arch}: {invariant} bytes, {fast} with fewer keys");
        }
    }

    /// Weights written for transformers are read back, in one file and in shards. Weights that do
    /// not fit are refused by name.
    fn exported_weights_round_trip(device: &Device) {
        let (folder, data) = folder(400);
        for arch in ["gpt2", "llama"] {
            let args = arguments(&data, folder.path(), &format!("--arch {arch}"));
            let plan = Plan::load(&args, 1).unwrap();
            let state = plan.state::<f32>(device).unwrap();
            let theirs = folder.path().join(arch);
            // About 3 MB in total. Shards come first, and none of them may remain afterwards.
            for (most, files) in [(Some(1_000_000), 4), (None, 1)] {
                Weights::write(&theirs, &plan.config, &state.parameters, most).unwrap();
                let shards = fs::read_dir(&theirs).unwrap().map(|entry| entry.unwrap().path());
                let shards: Vec<_> = shards.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
                assert_eq!(shards.len(), files, "{arch}: {shards:?}");
                let mut fresh = Plan::load(&Args { run: RunArgs { seed: 8, ..args.run.clone() }, ..args.clone() }, 1).unwrap().state::<f32>(device).unwrap();
                weights::load(&theirs, &mut fresh.parameters).unwrap();
                assert_eq!(fresh.parameters.sha256(), state.parameters.sha256(), "{arch} in {files} files");
            }
            let (_, back) = weights::open(&theirs, None).unwrap();
            assert_eq!(back.layers, plan.config.layers, "{arch}");
            // The place of row 3 and column 2 of the keys.
            let flat = state.parameters.read_flat().unwrap();
            let qkv = state.parameters.spec().entries().iter().find(|entry| entry.name().ends_with("qkv_proj.weight"));
            let qkv = qkv.unwrap();
            let ours = flat[qkv.start() + 2 * qkv.shape().extents()[1] + 128 + 1];
            let (name, place) = match arch {
                "gpt2" => ("transformer.h.0.attn.c_attn.weight", 2 * 384 + 128 + 1),
                _ => ("model.layers.0.self_attn.k_proj.weight", 128 + 2),
            };
            let mut tensors = Weights::tensors(&plan.config, &state.parameters).unwrap();
            assert_eq!(StateDict::from_pretrained(&theirs, |_| false).unwrap(), tensors, "{arch}");
            assert_eq!(tensors.remove(name).unwrap().1[place].to_bits(), ours.to_bits(), "{arch}");
        }
    }
}

/// Changes the tensors of a folder's file, and optionally splits it into two shards.
fn changed(theirs: &Path, shards: bool, change: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};
    let file = theirs.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> =
        read.iter().map(|(name, tensor)| (name.to_owned(), tensor.shape().to_vec(), tensor.data().to_vec())).collect();
    change(&mut tensors);
    let write = |path: &Path, tensors: &[(String, Vec<usize>, Vec<u8>)]| {
        let view = |(name, shape, bytes): &(String, Vec<usize>, Vec<u8>)| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap().data().to_vec(), shape.clone())
        };
        let kept: Vec<_> = tensors.iter().map(view).collect();
        let views =
            kept.iter().map(|(name, bytes, shape)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    };
    if !shards {
        return write(&file, &tensors);
    }
    fs::remove_file(&file).unwrap();
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (name, part) in [("model-1.safetensors", first), ("model-2.safetensors", second)] {
        write(&theirs.join(name), part);
        map.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), name.into())));
    }
    let index = serde_json::json!({ "weight_map": map });
    fs::write(theirs.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn config_file_gives_new_model() {
    let (folder, data) = folder(400);
    let device = support::open(stepscope::DeviceKind::Emulated);
    let args = arguments(&data, folder.path(), "");
    let plan = Plan::load(&args, 1).unwrap();
    let parameters = plan.state::<f32>(&device).unwrap().parameters;
    let theirs = folder.path().join("theirs");
    Weights::write(&theirs, &plan.config, &parameters, None).unwrap();
    let of_file = |more: &str| {
        let config = theirs.join("config.json");
        arguments(&data, folder.path(), &format!("--config {} {more}", config.display()))
    };
    let args = of_file("");
    let made = Plan::load(&args, 1).unwrap().state::<f32>(&device).unwrap().parameters;
    assert_eq!(made.sha256(), parameters.sha256());
    for (more, expected) in [
        ("--context 17", "--config: has a context of 16, got --context 17"),
        ("--tokenizer gpt2", "--config: has a vocabulary of 256, but gpt2 has 50257: give a smaller --tokenizer"),
    ] {
        let error = Plan::load(&of_file(more), 1).err().expect("refused").to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    }
}

#[test]
fn unsuitable_weights_are_refused_by_name() {
    let (folder, data) = folder(400);
    let device = support::open(stepscope::DeviceKind::Emulated);
    let fresh = |arch: &str| {
        let args = arguments(&data, folder.path(), &format!("--arch {arch}"));
        let plan = Plan::load(&args, 1).unwrap();
        let theirs = folder.path().join(arch);
        let _ = fs::remove_dir_all(&theirs);
        Weights::write(&theirs, &plan.config, &plan.state::<f32>(&device).unwrap().parameters, None).unwrap();
        theirs
    };
    let refused = |theirs: &Path, expected: &str| {
        let error = weights::open(theirs, None).map(drop).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    };
    let theirs = fresh("llama");
    let name = "model.layers.3.self_attn.k_proj.weight";
    changed(&theirs, true, |_| ());
    weights::open(&theirs, None).unwrap();
    let theirs = fresh("llama");
    let _ = fs::remove_file(theirs.join("model.safetensors.index.json"));
    changed(&theirs, false, |tensors| tensors.retain(|(tensor, ..)| tensor != name));
    refused(&theirs, &format!("has no `{name}` [64, 128]"));
    let theirs = fresh("llama");
    changed(&theirs, false, |tensors| {
        let tensor = tensors.iter_mut().find(|(tensor, ..)| tensor == name).unwrap();
        tensor.1 = vec![128, 64];
    });
    refused(&theirs, &format!("`{name}`: config.json requires [64, 128], got [128, 64]"));
    let theirs = fresh("gpt2");
    changed(&theirs, false, |tensors| tensors.push(("transformer.h.4.ln_1.weight".into(), vec![1], vec![0; 4])));
    refused(&theirs, "has `transformer.h.4.ln_1.weight`, which is not a weight of this model");
    let theirs = fresh("gpt2");
    let config = fs::read_to_string(theirs.join("config.json")).unwrap();
    fs::write(theirs.join("config.json"), config.replace("gelu_new", "relu")).unwrap();
    refused(&theirs, "`activation_function`: expected");
    fs::write(theirs.join("config.json"), config.replace("\"gpt2\"", "\"bert\"")).unwrap();
    refused(&theirs, "`model_type`: expected gpt2, llama,");
    let weights = theirs.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(theirs.join("config.json"), config).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 4]).unwrap();
    refused(&theirs, "model.safetensors: ");
}

#[test]
fn half_precision_weights_load_exactly() {
    use half::{bf16, f16};
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};
    type Rounded = (Dtype, fn(f32) -> [u8; 2], fn(f32) -> f32);
    let (folder, data) = folder(400);
    let args = arguments(&data, folder.path(), "");
    let plan = Plan::load(&args, 1).unwrap();
    let mut state = plan.state::<f32>(&support::open(stepscope::DeviceKind::Emulated)).unwrap();
    let ours = state.parameters.read_flat().unwrap();
    let theirs = folder.path().join("theirs");
    Weights::write(&theirs, &plan.config, &state.parameters, None).unwrap();
    let path = theirs.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&whole).unwrap();
    let types: [Rounded; 2] = [
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes(), |x| bf16::from_f32(x).to_f32()),
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes(), |x| f16::from_f32(x).to_f32()),
    ];
    for (dtype, bytes, rounded) in types {
        let narrow = |(name, tensor): (&str, TensorView<'_>)| {
            let numbers = tensor.data().as_chunks().0.iter().map(|&four| f32::from_le_bytes(four));
            (name.to_owned(), tensor.shape().to_vec(), numbers.flat_map(bytes).collect::<Vec<u8>>())
        };
        let tensors: Vec<_> = file.iter().map(narrow).collect();
        let view = |bytes, shape: &Vec<usize>| TensorView::new(dtype, shape.clone(), bytes).unwrap();
        let views = tensors.iter().map(|(name, shape, bytes)| (name, view(bytes, shape)));
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        weights::load(&theirs, &mut state.parameters).unwrap();
        let want: Vec<f32> = ours.iter().map(|&x| rounded(x)).collect();
        assert!(want != ours && state.parameters.read_flat().unwrap() == want, "{dtype:?}");
    }
}

#[test]
fn weight_counts_match_gpt2() {
    let known = [
        (Size::Small, 124_439_808),
        (Size::Medium, 354_823_168),
        (Size::Large, 774_030_080),
        (Size::Xl, 1_557_611_200),
    ];
    for (size, weights) in known {
        let of = |arch, vocabulary| Transformer::new(model::config(size, arch, vocabulary, 1024)).unwrap().1.weights();
        assert_eq!(of(Arch::Gpt2, 50_257), weights, "{size:?}");
        assert!(of(Arch::Llama, 32_000) > 0);
    }
}

/// Returns the text of these files, for samples of 64 tokens.
fn loaded(paths: &[PathBuf], tokenizer: &Tokenizer) -> Text {
    let workers = Workers::new();
    Text::load(&super::documents::read(paths, &workers).unwrap(), tokenizer, 64, false, &workers).unwrap()
}

#[test]
fn token_file_formats_load_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..5000).map(|at| at * 7 % 50_257).collect();
    let narrow: Vec<u8> = tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect();
    let wide: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let header = |magic: u32, version: u32| {
        let mut header: Vec<u8> = [magic, version, 5000].iter().flat_map(|number| number.to_le_bytes()).collect();
        header.resize(1024, 0);
        header
    };
    let gpt2 = Tokenizer::open("gpt2").unwrap();
    let formats = [narrow.clone(), [header(20_240_520, 1), narrow].concat(), [header(20_240_801, 7), wide].concat()];
    let mut digests = Vec::new();
    for (number, bytes) in formats.iter().enumerate() {
        let path = folder.path().join(format!("{number}.bin"));
        fs::write(&path, bytes).unwrap();
        let text = loaded(&[path.clone(), path], &gpt2);
        assert_eq!(text.sources()[0].held_out, 9500..10_000);
        // A range across the border of two files.
        let mut read = Vec::new();
        text.read(4990..5010, &mut read).unwrap();
        assert_eq!(read, [&tokens[4990..], &tokens[..10]].concat(), "format {number}");
        digests.push(text.sha256);
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "the same tokens have the same digest: {digests:?}");
}

#[test]
fn truncated_token_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, vec![0; 10_000]).unwrap();
    let text = loaded(std::slice::from_ref(&path), &Tokenizer::open("gpt2").unwrap());
    fs::write(&path, [0; 100]).unwrap();
    let error = text.read(1000..1064, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("tokens.bin: has changed since it was opened"), "{error}");
}

#[test]
fn tokens_match_other_tokenizers() {
    let gpt2 = Tokenizer::open("gpt2").unwrap();
    // The tokens that OpenAI's tiktoken and transformers give.
    assert_eq!(gpt2.encode("", b"Hello, world!").unwrap(), [15_496, 11, 995, 0]);
    assert_eq!((gpt2.vocabulary(), gpt2.end()), (50_257, Some(50_256)));
    assert_eq!(gpt2.decode(&[15_496, 11, 995, 0, 50_300]), "Hello, world!");
    let bytes = Tokenizer::open("bytes").unwrap();
    assert_eq!(bytes.encode("", &[255, 65]).unwrap(), [255, 65]);
    assert_eq!(bytes.decode(&[65, 66, 300]), "AB");
}

/// Decoded tokens are the text again, whatever it contains, and a written tokenizer has the same
/// tokens.
#[test]
fn trained_tokenizer_keeps_texts() {
    let texts = [include_str!("tokenizer.rs"), include_str!("documents.rs")];
    let trained = Tokenizer::train(&texts, 500).unwrap();
    assert_eq!((trained.vocabulary(), trained.end()), (500, Some(0)));
    assert_eq!(Tokenizer::train(&texts, 500).unwrap().name(), trained.name());
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in trained.files() {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    let read = ModelFolder::open(folder.path()).unwrap();
    let chat = [json!({ "role": "user", "content": "let" }), json!({ "role": "assistant", "content": "x;" })];
    let tokens = read.chat("", &chat).unwrap();
    assert_eq!(trained.decode(&tokens), "user\nlet<|endoftext|>assistant\nx;<|endoftext|>assistant\n");
    assert_eq!((tokens.iter().filter(|&&token| token == 0).count(), read.end()), (2, Some(0)));
    let read = read.tokenizer;
    assert_eq!(read.name(), trained.name());
    for (text, most) in [("use std::path::Path;\n", 10), ("\tZ\u{fc}rich, \u{1f600}\r\n  \0", 40)] {
        let tokens = trained.encode("", text.as_bytes()).unwrap();
        assert!(tokens.len() <= most, "{tokens:?}");
        assert_eq!(trained.decode(&tokens), text);
        assert_eq!(read.encode("", text.as_bytes()).unwrap(), tokens);
    }
    // One end, all bytes, and three merges: aa, aaa, and a space before aaa.
    assert_eq!(Tokenizer::train(&["aaa aaa"], 500).unwrap().vocabulary(), 1 + 256 + 3);
}

#[test]
fn registry_text_is_reproducible() {
    let files = registry::sources().unwrap();
    let first = files[0].to_str().unwrap();
    assert!(files.len() > 300 && first.contains("bytemuck-"), "{} files, the first {first}", files.len());
    assert_eq!(files, registry::sources().unwrap());
}
