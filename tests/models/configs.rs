//! Published `config.json`: each is read as transformers reads it, or refused for a stated reason.
//! Keys without effect are accepted, and keys that may have one are refused.
//!
//! `tests/models/make_configs.py` writes what transformers makes of `tests/models/configs.jsonl`.

use super::case;
use super::support::{on_each_device, relative_l2};
use serde_json::{Value, json};
use std::fs;
use stepscope::models::{LayerConfig, ModelConfig, Transformer};
use stepscope::ops::{self, AttentionConfig, AttentionMask, Rotary};
use stepscope::prelude::*;

/// The position at which heads are compared.
const POSITION: u32 = 100;
/// The largest relative difference of rotated heads, whose angles transformers computes in f32.
const LIMIT: f64 = 2e-5;

/// Rotates a head of ones.
fn rotated(device: &Device, width: usize, rotary: Rotary) -> Vec<f32> {
    let rotary = Rotary { offset: POSITION, ..rotary };
    let head = Arena::builder(device).build().unwrap().step(|step| {
        let x = step.upload(&vec![1.0; 3 * width], [1, 1, 3 * width])?;
        step.read(&ops::rotary(step, &x, rotary, &AttentionConfig::new(1))?)
    });
    let half = rotary.columns.unwrap_or(width) / 2;
    let head = head.unwrap();
    [0, half / 4, half / 2, half - 1].map(|at| head[at]).to_vec()
}

/// Compares a layer with what transformers computes.
fn compare(device: &Device, model: &str, config: &ModelConfig, layer: &LayerConfig, want: &Value) {
    let window = match layer.mask {
        AttentionMask::SlidingWindow(tokens) => json!(tokens.get()),
        _ => Value::Null,
    };
    assert_eq!(window, want["window"], "{model}");
    assert_eq!(layer.rotary.is_some(), want.get("rotated").is_some(), "{model}");
    let Some(rotary) = layer.rotary else { return };
    // A text of one token more than the first context of LongRoPE.
    for (key, positions) in [("rotated", 1), ("long", usize::MAX)] {
        let Some(want) = want.get(key) else { continue };
        let want: Vec<f64> = serde_json::from_value(want.clone()).unwrap();
        let difference = relative_l2(&rotated(device, config.head_width, rotary.for_positions(positions)), &want);
        assert!(difference < LIMIT, "{model}: {key} differs by {difference:e}");
    }
}

on_each_device! {
    fn published_files_agree_with_transformers(device: &Device) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/configs.jsonl");
        let (mut read, mut refused) = (0, 0);
        for line in fs::read_to_string(path).unwrap().lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let (model, want) = (line["model"].as_str().unwrap(), &line["expected"]);
            let config = ModelConfig::from_json(line["config"].to_string().as_bytes());
            if let Some(words) = line.get("refused") {
                let error = config.unwrap_err();
                let has = |word: &Value| error.contains(word.as_str().unwrap());
                assert!(words.as_array().unwrap().iter().all(has), "{model}: {error}");
                refused += 1;
                continue;
            }
            let config = config.unwrap_or_else(|error| panic!("{model}: {error}"));
            let spec = Transformer::new(config.clone()).unwrap().1;
            assert_eq!(json!(spec.weights()), want["weights"], "{model}");
            assert_eq!((json!(config.context), json!(config.tied)), (want["context"].clone(), want["tied"].clone()), "{model}");
            assert_eq!(config.epsilon, want["epsilon"].as_f64().unwrap() as f32, "{model}");
            let scale = config.score_scale.unwrap_or(1.0 / (config.head_width as f32).sqrt());
            assert!((f64::from(scale) / want["scale"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{model}: {scale}");
            let kinds: Vec<usize> = want["layers"].as_str().unwrap().bytes().map(|digit| usize::from(digit - b'0')).collect();
            assert_eq!(kinds.len(), config.layers.len(), "{model}");
            let mut of_kinds: Vec<Option<LayerConfig>> = vec![None; want["kinds"].as_array().unwrap().len()];
            for (layer, kind) in config.layers.iter().zip(kinds) {
                assert_eq!(layer, of_kinds[kind].get_or_insert(*layer), "{model}");
            }
            for (number, layer) in of_kinds.iter().enumerate() {
                compare(device, model, &config, &layer.unwrap(), &want["kinds"][number]);
            }
            read += 1;
        }
        println!("{read} files are read as by transformers, {refused} are refused");
        assert_eq!((read, refused), (95, 4));
    }
}

/// Returns the result of a file of a case with another key.
fn with(family: &str, key: &str, value: &Value) -> Result<ModelConfig, String> {
    let mut config: Value = serde_json::from_slice(&fs::read(case(family).join("config.json")).unwrap()).unwrap();
    config[key] = value.clone();
    ModelConfig::from_json(config.to_string().as_bytes())
}

/// Keys that published files have, and that change nothing.
#[test]
fn keys_without_effect_are_accepted() {
    let keys = [
        ("phi3", "attention_bias", json!(false)),
        ("qwen2", "attention_bias", json!(false)),
        ("mistral", "mlp_bias", json!(false)),
        ("llama2", "is_llama_config", json!(true)),
        ("llama2", "rope_interleaved", json!(false)),
        ("llama2", "pretraining_tp", json!(2)),
        ("smollm3", "pretraining_tp", json!(2)),
        ("smollm3", "max_window_layers", json!(28)),
        ("qwen2", "use_mrope", json!(false)),
        ("qwen3", "unsloth_fixed", json!(true)),
        ("qwen3", "unsloth_version", json!("2025.9.1")),
        ("llama2", "_attn_implementation_autoset", json!(true)),
        ("llama2", "attn_implementation", json!("flash_attention_2")),
        ("llama2", "num_labels", json!(1)),
        ("llama2", "transformers.js_config", json!({"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}})),
        ("llama2", "neftune_noise_alpha", json!(5.0)),
        ("llama2", "torchscript", json!(false)),
        ("llama2", "use_flash_attention", json!(true)),
        ("llama2", "model_max_length", json!(4096)),
        ("llama2", "output_router_logits", json!(false)),
        ("llama2", "num_experts", json!(0)),
        ("llama2", "layer_types", json!(["full_attention", "full_attention"])),
        ("llama2", "partial_rotary_factor", json!(1.0)),
        ("llama2", "residual_multiplier", json!(1.0)),
        ("llama2", "logit_scale", Value::Null),
        ("llama2", "embedding_dropout", json!(0.1)),
        ("llama2", "initializer_factor", json!(1.0)),
        ("llama2", "internal_version", json!("7b-alpha-v2.33")),
        ("llama2", "sliding_window", Value::Null),
        ("gpt_neox", "head_dim", json!(16)),
        ("gpt_neox", "custom_pipelines", json!({"text-generation": {"impl": "instruct_pipeline.Pipeline"}})),
        ("gpt2", "num_hidden_layers", json!(2)),
        ("gemma3", "cache_implementation", json!("hybrid")),
    ];
    for (family, key, value) in keys {
        let plain: ModelConfig = ModelConfig::read(case(family)).unwrap();
        let config = with(family, key, &value).unwrap_or_else(|error| panic!("{family}: {error}"));
        assert_eq!((config.layers, config.epsilon), (plain.layers, plain.epsilon), "{key}");
    }
}

/// Keys that some model computes with are refused in a family that does not read them.
#[test]
fn keys_with_an_effect_are_refused() {
    let keys = [
        ("llama2", "attention_multiplier", json!(0.5)),
        ("llama2", "attention_multiplier", json!(1.0)),
        ("llama2", "embedding_multiplier", json!(12.0)),
        ("llama2", "residual_multiplier", json!(0.22)),
        ("llama2", "logits_scaling", json!(8)),
        ("llama2", "logit_scale", json!(0.0625)),
        ("llama2", "scale_emb", json!(12)),
        ("llama2", "scale_depth", json!(1.4)),
        ("llama2", "dim_model_base", json!(256)),
        ("llama2", "attn_logit_softcapping", json!(50.0)),
        ("llama2", "final_logit_softcapping", json!(30.0)),
        ("gemma3", "final_logit_softcapping", json!(30.0)),
        ("llama2", "use_sliding_window", json!(true)),
        ("llama2", "sliding_window", json!(4096)),
        ("llama2", "rope_interleaved", json!(true)),
        ("olmo2", "clip_qkv", json!(8.0)),
        ("llama2", "no_rope_layers", json!([1, 0])),
        ("llama2", "no_rope_layer_interval", json!(4)),
        ("llama2", "layer_types", json!(["full_attention", "sliding_attention"])),
        ("mistral", "attention_bias", json!(true)),
        ("phi3", "lm_head_bias", json!(true)),
        ("qwen2", "use_mrope", json!(true)),
        ("qwen2", "use_logn_attn", json!(true)),
        ("qwen2", "use_dynamic_ntk", json!(true)),
        ("qwen3", "num_experts", json!(128)),
        ("mistral", "num_local_experts", json!(8)),
        ("llama2", "qk_layernorm", json!(true)),
        ("llama2", "use_qk_norm", json!(true)),
        ("llama2", "alibi", json!(true)),
        ("llama2", "parallel_attn", json!(true)),
        ("llama2", "use_parallel_residual", json!(true)),
        ("llama2", "partial_rotary_factor", json!(0.5)),
        ("llama2", "rope_local_base_freq", json!(10000.0)),
        ("llama2", "query_pre_attn_scalar", json!(224)),
        ("llama2", "is_causal", json!(false)),
        ("llama2", "kv_lora_rank", json!(512)),
        ("llama2", "attention_chunk_size", json!(8192)),
        ("llama2", "per_layer_config", json!([{}])),
        ("llama2", "quantization", json!({"group_size": 64, "bits": 4})),
        ("gpt2", "multi_query", json!(true)),
        ("gpt2", "num_hidden_layers", json!(3)),
        ("gpt_neox", "head_dim", json!(8)),
        ("gpt_neox", "rope_theta", json!(500.0)),
        ("gemma3", "use_bidirectional_attention", json!(true)),
    ];
    for (family, key, value) in keys {
        let error = with(family, key, &value).expect_err(key);
        assert!(error.contains(&format!("`{key}`: expected")) && error.ends_with(&format!("got {value}")), "{error}");
    }
}

/// An exported folder has no code of its own, so its `config.json` names none.
#[test]
fn exported_files_name_no_code() {
    let map =
        json!({"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"});
    let config = with("phi3", "auto_map", &map).unwrap();
    let written: Value = serde_json::from_str(&config.to_json("bfloat16")).unwrap();
    assert!(written.get("auto_map").is_none() && written["model_type"] == "phi3", "{written}");
}
