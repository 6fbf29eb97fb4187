//! The families, each as it maps its `config.json` to [`ModelConfig`].
//!
//! Defaults equal the defaults of transformers' configuration classes. A `config.json` must state
//! every size whose default in transformers is the size of one particular model.

use super::keys::{Keys, Outcome, shown};
use super::rope::{self, Defaults};
use super::{Family, FeedForwardKind, LayerConfig, MAX_LAYERS, MAX_SIZE, ModelConfig, NormKind, QkNormKind, Residual};
use serde_json::{Map, json};
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use stepscope_core::ops::{AttentionMask, Rotary};

/// The range of a norm's epsilon.
const EPSILONS: RangeInclusive<f64> = 1e-30..=1.0;

/// Keys that do not change the computation of a model. They name the writer of the file, the
/// initialization of weights, dropout, token ids, and the settings of tasks and of generation.
const WITHOUT_EFFECT: [&str; 62] = [
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "classifier_dropout",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "n_ctx",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// Reads a configuration.
pub(super) fn read(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let config = match keys.text("model_type")? {
        Some("gpt2") => gpt2(keys)?,
        Some("llama") => llama(keys)?,
        Some("mistral") => mistral(keys)?,
        Some("qwen2") => qwen2(keys)?,
        Some("qwen3") => qwen3(keys)?,
        Some("smollm3") => smollm3(keys)?,
        Some("olmo2") => olmo2(keys)?,
        Some("phi3") => phi3(keys)?,
        Some("gpt_neox") => gpt_neox(keys)?,
        Some("gemma3_text") => gemma3(keys)?,
        Some("arcee") => arcee(keys)?,
        _ => {
            let known = "gpt2, llama, mistral, qwen2, qwen3, smollm3, olmo2, phi3, gpt_neox, gemma3_text or arcee";
            return keys.refuse("model_type", known);
        }
    };
    keys.flag("is_decoder", true)?;
    keys.only("is_encoder_decoder", &[json!(false)])?;
    keys.only("add_cross_attention", &[json!(false)])?;
    keys.only("tie_encoder_decoder", &[json!(false)])?;
    keys.only("pruned_heads", &[json!({})])?;
    keys.only("chunk_size_feed_forward", &[json!(0)])?;
    if let Some(keys) = keys.object("quantization_config")? {
        quantization(&keys)?;
    }
    keys.finish(&WITHOUT_EFFECT)?;
    Ok(config)
}

/// Checks the settings of a file in NF4: those of bitsandbytes with double quantisation.
fn quantization(keys: &Keys<'_>) -> Outcome<()> {
    keys.only("quant_method", &[json!("bitsandbytes")])?;
    for name in ["load_in_4bit", "_load_in_4bit"].into_iter().filter(|name| keys.has(name)) {
        keys.only(name, &[json!(true)])?;
    }
    keys.only("load_in_8bit", &[json!(false)])?;
    keys.only("_load_in_8bit", &[json!(false)])?;
    for (name, value) in [("bnb_4bit_quant_type", json!("nf4")), ("bnb_4bit_use_double_quant", json!(true))] {
        match keys.get(name) {
            Some(found) if *found == value => {}
            _ => return keys.refuse(name, value),
        }
    }
    keys.only("bnb_4bit_quant_storage", &[json!("uint8")])?;
    keys.finish(&[
        "bnb_4bit_compute_dtype",
        "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules",
        "llm_int8_threshold",
    ])
}

fn gpt2(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    keys.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
    keys.only("scale_attn_weights", &[json!(true)])?;
    keys.only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
    let (width, heads) = (keys.required("n_embd", MAX_SIZE)?, keys.required("n_head", MAX_SIZE)?);
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: None };
    let context = keys.required("n_positions", MAX_SIZE)?;
    Ok(ModelConfig {
        family: Family::Gpt2,
        vocabulary: keys.required("vocab_size", MAX_SIZE)?,
        context,
        width,
        heads,
        kv_heads: heads,
        head_width: divided(keys, "n_head", width, heads)?,
        hidden: keys.size("n_inner", MAX_SIZE)?.unwrap_or(4 * width),
        layers: vec![layer; keys.required("n_layer", MAX_LAYERS)?],
        norm: NormKind::Layer,
        epsilon: epsilon(keys, "layer_norm_epsilon", 1e-5)?,
        residual: Residual::PreNorm,
        feed_forward: FeedForwardKind::Gelu,
        qkv_bias: true,
        output_bias: true,
        feed_forward_bias: true,
        qk_norm: None,
        learned_positions: Some(context),
        score_scale: None,
        embedding_scale: None,
        tied: keys.flag("tie_word_embeddings", true)?,
        json: Map::new(),
    })
}

/// Reads the settings that Llama and the later families share: RMSNorm before each part, SwiGLU,
/// grouped queries, rotary positions, and no biases. Arcee uses the square of ReLU in place of
/// SwiGLU.
fn like_llama(keys: &Keys<'_>, family: Family, defaults: &Defaults) -> Outcome<ModelConfig> {
    let (activation, feed_forward) = match family {
        Family::Arcee => ("relu2", FeedForwardKind::ReluSquared),
        _ => ("silu", FeedForwardKind::SwiGlu),
    };
    keys.only("hidden_act", &[json!(activation)])?;
    let width = keys.required("hidden_size", MAX_SIZE)?;
    let heads = keys.required("num_attention_heads", MAX_SIZE)?;
    let kv_heads = keys.size("num_key_value_heads", MAX_SIZE)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return keys.refuse("num_key_value_heads", format!("a number that divides {heads} heads"));
    }
    let head_width = match keys.size("head_dim", MAX_SIZE)? {
        Some(width) => width,
        None => divided(keys, "num_attention_heads", width, heads)?,
    };
    let context = keys.required("max_position_embeddings", MAX_SIZE)?;
    let rotary = rope::read(keys, head_width, context, defaults)?;
    fits_kernels(keys, head_width, rotary)?;
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: Some(rotary) };
    Ok(ModelConfig {
        family,
        vocabulary: keys.required("vocab_size", MAX_SIZE)?,
        context,
        width,
        heads,
        kv_heads,
        head_width,
        hidden: keys.required("intermediate_size", MAX_SIZE)?,
        layers: vec![layer; keys.required("num_hidden_layers", MAX_LAYERS)?],
        norm: NormKind::Rms,
        epsilon: epsilon(keys, "rms_norm_eps", 1e-6)?,
        residual: Residual::PreNorm,
        feed_forward,
        qkv_bias: false,
        output_bias: false,
        feed_forward_bias: false,
        qk_norm: None,
        learned_positions: None,
        score_scale: None,
        embedding_scale: None,
        tied: keys.flag("tie_word_embeddings", false)?,
        json: Map::new(),
    })
}

fn llama(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    keys.only("pretraining_tp", &[json!(1)])?;
    let bias = keys.flag("attention_bias", false)?;
    let feed_forward_bias = keys.flag("mlp_bias", false)?;
    Ok(ModelConfig {
        qkv_bias: bias,
        output_bias: bias,
        feed_forward_bias,
        ..like_llama(keys, Family::Llama, &Defaults::default())?
    })
}

fn arcee(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let feed_forward_bias = keys.flag("mlp_bias", false)?;
    let epsilon = epsilon(keys, "rms_norm_eps", 1e-5)?;
    let config = like_llama(keys, Family::Arcee, &Defaults::default())?;
    Ok(ModelConfig { qkv_bias: bias, output_bias: bias, feed_forward_bias, epsilon, ..config })
}

fn mistral(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    if !keys.has("sliding_window") {
        return keys.refuse("sliding_window", "a whole number, or null for none");
    }
    let mask = window(keys)?;
    let mut config = like_llama(keys, Family::Mistral, &Defaults::default())?;
    stated(keys, "num_key_value_heads")?;
    config.layers.iter_mut().for_each(|layer| layer.mask = mask);
    Ok(config)
}

fn qwen2(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let mut config = like_llama(keys, Family::Qwen2, &Defaults::default())?;
    stated(keys, "num_key_value_heads")?;
    windows_by_layer(keys, &mut config)?;
    Ok(ModelConfig { qkv_bias: true, ..config })
}

fn qwen3(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = like_llama(keys, Family::Qwen3, &Defaults::default())?;
    stated(keys, "num_key_value_heads")?;
    stated(keys, "head_dim")?;
    windows_by_layer(keys, &mut config)?;
    Ok(ModelConfig { qk_norm: Some(QkNormKind::Heads), qkv_bias: bias, output_bias: bias, ..config })
}

fn smollm3(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let feed_forward_bias = keys.flag("mlp_bias", false)?;
    keys.only("pretraining_tp", &[json!(1)])?;
    let tied = keys.flag("tie_word_embeddings", true)?;
    let mut config = like_llama(keys, Family::SmolLm3, &Defaults { base: Some(2_000_000.0), ..Defaults::default() })?;
    stated(keys, "num_key_value_heads")?;
    windows_by_layer(keys, &mut config)?;
    let interval = keys.size("no_rope_layer_interval", MAX_LAYERS)?.unwrap_or(4);
    let rotates: Vec<bool> = match keys.list("no_rope_layers")? {
        None => (1..=config.layers.len()).map(|number| !number.is_multiple_of(interval)).collect(),
        Some(list) => list.iter().map(|one| *one == json!(1)).collect(),
    };
    let known =
        keys.list("no_rope_layers")?.is_none_or(|list| list.iter().all(|one| [json!(0), json!(1)].contains(one)));
    if rotates.len() != config.layers.len() || !known {
        return keys.refuse("no_rope_layers", format!("0 or 1 for each of {} layers", config.layers.len()));
    }
    for (layer, rotates) in config.layers.iter_mut().zip(rotates) {
        layer.rotary = layer.rotary.filter(|_| rotates);
    }
    Ok(ModelConfig { qkv_bias: bias, output_bias: bias, feed_forward_bias, tied, ..config })
}

fn olmo2(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let epsilon = epsilon(keys, "rms_norm_eps", 1e-5)?;
    Ok(ModelConfig {
        qkv_bias: bias,
        output_bias: bias,
        epsilon,
        residual: Residual::PostNorm,
        qk_norm: Some(QkNormKind::Projections),
        ..like_llama(keys, Family::Olmo2, &Defaults::default())?
    })
}

fn phi3(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let mask = window(keys)?;
    let epsilon = epsilon(keys, "rms_norm_eps", 1e-5)?;
    // Only longrope reads the context before scaling.
    keys.size("original_max_position_embeddings", MAX_SIZE)?;
    let defaults = Defaults { scaling: rope::LONGROPE, ..Defaults::default() };
    let mut config = like_llama(keys, Family::Phi3, &defaults)?;
    config.layers.iter_mut().for_each(|layer| layer.mask = mask);
    Ok(ModelConfig { epsilon, ..config })
}

fn gpt_neox(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    keys.only("hidden_act", &[json!("gelu")])?;
    let width = keys.required("hidden_size", MAX_SIZE)?;
    let heads = keys.required("num_attention_heads", MAX_SIZE)?;
    let head_width = divided(keys, "num_attention_heads", width, heads)?;
    let context = keys.required("max_position_embeddings", MAX_SIZE)?;
    let outer = keys.real("rotary_emb_base", 1.000_001..=1e12)?;
    // transformers 4.57 writes the share of rotary columns under both names.
    let share = keys.real("rotary_pct", 0.0..=1.0)?.unwrap_or(0.25);
    if keys.real("partial_rotary_factor", 0.0..=1.0)?.is_some_and(|other| other != share) {
        return keys.refuse("partial_rotary_factor", format!("{share}, as in `rotary_pct`"));
    }
    let defaults = Defaults { base: Some(outer.unwrap_or(10_000.0)), share, ..Defaults::default() };
    let rotary = rope::read(keys, head_width, context, &defaults)?;
    fits_kernels(keys, head_width, rotary)?;
    let bias = keys.flag("attention_bias", true)?;
    let parallel = keys.flag("use_parallel_residual", true)?;
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: Some(rotary) };
    Ok(ModelConfig {
        family: Family::GptNeoX,
        vocabulary: keys.required("vocab_size", MAX_SIZE)?,
        context,
        width,
        heads,
        kv_heads: heads,
        head_width,
        hidden: keys.required("intermediate_size", MAX_SIZE)?,
        layers: vec![layer; keys.required("num_hidden_layers", MAX_LAYERS)?],
        norm: NormKind::Layer,
        epsilon: epsilon(keys, "layer_norm_eps", 1e-5)?,
        residual: if parallel { Residual::Parallel } else { Residual::PreNorm },
        feed_forward: FeedForwardKind::GeluExact,
        qkv_bias: bias,
        output_bias: bias,
        feed_forward_bias: true,
        qk_norm: None,
        learned_positions: None,
        score_scale: None,
        embedding_scale: None,
        tied: keys.flag("tie_word_embeddings", false)?,
        json: Map::new(),
    })
}

fn gemma3(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    // Older files have the same value in both keys.
    keys.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
    keys.only("hidden_act", &[json!("gelu_pytorch_tanh")])?;
    keys.only("attn_logit_softcapping", &[])?;
    keys.only("final_logit_softcapping", &[])?;
    keys.only("use_bidirectional_attention", &[json!(false)])?;
    let bias = keys.flag("attention_bias", false)?;
    let width = keys.required("hidden_size", MAX_SIZE)?;
    let heads = keys.required("num_attention_heads", MAX_SIZE)?;
    let kv_heads = keys.required("num_key_value_heads", MAX_SIZE)?;
    if !heads.is_multiple_of(kv_heads) {
        return keys.refuse("num_key_value_heads", format!("a number that divides {heads} heads"));
    }
    let head_width = keys.required("head_dim", MAX_SIZE)?;
    let context = keys.required("max_position_embeddings", MAX_SIZE)?;
    let count = keys.required("num_hidden_layers", MAX_LAYERS)?;
    stated(keys, "sliding_window")?;
    let mask = window(keys)?;
    let scale = keys.real("query_pre_attn_scalar", 1e-3..=1e9)?.unwrap_or(256.0);
    let full = rope::read_kind(keys, "full_attention", head_width, context)?;
    let sliding = rope::read_kind(keys, "sliding_attention", head_width, context)?;
    let (full, sliding) = match (full, sliding) {
        (Some(full), Some(sliding)) => (full, sliding),
        _ => {
            let local = keys.real("rope_local_base_freq", 1.000_001..=1e12)?.unwrap_or(10_000.0);
            let defaults = Defaults { base: Some(1_000_000.0), ..Defaults::default() };
            (rope::read(keys, head_width, context, &defaults)?, Rotary::new(local))
        }
    };
    fits_kernels(keys, head_width, full)?;
    let every = keys
        .size("sliding_window_pattern", MAX_LAYERS)?
        .or(keys.size("_sliding_window_pattern", MAX_LAYERS)?)
        .unwrap_or(6);
    let slides = match kinds(keys, count)? {
        Some(slides) => slides,
        None => (1..=count).map(|number| !number.is_multiple_of(every)).collect(),
    };
    let layer = |slides| match slides {
        true => LayerConfig { mask, rotary: Some(sliding) },
        false => LayerConfig { mask: AttentionMask::Causal, rotary: Some(full) },
    };
    Ok(ModelConfig {
        family: Family::Gemma3,
        vocabulary: keys.required("vocab_size", MAX_SIZE)?,
        context,
        width,
        heads,
        kv_heads,
        head_width,
        hidden: keys.required("intermediate_size", MAX_SIZE)?,
        layers: slides.into_iter().map(layer).collect(),
        norm: NormKind::Rms,
        epsilon: epsilon(keys, "rms_norm_eps", 1e-6)?,
        residual: Residual::Sandwich,
        feed_forward: FeedForwardKind::GeGlu,
        qkv_bias: bias,
        output_bias: bias,
        feed_forward_bias: false,
        qk_norm: Some(QkNormKind::Heads),
        learned_positions: None,
        score_scale: Some((1.0 / scale.sqrt()) as f32),
        embedding_scale: Some((width as f64).sqrt() as f32),
        tied: keys.flag("tie_word_embeddings", true)?,
        json: Map::new(),
    })
}

/// Returns `width / heads`, which must be whole.
fn divided(keys: &Keys<'_>, key: &str, width: usize, heads: usize) -> Outcome<usize> {
    match width.is_multiple_of(heads) {
        true => Ok(width / heads),
        false => keys.refuse(key, format!("a number that divides the width {width}")),
    }
}

/// Requires a key for which transformers has the value of one particular model.
fn stated(keys: &Keys<'_>, key: &str) -> Outcome<()> {
    keys.required(key, MAX_SIZE).map(|_| ())
}

fn epsilon(keys: &Keys<'_>, key: &str, default: f64) -> Outcome<f32> {
    Ok(keys.real(key, EPSILONS)?.unwrap_or(default) as f32)
}

/// Requires what rotary kernels require.
fn fits_kernels(keys: &Keys<'_>, head_width: usize, rotary: Rotary) -> Outcome<()> {
    let columns = rotary.columns.unwrap_or(head_width);
    match head_width.is_multiple_of(8) && columns.is_multiple_of(8) && columns > 0 {
        true => Ok(()),
        false => {
            let expected = format!("heads and rotary columns of a multiple of 8, got {head_width} and {columns}");
            Err(format!(
                "`head_dim`: expected {expected}, got {}",
                keys.get("head_dim").map_or("nothing".into(), shown)
            ))
        }
    }
}

/// Reads the window of sliding attention. Null means that each token sees all earlier ones.
fn window(keys: &Keys<'_>) -> Outcome<AttentionMask> {
    let window = keys.size("sliding_window", MAX_SIZE)?.and_then(|tokens| NonZeroU32::new(tokens as u32));
    Ok(window.map_or(AttentionMask::Causal, AttentionMask::SlidingWindow))
}

/// Reads `layer_types`. True marks a layer with a sliding window.
fn kinds(keys: &Keys<'_>, count: usize) -> Outcome<Option<Vec<bool>>> {
    let Some(list) = keys.list("layer_types")? else { return Ok(None) };
    let slides = list.iter().map(|kind| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    });
    match slides.collect::<Option<Vec<bool>>>() {
        Some(slides) if slides.len() == count => Ok(Some(slides)),
        _ => keys
            .refuse("layer_types", format!("\"full_attention\" or \"sliding_attention\" for each of {count} layers")),
    }
}

/// Sets the masks of Qwen and SmolLM3: a window on some layers, if it is switched on.
fn windows_by_layer(keys: &Keys<'_>, config: &mut ModelConfig) -> Outcome<()> {
    let count = config.layers.len();
    let on = keys.flag("use_sliding_window", false)?;
    let window = window(keys)?;
    let mask = if on { window } else { AttentionMask::Causal };
    let first = keys.count("max_window_layers", MAX_LAYERS)?.unwrap_or(28);
    let slides = match kinds(keys, count)? {
        Some(slides) => slides,
        None => (0..count).map(|number| on && number >= first).collect(),
    };
    if slides.contains(&true) && !(on && matches!(mask, AttentionMask::SlidingWindow(_))) {
        return keys
            .refuse("layer_types", "no sliding attention unless `use_sliding_window` and `sliding_window` are set");
    }
    for (layer, _) in config.layers.iter_mut().zip(slides).filter(|(_, slides)| *slides) {
        layer.mask = mask;
    }
    Ok(())
}
