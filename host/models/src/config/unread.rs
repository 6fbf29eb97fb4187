//! The keys of a `config.json` that transformers' class of the family does not read.
//!
//! transformers ignores them. Their writer may have computed with them nevertheless, in code of its
//! own. A key whose name contains the name of a part of a model is therefore an error, unless its
//! value is known to have no effect. Other keys, such as the writer's version, are ignored.
//!
//! Invariant: a key that names a part of a model is an error in a family that does not read it,
//! unless its value leaves the computation unchanged.

use super::keys::{Keys, Outcome, is_off};
use serde_json::{Value, json};

/// Keys that name a part of a model, and do not change what it computes.
const WITHOUT_EFFECT: [&str; 14] = [
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "architectures",
    "attn_pdrop",
    "context_window",
    "embd_pdrop",
    "max_window_layers",
    "num_beam_groups",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "reorder_and_upcast_attn",
    "summary_activation",
    "use_sdpa_attention",
];

/// Words in the names of keys without effect: dropout, initialization, tokens, and the choice of an
/// implementation.
const SETTINGS: [&str; 6] =
    ["dropout", "initializer", "token_id", "_implementation", "flash_att", "memory_efficient_attention"];

/// Words in the names of keys that change what a decoder computes.
#[rustfmt::skip]
const PARTS: [&str; 86] = [
    "activ", "act_", "alibi", "altup", "attention", "attn", "audio", "bias", "bidirection", "causal", "clip",
    "compress", "conv1d", "conv_kernel", "cross", "d_conv", "d_model", "decoder", "dense", "dim", "emb_", "embd",
    "embed", "expand", "expert", "factor", "ffn", "gate", "gating", "glu", "group", "head", "hidden", "image",
    "inner", "interleav", "jitter", "kv", "lambda", "latent", "laurel", "layer", "logit", "logn", "lora", "mamba",
    "mask", "memory", "mla", "mlp", "moe", "mtp", "multi_query", "multiplier", "mup", "nextn", "norm", "ntk",
    "parallel", "pattern", "position", "quant", "query", "rank", "recurren", "relative", "residual", "rope",
    "rotary", "router", "scal", "shared", "sink", "softcap", "softmax", "sparse", "sparsi", "ssm", "state",
    "text_config", "time_step", "topk", "use_long_context", "vision_config", "window", "yarn",
];

/// Values that leave the computation unchanged, of keys for which it is neither null nor false.
fn neutral(key: &str) -> Option<Value> {
    match key {
        "causal" | "is_causal" | "use_causal_mask" | "use_rope" | "scale_attn_weights" => Some(json!(true)),
        "embedding_multiplier" | "residual_multiplier" | "logit_scale" | "logits_scaling" | "lm_head_multiplier"
        | "scale_emb" | "rope_scaling_factor" | "rope_ratio" | "rotary_pct" | "partial_rotary_factor"
        // Phi-4-mini has these two, and its own code does not read them.
        | "full_attn_mod" | "interpolate_factor" => Some(json!(1)),
        _ => None,
    }
}

/// Refuses a key that was not read and could change the computation.
pub(super) fn check(keys: &Keys<'_>) -> Outcome<()> {
    let has = |key: &str, words: &[&str]| words.iter().any(|word| key.contains(word));
    for (key, value) in keys.unread() {
        let is_known = WITHOUT_EFFECT.contains(&key) || has(key, &SETTINGS) || !has(key, &PARTS);
        if is_known || has_no_effect(key, value) {
            continue;
        }
        let family = keys.text("model_type")?.unwrap_or_default();
        return keys.refuse(
            key,
            format!(
                "no such key in a {family} model, because models of other families compute with such keys: remove it if \
                 this model was trained without it"
            ),
        );
    }
    Ok(())
}

/// Returns true for a value that switches a part off, or that describes the default.
fn has_no_effect(key: &str, value: &Value) -> bool {
    if let Some(neutral) = neutral(key).filter(|_| !value.is_null()) {
        return value.as_f64().map_or(*value == neutral, |number| Some(number) == neutral.as_f64());
    }
    let is_count = key.starts_with("num_") || key.starts_with("n_");
    match value {
        Value::Number(number) => is_count && number.as_f64() == Some(0.0),
        Value::Array(list) if key == "layer_types" => list.iter().all(|kind| kind == "full_attention"),
        value => is_off(value),
    }
}
