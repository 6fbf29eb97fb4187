//! Kinds of adapters: each has the logits of PEFT, before and after it was written again, or is
//! refused for a reason.
//!
//! `tests/models/make_adapters.py` writes the cases.

use super::support::{on_each_device, relative_l2};
use super::{LIMIT, case};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use stepscope::models::{Lora, ModelConfig, Transformer, WeightFiles};
use stepscope::parameters::FrozenType;
use stepscope::prelude::*;

fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name)
}

/// Returns the kinds: name, model and `adapter_config.json`.
fn kinds() -> Vec<(String, PathBuf, Value)> {
    let lines = fs::read_to_string(committed("adapters.jsonl")).unwrap();
    let kind = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| line[key].as_str().unwrap().to_owned();
        (text("kind"), case(&text("model")), line["config"].clone())
    };
    lines.lines().map(kind).collect()
}

/// Loads an adapter's folder onto its model, and returns the logits of these ids.
fn logits(
    device: &Device,
    base: &Path,
    folder: &Path,
    ids: &[u32],
    shape: [usize; 2],
) -> (Lora, Transformer, Parameters, Vec<f32>) {
    let lora = Lora::read(folder).unwrap();
    let mut files = WeightFiles::open(base).unwrap();
    let (model, spec) = Transformer::with_lora(files.config().clone(), &lora, |_| FrozenType::F32).unwrap();
    let mut parameters = Parameters::new(device, &spec, 1).unwrap();
    files.load(&mut parameters).unwrap();
    lora.load(folder, model.config(), &mut parameters).unwrap();
    let logits = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap().step(|step| {
        let tape = Tape::new(step, &parameters).evaluating();
        let hidden = model.forward::<f32>(&tape, step.upload_indices(ids, shape)?, None)?;
        step.read(&model.logits(step, &parameters, hidden.value())?)
    });
    (lora, model, parameters, logits.unwrap())
}

on_each_device! {
    fn kinds_of_adapters_agree_with_peft(device: &Device) {
        let bytes = fs::read(committed("adapters.safetensors")).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        let kinds = kinds();
        for (kind, base, config) in &kinds {
            let folder = tempfile::tempdir().unwrap();
            let inside = |name: &str| all.tensor(&format!("{kind}/{name}")).unwrap();
            let of_adapter = all.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(&format!("{kind}/"))?, tensor)));
            let of_adapter = of_adapter.filter(|(name, _)| !["ids", "logits", "f32"].contains(name));
            let file = safetensors::serialize(of_adapter, None).unwrap();
            fs::write(folder.path().join("adapter_model.safetensors"), file).unwrap();
            fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
            let ids: Vec<u32> = bytemuck::pod_collect_to_vec(inside("ids").data());
            let shape: [usize; 2] = inside("ids").shape().try_into().unwrap();
            let floats = |name: &str| bytemuck::pod_collect_to_vec::<u8, f32>(inside(name).data());
            let want: Vec<f64> = floats("logits").into_iter().map(f64::from).collect();
            let limit = LIMIT.max(3.0 * f64::from(floats("f32")[0]));
            let (lora, model, parameters, ours) = logits(device, base, folder.path(), &ids, shape);
            let difference = relative_l2(&ours, &want);
            assert!(difference <= limit, "{kind} differs by {difference:e}");
            // Adapters of tables were added to the tables, and cannot be written.
            if ["embedding", "head", "embedding_and_head"].contains(&kind.as_str()) {
                let error = lora.write(folder.path(), model.config(), &parameters).unwrap_err().to_string();
                assert!(error.contains("module to save"), "{error}");
                continue;
            }
            lora.write(folder.path(), model.config(), &parameters).unwrap();
            let (.., again) = logits(device, base, folder.path(), &ids, shape);
            assert!(again == ours, "{kind}: the saved adapter differs");
        }
        assert_eq!(kinds.len(), 36);
    }
}

/// Settings that change what an adapter computes, and that are not supported, are refused.
#[test]
fn unsupported_kinds_are_refused() {
    let settings = [
        ("peft_type", json!("IA3")),
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("use_dora", json!(true)),
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!("loftq")),
        ("init_lora_weights", json!("corda")),
        ("layer_replication", json!([[0, 2], [1, 2]])),
        ("megatron_config", json!({"tp": 2})),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1, 2])),
        ("trainable_token_indices", json!({"embed_tokens": [1, 2]})),
        ("alora_invocation_tokens", json!([3])),
        ("use_bdlora", json!({"nblocks": 2})),
        ("arrow_config", json!({"top_k": 3})),
        ("new_setting", json!(0.5)),
        ("target_modules", json!(["q_proj", 3])),
        ("target_modules", json!("(q_proj")),
        ("exclude_modules", json!("[")),
        ("rank_pattern", json!({"(q_proj": 2})),
        ("layers_to_transform", json!(["1"])),
        ("layers_pattern", json!("(layers")),
    ];
    let (_, _, config) = kinds().swap_remove(0);
    for (key, value) in settings {
        let mut config = config.clone();
        config[key] = value.clone();
        let error = Lora::from_json(config.to_string().as_bytes()).unwrap_err();
        assert!(error.contains(&format!("`{key}`: expected")) && error.ends_with(&format!("got {value}")), "{error}");
    }
    // Modules that PEFT would change as two matrices, and a table of positions.
    for (model, key, value, word) in [
        ("smollm2", "target_modules", json!(["embed_tokens"]), "not tied"),
        ("smollm2", "target_modules", json!(["lm_head"]), "not tied"),
        ("smollm2", "modules_to_save", json!(["embed_tokens"]), "not tied"),
        ("gpt2", "target_modules", json!(["wpe"]), "one of `transformer.wpe`"),
    ] {
        let mut config = config.clone();
        config["target_modules"] = json!(["q_proj", "c_attn"]);
        config[key] = value;
        let lora = Lora::from_json(config.to_string().as_bytes()).unwrap();
        let error = lora.modules(&ModelConfig::read(case(model)).unwrap()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
