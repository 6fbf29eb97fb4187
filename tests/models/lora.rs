//! Adapters: logits, loss, gradients, updates and merged weights are those of PEFT in float64, and
//! a written adapter holds what was read.
//!
//! `tests/models/make_lora.py` writes the cases. STEPSCOPE_LORA names a folder that receives
//! written adapters and merged models, which the same program loads in PEFT.

use super::support::{on_each_device, relative_l2};
use super::{Expected, LIMIT, case};
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};
use stepscope::files::StateDict;
use stepscope::models::{Lora, ModelConfig, Targets, Transformer, WeightFiles, Weights};
use stepscope::ops::LmHeadConfig;
use stepscope::parameters::{FrozenType, ParameterEntry};
use stepscope::prelude::*;

const UPDATES: usize = 100;

fn folders() -> Vec<PathBuf> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/lora");
    let mut folders: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

/// An adapter with its model, loaded from their files.
pub(super) struct Adapted {
    pub(super) lora: Lora,
    pub(super) model: Transformer,
    pub(super) parameters: Parameters,
    expected: Expected,
    losses: Vec<f64>,
}

impl Adapted {
    fn read(device: &Device, folder: &Path) -> Self {
        let base = case(Lora::read(folder).unwrap().base_model.as_ref().unwrap());
        let files = WeightFiles::open(&base).unwrap();
        Self::with(device, folder, &base, |entry| files.stored(entry))
    }

    /// Loads an adapter and its model, whose own weights are frozen in these types.
    pub(super) fn with(
        device: &Device,
        folder: &Path,
        base: &Path,
        stored: impl Fn(&ParameterEntry) -> FrozenType,
    ) -> Self {
        let lora = Lora::read(folder).unwrap();
        let mut files = WeightFiles::open(base).unwrap();
        let (model, spec) = Transformer::with_lora(files.config().clone(), &lora, stored).unwrap();
        let mut parameters = Parameters::new(device, &spec, 1).unwrap();
        files.load(&mut parameters).unwrap();
        lora.load(folder, model.config(), &mut parameters).unwrap();
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        let losses = SafeTensors::deserialize(&bytes).unwrap().tensor("losses").unwrap().data().to_vec();
        let expected = Expected::read(folder);
        Self { lora, model, parameters, expected, losses: bytemuck::pod_collect_to_vec(&losses) }
    }

    fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Computes the loss of a step.
    fn loss<'s>(&self, step: &EagerStep<'s>, tape: &Tape<'_, 's>) -> Result<(Var<'s>, Var<'s>)> {
        let ids = step.upload_indices(&self.expected.ids, self.expected.shape)?;
        let labels = step.upload_indices(&self.expected.labels, self.expected.shape)?;
        let hidden = self.model.forward(tape, ids, None)?;
        let head = LmHeadConfig::default().tied();
        let loss = tape.linear_cross_entropy(&hidden, self.model.head(), labels, head)?;
        Ok((hidden, loss))
    }

    /// Returns logits, loss and gradients.
    pub(super) fn results(&self, arena: &mut Arena) -> (Vec<f32>, Vec<f32>, Gradients) {
        let mut gradients = Gradients::zeros(&self.parameters).unwrap();
        let (logits, loss) = arena
            .step(|step| {
                let tape = Tape::new(step, &self.parameters);
                let (hidden, loss) = self.loss(step, &tape)?;
                let logits = step.read(&self.model.logits(step, &self.parameters, hidden.value())?)?;
                let value = step.read(loss.value())?;
                // A merged model may have nothing left to train.
                if loss.wants_gradient() {
                    tape.backward_overwrite(&loss, &mut gradients)?;
                }
                Ok((logits, value))
            })
            .unwrap();
        (logits, loss, gradients)
    }
}

impl Adapted {
    /// Checks logits, loss and gradients.
    pub(super) fn agrees(&self, device: &Device, label: &str) {
        let (logits, loss, gradients) = self.results(&mut arena(device));
        let mut worst: f64 = 0.0;
        let mut compared = 0;
        let mut compare = |name: String, ours: &[f32]| {
            let results = &self.expected.results;
            let want = results.get(&name).unwrap_or_else(|| panic!("{label}: {name}"));
            let (difference, limit) = (relative_l2(ours, want), LIMIT.max(3.0 * results[&format!("f32.{name}")][0]));
            assert!(difference <= limit, "{label}: {name} differs by {difference:e}");
            worst = worst.max(difference);
            compared += 1;
        };
        compare("logits".into(), &logits);
        compare("loss".into(), &loss);
        for (name, _, gradient) in self.lora.gradients(self.config(), &gradients).unwrap().iter() {
            compare(format!("gradient.{name}"), gradient);
        }
        let known = |name: &&String| name.starts_with("gradient.");
        assert_eq!(compared - 2, self.expected.results.keys().filter(known).count(), "{label}");
        println!("{label}: differs by at most {worst:.1e}");
    }

    /// Checks the losses of 100 updates.
    pub(super) fn updates_agree(&mut self, device: &Device, label: &str) {
        let rule = AdamW { learning_rate: 1e-3, weight_decay: 0.01, ..AdamW::default() };
        let mut optimizer = Optimizer::new(&self.parameters, rule).unwrap();
        let mut gradients = Gradients::zeros(&self.parameters).unwrap();
        let mut arena = arena(device);
        let mut worst: f64 = 0.0;
        assert_eq!(self.losses.len(), UPDATES);
        for want in self.losses.clone() {
            let loss = arena.step(|step| {
                let tape = Tape::new(step, &self.parameters);
                let (_, loss) = self.loss(step, &tape)?;
                let value = step.read(loss.value())?;
                tape.backward_overwrite(&loss, &mut gradients)?;
                Ok(f64::from(value[0]))
            });
            worst = worst.max((loss.unwrap() / want - 1.0).abs());
            let ticket = optimizer.advance().unwrap();
            arena.step(|step| optimizer.apply(ticket, step, &mut self.parameters, &gradients)).unwrap();
        }
        println!("{label}: losses differ by at most {worst:.1e}");
        assert!(worst <= 1e-6, "{label}: {worst:e}");
    }
}

pub(super) fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap()
}

on_each_device! {
    fn adapters_agree_with_peft(device: &Device) {
        for folder in folders() {
            Adapted::read(device, &folder).agrees(device, &folder.display().to_string());
        }
    }

    /// Each loss of 100 updates is within 1e-6 of PEFT's in float64.
    fn updates_agree_with_peft(device: &Device) {
        for folder in folders() {
            Adapted::read(device, &folder).updates_agree(device, &folder.display().to_string());
        }
    }

    /// Merged weights are PEFT's, and a model with them has the logits of the adapter. All other
    /// weights keep their bits. A written adapter holds the tensors and the settings that were
    /// read.
    fn merged_and_written_adapters_agree(device: &Device) {
        let kept = std::env::var_os("STEPSCOPE_LORA").map(PathBuf::from);
        for folder in folders() {
            let adapted = Adapted::read(device, &folder);
            let scratch = tempfile::tempdir().unwrap();
            let written = kept.as_deref().unwrap_or(scratch.path()).join(folder.file_name().unwrap());
            let merged = Weights::merged(&adapted.model, &adapted.parameters).unwrap();
            let plain = Weights::tensors(adapted.config(), &adapted.parameters).unwrap();
            let mut changed = 0;
            for ((name, _, merged), (_, _, plain)) in merged.iter().zip(plain.iter()) {
                match adapted.expected.results.get(&format!("merged.{name}")) {
                    // Modules that are trained as a whole are the same before and after a merge.
                    Some(want) => {
                        let difference = relative_l2(merged, want);
                        assert!(difference <= 2e-7, "{}: {name} differs by {difference:e}", folder.display());
                        changed += 1;
                    }
                    None => assert!(merged == plain, "{}: {name} has changed", folder.display()),
                }
            }
            let known = |name: &&String| name.starts_with("merged.");
            assert_eq!(changed, adapted.expected.results.keys().filter(known).count(), "{}", folder.display());
            Weights::write_merged(written.join("merged"), &adapted.model, &adapted.parameters, None).unwrap();
            adapted.lora.write(written.join("adapter"), adapted.config(), &adapted.parameters).unwrap();
            let [before, after] = [folder.clone(), written.join("adapter")].map(|folder| {
                StateDict::read(folder.join("adapter_model.safetensors")).unwrap()
            });
            assert_eq!(before, after, "{}", folder.display());
            let again = Lora::read(written.join("adapter")).unwrap();
            let modules = |lora: &Lora| lora.modules(adapted.config()).unwrap();
            assert_eq!(modules(&again), modules(&adapted.lora));
            let without_targets = |lora: &Lora| Lora { targets: Targets::AllLinear, ..lora.clone() };
            assert_eq!(without_targets(&again), without_targets(&adapted.lora), "{}", folder.display());
        }
    }

    /// A model whose adapters were merged into its weights has the logits of PEFT.
    fn merged_layers_agree(device: &Device) {
        for folder in folders() {
            let Adapted { model, mut parameters, expected, lora, losses } = Adapted::read(device, &folder);
            let model = model.merge(&mut parameters).unwrap();
            let merged = Adapted { model, parameters, expected, lora, losses };
            let (logits, _, gradients) = merged.results(&mut arena(device));
            let difference = relative_l2(&logits, &merged.expected.results["logits"]);
            assert!(difference <= LIMIT, "{}: {difference:e}", folder.display());
            // The layers no longer use the adapters.
            for entry in gradients.spec().entries().iter().filter(|entry| entry.name().contains(".lora_")) {
                let unused = gradients.read_flat().unwrap()[entry.range()].iter().all(|&gradient| gradient == 0.0);
                assert!(unused, "{}", entry.name());
            }
        }
    }

    /// A fresh adapter adds nothing, and trains nothing but itself. Recompute changes no bit.
    fn fresh_adapters_add_nothing(device: &Device) {
        for folder in folders() {
            let adapted = Adapted::read(device, &folder);
            let mut files = WeightFiles::open(case(adapted.lora.base_model.as_ref().unwrap())).unwrap();
            let lora = Lora { modules_to_save: Vec::new(), ..adapted.lora.clone() };
            let (model, spec) = Transformer::with_lora(files.config().clone(), &lora, |entry| files.stored(entry)).unwrap();
            assert!(spec.entries().iter().all(|entry| entry.name().contains(".lora_")), "{}", folder.display());
            let mut parameters = Parameters::new(device, &spec, 1).unwrap();
            files.load(&mut parameters).unwrap();
            let fresh = Adapted { lora, model, parameters, ..adapted };
            let (logits, _, gradients) = fresh.results(&mut arena(device));
            let (plain, plain_spec) = Transformer::frozen(fresh.config().clone(), |entry| Some(files.stored(entry))).unwrap();
            let mut base = Parameters::new(device, &plain_spec, 1).unwrap();
            files.load(&mut base).unwrap();
            let base = Adapted { model: plain, parameters: base, ..fresh };
            let (want, ..) = base.results(&mut arena(device));
            assert_eq!(logits, want, "{}", folder.display());
            let all = gradients.read_flat().unwrap();
            for entry in spec.entries() {
                let is_zero = all[entry.range()].iter().all(|&gradient| gradient == 0.0);
                assert_eq!(is_zero, entry.name().contains("lora_a"), "{}: {}", folder.display(), entry.name());
            }
        }
    }

    /// Recompute keeps the bits of logits, loss and gradients.
    fn recompute_keeps_the_bits(device: &Device) {
        for folder in folders() {
            let mut adapted = Adapted::read(device, &folder);
            let (logits, loss, gradients) = adapted.results(&mut arena(device));
            adapted.model = adapted.model.recompute(true);
            let (again, loss_again, gradients_again) = adapted.results(&mut arena(device));
            assert_eq!((&logits, &loss), (&again, &loss_again), "{}", folder.display());
            assert_eq!(gradients.read_flat().unwrap(), gradients_again.read_flat().unwrap());
        }
    }
}

/// Experts have adapters only if their names are targets, and then all experts of a layer, each of
/// the same rank. A router has none, and can be trained as a whole.
#[test]
fn adapters_of_experts_are_chosen() {
    for (name, router, expert) in [("qwen3_moe", "mlp.gate", "up_proj"), ("mixtral", "gate", "w2")] {
        let config = ModelConfig::read(case(name)).unwrap();
        let modules = Lora::new(4, 8.0).modules(&config).unwrap();
        assert!(modules.iter().any(|module| module.ends_with("layers.0.self_attn.q_proj")));
        assert!(
            modules.iter().all(|module| module.contains("self_attn") || module.contains("layers.1.mlp")),
            "{modules:?}"
        );
        let targets = |name: &str| Lora { targets: Targets::Names(vec![name.into()]), ..Lora::new(4, 8.0) };
        let modules = targets(expert).modules(&config).unwrap();
        let of_layer = |module: &&String| module.contains("layers.0.") && module.ends_with(expert);
        assert_eq!(modules.iter().filter(of_layer).count(), 4, "{modules:?}");
        let refused = |lora: Lora, words: &[&str]| {
            let error = lora.modules(&config).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        refused(targets(router), &[router, "a mixture's router"]);
        let one = format!("experts.1.{expert}");
        refused(targets(&one), &["all experts of a layer", "1 of 4 experts of `blocks.0.mlp."]);
        let lora = Lora { rank_pattern: vec![(one.replace('.', r"\."), 2)], ..targets(expert) };
        refused(lora, &["one rank and one alpha", "rank 2 and factor 4 of", &one, "4 and 2 of another expert"]);
        let lora = Lora { modules_to_save: vec!["gate".into()], ..Lora::new(4, 8.0) };
        let (_, spec) = Transformer::with_lora(config, &lora, |_| FrozenType::Bf16).unwrap();
        let trained = spec.entries().iter().map(|entry| entry.name());
        let mut whole = trained.filter(|name| !name.contains("lora_")).peekable();
        assert!(whole.peek().is_some() && whole.all(|name| name.ends_with("mlp.router.weight")));
    }
}

/// Settings that are unknown or not supported are refused, with their key and their value.
#[test]
fn unsupported_adapters_are_refused() {
    let json = fs::read(folders()[0].join("adapter_config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let faults = [
        (serde_json::json!({"r": 0}), &["`r`", "0"][..]),
        (serde_json::json!({"r": "4"}), &["`r`", "a whole number", "\"4\""]),
        (serde_json::json!({"lora_dropout": 1.5}), &["`lora_dropout`", "1.5"]),
        (serde_json::json!({"rank_pattern": {"q_proj": -1}}), &["`rank_pattern.q_proj`", "-1"]),
    ];
    for (fault, words) in faults {
        let mut json = json.clone();
        json.as_object_mut().unwrap().extend(fault.as_object().unwrap().clone());
        let error = Lora::from_json(json.to_string().as_bytes()).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let refused = |lora: Lora, of: &str, word: &str| {
        let config = ModelConfig::read(case(of)).unwrap();
        let error = Transformer::with_lora(config, &lora, |_| FrozenType::F32).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    let targets = |name: &str| Lora { targets: Targets::Names(vec![name.into()]), ..Lora::new(4, 8.0) };
    let saved = |name: &str| Lora { modules_to_save: vec![name.into()], ..targets("o_proj") };
    refused(targets("q_prj"), "llama31", "`q_prj`, which match no module");
    refused(targets("norm"), "llama31", "`norm`, which match no module");
    refused(saved("head"), "llama31", "`head`, which ends the name of no module");
    refused(saved("o_proj"), "llama31", "`o_proj`, which match no module");
    refused(saved("q_proj"), "llama31", "only some modules of `blocks.0.attention.qkv_proj.weight`");
    refused(saved("embed_tokens"), "smollm2", "`embed_tokens` of a tied model");
    refused(saved("lm_head"), "smollm2", "`lm_head` of a tied model");
}

/// A file that lacks a tensor, or has another one, changes nothing.
#[test]
fn mismatched_adapters_change_nothing() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let folder = folders()[0].clone();
    let mut adapted = Adapted::read(&device, &folder);
    let before = adapted.parameters.sha256().unwrap();
    let tensors = StateDict::read(folder.join("adapter_model.safetensors")).unwrap();
    let name = tensors.iter().next().unwrap().0.to_owned();
    let mut refused = |tensors: &StateDict, word: &str| {
        let folder = tempfile::tempdir().unwrap();
        tensors.save(folder.path().join("adapter_model.safetensors")).unwrap();
        let config = adapted.model.config().clone();
        let error = adapted.lora.load(folder.path(), &config, &mut adapted.parameters).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert_eq!(adapted.parameters.sha256().unwrap(), before);
    };
    let mut missing = tensors.clone();
    let (shape, values) = missing.remove(&name).unwrap();
    refused(&missing, &format!("has no `{name}`"));
    let mut more = tensors.clone();
    more.insert("base_model.model.more", [1], vec![0.0]).unwrap();
    refused(&more, "has `base_model.model.more`, which is not a weight of these adapters");
    missing.insert(name.clone(), [shape[1], shape[0]], values).unwrap();
    refused(&missing, &format!("`{name}`: expected"));
}
