//! Models of transformers: each family's logits, loss and gradients are those of transformers in
//! float64, an exported folder holds the same tensors, and what is not supported is refused.
//!
//! `tests/models/make.py` writes the cases. STEPSCOPE_MODELS names a folder of others.

#[path = "models/adapters.rs"]
mod adapters;
#[path = "models/configs.rs"]
mod configs;
#[path = "models/frozen.rs"]
mod frozen;
#[path = "models/lora.rs"]
mod lora;
#[path = "models/nf4.rs"]
mod nf4;
mod support;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use stepscope::files::StateDict;
use stepscope::models::{ModelConfig, Transformer, Weights};
use stepscope::ops::{self, Activation, LmHeadConfig};
use stepscope::parameters::FrozenType;
use stepscope::tensor::Element;
use stepscope::{Arena, Capacity, Device, Gradients, Parameters, Tape, bf16};
use support::{on_each_device, relative_l2};

/// The largest relative difference from float64. Where transformers' own error in f32 is a third of
/// this or more, it is three times that error.
const LIMIT: f64 = 2e-6;
/// The largest relative difference of logits that are computed in BF16, which has 8 bits.
const BF16_LIMIT: f64 = 0.02;

/// The folders of all cases.
fn cases() -> Vec<PathBuf> {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/cases");
    let folder = std::env::var_os("STEPSCOPE_MODELS").map_or(committed.into(), PathBuf::from);
    let mut cases: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    assert!(!cases.is_empty());
    cases
}

/// Returns the path of a committed case.
fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/cases").join(name)
}

/// The results of transformers.
struct Expected {
    shape: [usize; 2],
    ids: Vec<u32>,
    labels: Vec<u32>,
    results: BTreeMap<String, Vec<f64>>,
}

impl Expected {
    fn read(folder: &Path) -> Self {
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<u32> { bytemuck::pod_collect_to_vec(tensors.tensor(name).unwrap().data()) };
        let is_f32 = |tensor: &TensorView<'_>| tensor.dtype() == Dtype::F32;
        let results = tensors.iter().filter(|(_, tensor)| is_f32(tensor));
        let results = results.map(|(name, tensor)| {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor.data());
            (name.to_owned(), values.into_iter().map(f64::from).collect())
        });
        let shape: [usize; 2] = tensors.tensor("ids").unwrap().shape().try_into().unwrap();
        Self { shape, ids: words("ids"), labels: words("labels"), results: results.collect() }
    }
}

/// Returns the results of transformers for a case, and the logits after each token of its first
/// sample, computed token by token from caches. With BF16, matrices, activations and caches are
/// BF16.
fn from_caches<S: Activation>(device: &Device, folder: &Path) -> (Expected, Vec<f32>) {
    let expected = Expected::read(folder);
    let mut weights = Weights::read(folder).unwrap();
    let tokens = expected.shape[1];
    weights.limit_context(tokens).unwrap();
    let is_bf16 = <S as Element>::NAME == bf16::NAME;
    let (model, spec) = Transformer::frozen(weights.config.clone(), |entry| {
        Some(if is_bf16 && entry.shape().extents().len() == 2 { FrozenType::Bf16 } else { FrozenType::F32 })
    })
    .unwrap();
    let parameters = Parameters::new(device, &spec, 1).unwrap();
    let mut parameters = if is_bf16 { parameters.with_bf16_copy().unwrap() } else { parameters };
    weights.load(&mut parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
    let cached = arena.step(|step| {
        let mut caches = model.caches::<S>(step, tokens)?;
        let mut logits = step.empty([1, weights.config.vocabulary])?;
        let mut all = Vec::new();
        for (place, &id) in expected.ids[..tokens].iter().enumerate() {
            let token = step.upload_indices(&[id], [1, 1])?;
            let place = step.upload_indices(&[place as u32], [1, 1])?;
            step.scratch(|scratch| {
                let next = model.next(scratch, &parameters, [&token, &place], &mut caches)?;
                ops::copy_into(scratch, &next, &mut scratch.lend_mut(&mut logits))
            })?;
            all.extend(step.read(&logits)?);
        }
        Ok(all)
    });
    (expected, cached.unwrap())
}

/// Returns the loss of the routers if the last three tokens of each sample are padding.
fn loss_of_routers(arena: &mut Arena, model: &Transformer, parameters: &Parameters, expected: &Expected) -> Vec<f32> {
    let tokens = expected.shape[1];
    let is_real = |at: usize| if at % tokens < tokens - 3 { 1.0 } else { 0.0 };
    let real: Vec<f32> = (0..expected.ids.len()).map(is_real).collect();
    let loss = arena.step(|step| {
        let tape = Tape::new(step, parameters);
        let ids = step.upload_indices(&expected.ids, expected.shape)?;
        let real = step.upload(&real, expected.shape)?.save();
        let (_, loss) = model.forward_balanced::<f32>(&tape, ids, None, Some(real))?;
        step.read(loss.expect("the model has mixtures").value())
    });
    loss.unwrap()
}

on_each_device! {
    fn families_agree_with_transformers(device: &Device) {
        for folder in cases() {
            let expected = Expected::read(&folder);
            let weights = Weights::read(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
            let (model, spec) = Transformer::new(weights.config.clone()).unwrap();
            let mut parameters = Parameters::new(device, &spec, 1).unwrap();
            weights.load(&mut parameters).unwrap();
            let mut gradients = Gradients::zeros(&parameters).unwrap();
            let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
            let (logits, loss) = arena
                .step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let ids = step.upload_indices(&expected.ids, expected.shape)?;
                    let labels = step.upload_indices(&expected.labels, expected.shape)?;
                    let (hidden, of_routers) = model.forward_balanced::<f32>(&tape, ids, None, None)?;
                    let logits = step.read(&model.logits(step, &parameters, hidden.value())?)?;
                    let head = LmHeadConfig::default().tied();
                    let loss = tape.linear_cross_entropy(&hidden, model.head(), labels, head)?;
                    let loss = of_routers.map_or(Ok(loss), |of_routers| loss.add(of_routers.reshape(loss.shape())?))?;
                    let value = step.read(loss.value())?;
                    tape.backward_overwrite(&loss, &mut gradients)?;
                    Ok((logits, value))
                })
                .unwrap();
            let mut differences = BTreeMap::new();
            let mut compare = |name: String, ours: &[f32]| {
                let want = expected.results.get(&name).unwrap_or_else(|| panic!("{}: {name}", folder.display()));
                let difference = relative_l2(ours, want);
                let limit = LIMIT.max(3.0 * expected.results[&format!("f32.{name}")][0]);
                differences.insert(name, [difference / limit, difference]);
            };
            compare("logits".into(), &logits);
            compare("loss".into(), &loss);
            if weights.config.router_loss.is_some() {
                compare("masked".into(), &loss_of_routers(&mut arena, &model, &parameters, &expected));
            }
            for (name, _, gradient) in Weights::gradients(&weights.config, &gradients).unwrap().iter() {
                compare(format!("gradient.{name}"), gradient);
            }
            assert_eq!(2 * differences.len(), expected.results.len(), "{}", folder.display());
            let (name, [share, worst]) = differences.into_iter().max_by(|a, b| a.1[0].total_cmp(&b.1[0])).unwrap();
            println!("{}: {name} comes closest to its limit, with {worst:.1e}, {share:.2} of it", folder.display());
            assert!(share <= 1.0, "{}: {name} differs by {worst:e}", folder.display());
        }
    }

    /// Recompute keeps the bits of the routers' loss and of its gradients.
    fn recomputed_routers_keep_the_bits(device: &Device) {
        for name in ["mixtral_balanced", "qwen3_moe_balanced"] {
            let expected = Expected::read(&case(name));
            let weights = Weights::read(case(name)).unwrap();
            let (model, spec) = Transformer::new(weights.config.clone()).unwrap();
            let mut parameters = Parameters::new(device, &spec, 1).unwrap();
            weights.load(&mut parameters).unwrap();
            let [kept, again] = [false, true].map(|recompute| {
                let model = model.clone().recompute(recompute);
                let mut gradients = Gradients::zeros(&parameters).unwrap();
                let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
                let loss = arena.step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let ids = step.upload_indices(&expected.ids, expected.shape)?;
                    let (_, loss) = model.forward_balanced::<f32>(&tape, ids, None, None)?;
                    let loss = loss.expect("the model has mixtures");
                    let value = step.read(loss.value())?;
                    tape.backward_overwrite(&loss, &mut gradients)?;
                    Ok(value)
                });
                (loss.unwrap(), gradients.read_flat().unwrap())
            });
            assert!(kept.1.iter().any(|&gradient| gradient != 0.0), "{name}");
            assert!(kept == again, "{name}");
        }
    }

    /// A fault in any one parameter changes the logits by more than the limit.
    fn planted_faults_are_found(device: &Device) {
        for folder in cases() {
            let expected = Expected::read(&folder);
            let weights = Weights::read(&folder).unwrap();
            let (model, spec) = Transformer::new(weights.config.clone()).unwrap();
            let mut parameters = Parameters::new(device, &spec, 1).unwrap();
            let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
            let limit = LIMIT.max(3.0 * expected.results["f32.logits"][0]);
            for (parameter, entry) in spec.iter() {
                weights.load(&mut parameters).unwrap();
                let mut values = parameters.read(parameter).unwrap();
                values.iter_mut().enumerate().for_each(|(at, value)| *value += [1e-3, -1e-3][at % 2]);
                parameters.write(parameter, &values).unwrap();
                let logits = arena.step(|step| {
                    let tape = Tape::new(step, &parameters).evaluating();
                    let hidden = model.forward::<f32>(&tape, step.upload_indices(&expected.ids, expected.shape)?, None)?;
                    step.read(&model.logits(step, &parameters, hidden.value())?)
                });
                let difference = relative_l2(&logits.unwrap(), &expected.results["logits"]);
                assert!(difference > 10.0 * limit, "{}: {}: {difference:e}", folder.display(), entry.name());
            }
        }
    }

    /// The token after each prefix of a sample has the same logits from caches as from all tokens.
    fn cached_tokens_agree_with_all(device: &Device) {
        for folder in cases() {
            let (expected, cached) = from_caches::<f32>(device, &folder);
            let difference = relative_l2(&cached, &expected.results["logits"][..cached.len()]);
            assert!(difference <= LIMIT, "{}: {difference:e}", folder.display());
        }
    }

    /// In BF16, logits from caches are near those of transformers in float64, and the likeliest
    /// token is the same unless another token's logit is as near.
    fn cached_tokens_in_bf16_agree(device: &Device) {
        for folder in cases() {
            let (expected, cached) = from_caches::<bf16>(device, &folder);
            let want = &expected.results["logits"][..cached.len()];
            let difference = relative_l2(&cached, want);
            println!("{}: {difference:.1e}", folder.display());
            assert!(difference <= BF16_LIMIT, "{}: {difference:e}", folder.display());
            let vocabulary = cached.len() / expected.shape[1];
            for (ours, theirs) in cached.chunks(vocabulary).zip(want.chunks(vocabulary)) {
                let likeliest = |logits: &[f64]| (0..vocabulary).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                let ours: Vec<f64> = ours.iter().map(|&logit| logit.into()).collect();
                let norm = theirs.iter().map(|logit| logit * logit).sum::<f64>().sqrt();
                let lost = theirs[likeliest(theirs)] - theirs[likeliest(&ours)];
                assert!(lost <= 2.0 * BF16_LIMIT * norm, "{}: {lost:e} of {norm:e}", folder.display());
            }
        }
    }

    /// A folder that is written holds the tensors and the settings that were read.
    fn written_folders_hold_what_was_read(device: &Device) {
        for folder in cases() {
            let weights = Weights::read(&folder).unwrap();
            let (_, spec) = Transformer::new(weights.config.clone()).unwrap();
            let mut parameters = Parameters::new(device, &spec, 1).unwrap();
            weights.load(&mut parameters).unwrap();
            let written = tempfile::tempdir().unwrap();
            Weights::write(written.path(), &weights.config, &parameters, Some(4000)).unwrap();
            let [before, after] = [&folder, written.path()].map(|folder| {
                let tensors = StateDict::from_pretrained(folder, |_| false).unwrap();
                tensors.iter().map(|(name, shape, values)| (name.to_owned(), shape.to_vec(), values.to_vec())).collect::<Vec<_>>()
            });
            assert_eq!(before.len(), after.len(), "{}", folder.display());
            for ((name, shape, before), (other, other_shape, after)) in before.iter().zip(&after) {
                assert_eq!((name, shape), (other, other_shape));
                // Gemma's gains are stored without their 1, which costs a rounding.
                let limit = if name.contains("norm") { f32::EPSILON } else { 0.0 };
                assert!(before.iter().zip(after).all(|(a, b)| (a - b).abs() <= limit), "{name}");
            }
            let [before, after] = [&folder, written.path()].map(|folder| {
                let text = fs::read(folder.join("config.json")).unwrap();
                serde_json::from_slice::<serde_json::Value>(&text).unwrap()
            });
            let dtype = |config: &serde_json::Value| config.get("dtype").or(config.get("torch_dtype")).cloned();
            assert_eq!(dtype(&after), dtype(&before));
            let without = |mut config: serde_json::Value| {
                config.as_object_mut().unwrap().retain(|key, _| !["dtype", "torch_dtype"].contains(&&**key));
                config
            };
            assert_eq!(without(before), without(after), "{}", folder.display());
        }
    }
}

on_each_device! {
    /// Weights are written in the type that `config.json` states. Reading and writing them again
    /// changes no byte.
    fn stated_type_is_written(device: &Device) {
        for (name, stored) in [("bfloat16", safetensors::Dtype::BF16), ("float16", safetensors::Dtype::F16)] {
            let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
            let [given, once, twice] = folders.each_ref().map(tempfile::TempDir::path);
            fs::copy(case("qwen2").join("model.safetensors"), given.join("model.safetensors")).unwrap();
            let config = fs::read_to_string(case("qwen2").join("config.json")).unwrap();
            fs::write(given.join("config.json"), config.replace("\"float32\"", &format!("\"{name}\""))).unwrap();
            for (from, to) in [(given, once), (once, twice)] {
                let weights = Weights::read(from).unwrap();
                let (_, spec) = Transformer::new(weights.config.clone()).unwrap();
                let mut parameters = Parameters::new(device, &spec, 1).unwrap();
                weights.load(&mut parameters).unwrap();
                Weights::write(to, &weights.config, &parameters, None).unwrap();
            }
            let [first, second] = [once, twice].map(|folder| fs::read(folder.join("model.safetensors")).unwrap());
            assert!(first == second, "{name}");
            let tensors = SafeTensors::deserialize(&first).unwrap();
            assert!(!tensors.is_empty() && tensors.iter().all(|(_, tensor)| tensor.dtype() == stored), "{name}");
            let config: serde_json::Value = serde_json::from_slice(&fs::read(once.join("config.json")).unwrap()).unwrap();
            assert_eq!(config["dtype"], name);
        }
    }
}

/// Each faulty setting is refused, with its key and its value.
#[test]
fn unsupported_settings_are_refused() {
    let of = |family: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(case(family).join("config.json")).unwrap()).unwrap()
    };
    let rope =
        |rope: &str| serde_json::json!({"rope_parameters": serde_json::from_str::<serde_json::Value>(rope).unwrap()});
    let faults = [
        (
            "llama2",
            serde_json::json!({"model_type": "mamba"}),
            &["`model_type`", "\"mamba\"", "one of these families"][..],
        ),
        ("llama2", serde_json::json!({"model_type": 3}), &["`model_type`", "a text", "3"]),
        ("llama2", serde_json::json!({"hidden_act": "gelu"}), &["`hidden_act`", "\"silu\"", "\"gelu\""]),
        ("arcee", serde_json::json!({"hidden_act": "silu"}), &["`hidden_act`", "\"relu2\"", "\"silu\""]),
        ("llama2", serde_json::json!({"hidden_size": "16"}), &["`hidden_size`", "a whole number", "\"16\""]),
        ("llama2", serde_json::json!({"hidden_size": 16.5}), &["`hidden_size`", "16.5"]),
        ("llama2", serde_json::json!({"hidden_size": null}), &["`hidden_size`", "null"]),
        ("llama2", serde_json::json!({"num_hidden_layers": 0}), &["`num_hidden_layers`", "0"]),
        ("llama2", serde_json::json!({"num_key_value_heads": 3}), &["`num_key_value_heads`", "divides 2 heads", "3"]),
        ("llama2", serde_json::json!({"head_dim": 12}), &["`head_dim`", "multiple of 8", "12"]),
        ("llama2", serde_json::json!({"attention_bias": "no"}), &["`attention_bias`", "true or false", "\"no\""]),
        ("llama2", serde_json::json!({"tie_word_embeddings": 1}), &["`tie_word_embeddings`", "true or false", "1"]),
        (
            "llama2",
            serde_json::json!({"quantization_config": {"bits": 4}}),
            &["`quantization_config.bnb_4bit_quant_type`", "\"nf4\""],
        ),
        ("llama2", serde_json::json!({"logit_scale": 0.5}), &["`logit_scale`", "0.5", "in a llama model", "remove it"]),
        ("llama2", serde_json::json!({"rope_theta": 5.0}), &["`rope_theta`", "10000", "5"]),
        ("llama2", serde_json::json!({"rope_scaling": {"rope_type": "linear"}}), &["`rope_scaling`"]),
        ("llama2", rope(r#"{"rope_theta": 10000.0, "rope_type": "linear"}"#), &["`rope_parameters.factor`", "nothing"]),
        (
            "llama2",
            rope(r#"{"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}"#),
            &["`rope_parameters.rope_type`", "\"dynamic\""],
        ),
        (
            "llama2",
            rope(r#"{"rope_theta": "10000", "rope_type": "default"}"#),
            &["`rope_parameters.rope_theta`", "\"10000\""],
        ),
        (
            "llama2",
            rope(r#"{"rope_theta": 10000.0, "rope_type": "default", "factor": 2.0}"#),
            &["`rope_parameters.factor`", "2"],
        ),
        (
            "llama31",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 64}"#,
            ),
            &["`rope_parameters.high_freq_factor`", "1"],
        ),
        (
            "llama31",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}"#,
            ),
            &["`rope_parameters.original_max_position_embeddings`"],
        ),
        ("qwen2", serde_json::json!({"layer_types": ["full_attention"]}), &["`layer_types`", "2 layers"]),
        ("qwen2", serde_json::json!({"use_sliding_window": false}), &["`layer_types`", "use_sliding_window"]),
        ("qwen2", serde_json::json!({"max_window_layers": "1"}), &["`max_window_layers`", "\"1\""]),
        ("smollm3", serde_json::json!({"no_rope_layers": [1, 2]}), &["`no_rope_layers`", "[1,2]"]),
        (
            "phi3",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1, 1, 1], "short_factor": [1, 1, 1, 1], "original_max_position_embeddings": 4096}"#,
            ),
            &["`rope_parameters.long_factor`", "4 numbers", "[1,1,1]"],
        ),
        (
            "phi3",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1, 1, 1, 1], "short_factor": [1, 1, 0.5, 1], "original_max_position_embeddings": 4096}"#,
            ),
            &["`rope_parameters.short_factor`", "at least 1", "[1,1,0.5,1]"],
        ),
        (
            "phi3",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1, 1, 1, 1], "original_max_position_embeddings": 4096}"#,
            ),
            &["`rope_parameters.short_factor`", "4 numbers", "nothing"],
        ),
        (
            "phi3",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1, 1, 1, 1], "short_factor": [1, 1, 1, 1], "original_max_position_embeddings": 32}"#,
            ),
            &["`rope_parameters.original_max_position_embeddings`", "4096", "32"],
        ),
        (
            "phi3",
            rope(
                r#"{"rope_theta": 1e4, "rope_type": "longrope", "long_factor": [1, 1, 1, 1], "short_factor": [1, 1, 1, 1], "factor": 3.0}"#,
            ),
            &["`rope_parameters.factor`", "0.015625", "3.0"],
        ),
        (
            "phi3",
            rope(r#"{"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}"#),
            &["`rope_parameters.rope_type`", "\"longrope\"", "\"yarn\""],
        ),
        (
            "olmo2",
            rope(r#"{"rope_theta": 1e4, "rope_type": "su"}"#),
            &["`rope_parameters.rope_type`", "\"longrope\"", "\"su\""],
        ),
        ("qwen3_moe", serde_json::json!({"router_aux_loss_coef": -0.1}), &["`router_aux_loss_coef`", "-0.1"]),
        (
            "qwen3_moe",
            serde_json::json!({"num_experts_per_tok": 5}),
            &["`num_experts_per_tok`", "at most 4 experts", "5"],
        ),
        ("qwen3_moe", serde_json::json!({"num_experts": 3}), &["`num_local_experts`", "3", "4"]),
        ("qwen3_moe", serde_json::json!({"mlp_only_layers": ["1"]}), &["`mlp_only_layers`", "[\"1\"]"]),
        ("mixtral", serde_json::json!({"router_jitter_noise": 0.1}), &["`router_jitter_noise`", "0.1"]),
        ("mixtral", serde_json::json!({"num_local_experts": 60_000}), &["`num_local_experts`", "2 layers", "60000"]),
        ("olmo2", serde_json::json!({"hidden_act": "gelu"}), &["`hidden_act`", "\"silu\"", "\"gelu\""]),
        ("gemma3", serde_json::json!({"final_logit_softcapping": 30.0}), &["`final_logit_softcapping`", "30"]),
        ("gpt2", serde_json::json!({"activation_function": "relu"}), &["`activation_function`", "\"relu\""]),
        (
            "gpt2",
            serde_json::json!({"scale_attn_by_inverse_layer_idx": true}),
            &["`scale_attn_by_inverse_layer_idx`", "true"],
        ),
    ];
    for (family, fault, words) in faults {
        let mut config = of(family);
        for (key, value) in fault.as_object().unwrap() {
            config[key] = value.clone();
        }
        let error = ModelConfig::from_json(config.to_string().as_bytes()).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{family}, {fault}: {error:?} lacks {word:?}");
        }
    }
}

/// A folder whose tensors do not fit its settings is refused, with the tensor's name.
#[test]
fn unfitting_tensors_are_refused() {
    let refused = |family: &str, change: &dyn Fn(&mut StateDict)| {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = StateDict::from_pretrained(case(family), |_| false).unwrap();
        change(&mut tensors);
        tensors.save_pretrained(folder.path(), None).unwrap();
        fs::copy(case(family).join("config.json"), folder.path().join("config.json")).unwrap();
        Weights::read(folder.path()).unwrap_err().to_string()
    };
    let head = "lm_head.weight";
    let error = refused("smollm2", &|tensors| tensors.insert(head, [40, 16], vec![0.5; 640]).unwrap());
    assert!(error.contains(head) && error.contains("tie_word_embeddings"), "{error}");
    let table = |tensors: &mut StateDict| {
        let (shape, values) = tensors.remove("model.embed_tokens.weight").unwrap();
        tensors.insert("model.embed_tokens.weight", shape.clone(), values.clone()).unwrap();
        (shape, values)
    };
    let folder = tempfile::tempdir().unwrap();
    let mut same = StateDict::from_pretrained(case("smollm2"), |_| false).unwrap();
    let (shape, values) = table(&mut same);
    same.insert(head, shape, values).unwrap();
    same.save_pretrained(folder.path(), None).unwrap();
    fs::copy(case("smollm2").join("config.json"), folder.path().join("config.json")).unwrap();
    Weights::read(folder.path()).unwrap();
    let error = refused("llama2", &|tensors| drop(tensors.remove(head)));
    assert!(error.contains(head) && error.contains("requires"), "{error}");
    let error = refused("llama2", &|tensors| tensors.insert("model.extra", [1], vec![0.0]).unwrap());
    assert!(error.contains("model.extra") && error.contains("not a weight"), "{error}");
    let error = refused("llama2", &|tensors| {
        let (_, values) = tensors.remove("model.norm.weight").unwrap();
        tensors.insert("model.norm.weight", [2, 8], values).unwrap();
    });
    assert!(error.contains("model.norm.weight") && error.contains("[2, 8]"), "{error}");
}
