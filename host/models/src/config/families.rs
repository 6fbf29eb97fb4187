//! The families, each as it maps its `config.json` to [`ModelConfig`].
//!
//! Defaults equal the defaults of transformers' configuration classes. A `config.json` must state
//! every size whose default in transformers is the size of one particular model.

use super::keys::{Keys, Outcome};
use super::rope::{self, Defaults};
use super::unread;
use super::{
    Family, FeedForwardKind, LayerConfig, MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, MixtureConfig, ModelConfig, NormKind,
    QkNormKind, Residual,
};
use serde_json::{Map, json};
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use stepscope_core::ops::{AttentionMask, Rotary};

/// The window of a Mistral whose file does not state one.
const MISTRAL_WINDOW: NonZeroU32 = NonZeroU32::new(4096).expect("a number above 0");
/// The range of a norm's epsilon.
const EPSILONS: RangeInclusive<f64> = 1e-30..=1.0;

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
        Some("qwen3_moe") => qwen3_moe(keys)?,
        Some("mixtral") => mixtral(keys)?,
        Some("gemma3") => {
            let known =
                "\"gemma3_text\", a Gemma 3 of texts only, such as the 1B and the 270M: images are not supported";
            return keys.refuse("model_type", known);
        }
        _ => {
            let known = "gpt2, llama, mistral, qwen2, qwen3, smollm3, olmo2, phi3, gpt_neox, gemma3_text, arcee, \
                         qwen3_moe or mixtral: give a model of one of these families";
            return keys.refuse("model_type", known);
        }
    };
    keys.flag("is_decoder", true)?;
    keys.only("is_encoder_decoder", &[json!(false)])?;
    keys.only("is_causal", &[json!(true)])?;
    keys.only("add_cross_attention", &[json!(false)])?;
    keys.only("tie_encoder_decoder", &[json!(false)])?;
    keys.only("pruned_heads", &[json!({})])?;
    keys.only("chunk_size_feed_forward", &[json!(0)])?;
    if let Some(keys) = keys.object("quantization_config")? {
        quantization(&keys)?;
    }
    unread::check(keys)?;
    Ok(config)
}

/// Checks the settings of a file in NF4: those of bitsandbytes with double quantisation.
fn quantization(keys: &Keys<'_>) -> Outcome<()> {
    if keys.text("quant_method")?.is_some_and(|method| method != "bitsandbytes") {
        return keys.refuse("quant_method", "\"bitsandbytes\": give the model as it was before it was quantised");
    }
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
    let feed_forward = gelu(keys, "activation_function", "gelu_new")?;
    keys.only("scale_attn_weights", &[json!(true)])?;
    keys.only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
    let width = named_twice(keys, "n_embd", "hidden_size", MAX_SIZE)?;
    let heads = named_twice(keys, "n_head", "num_attention_heads", MAX_SIZE)?;
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: None, mixture: None };
    let context = named_twice(keys, "n_positions", "max_position_embeddings", MAX_SIZE)?;
    let layers = named_twice(keys, "n_layer", "num_hidden_layers", MAX_LAYERS)?;
    Ok(ModelConfig {
        family: Family::Gpt2,
        vocabulary: keys.required("vocab_size", MAX_SIZE)?,
        context,
        width,
        heads,
        kv_heads: heads,
        head_width: divided(keys, "n_head", width, heads)?,
        hidden: keys.size("n_inner", MAX_SIZE)?.unwrap_or(4 * width),
        layers: vec![layer; layers],
        norm: NormKind::Layer,
        epsilon: epsilon(keys, "layer_norm_epsilon", 1e-5)?,
        residual: Residual::PreNorm,
        feed_forward,
        qkv_bias: true,
        output_bias: true,
        feed_forward_bias: true,
        qk_norm: None,
        learned_positions: Some(context),
        score_scale: None,
        embedding_scale: None,
        router_loss: None,
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
        None if family == Family::Qwen3 => 128,
        None => divided(keys, "num_attention_heads", width, heads)?,
    };
    let context = match family {
        // Files of the first Llama do not state it.
        Family::Llama => keys.size("max_position_embeddings", MAX_SIZE)?.unwrap_or(2048),
        _ => keys.required("max_position_embeddings", MAX_SIZE)?,
    };
    let rotary = rope::read(keys, head_width, context, defaults)?;
    fits_kernels(head_width, rotary)?;
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: Some(rotary), mixture: None };
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
        router_loss: None,
        tied: keys.flag("tie_word_embeddings", false)?,
        json: Map::new(),
    })
}

fn llama(keys: &Keys<'_>) -> Outcome<ModelConfig> {
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
    let mask = match keys.has("sliding_window") {
        true => window(keys)?,
        false => AttentionMask::SlidingWindow(MISTRAL_WINDOW),
    };
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
    windows_by_layer(keys, &mut config)?;
    Ok(ModelConfig { qk_norm: Some(QkNormKind::Heads), qkv_bias: bias, output_bias: bias, ..config })
}

fn qwen3_moe(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = like_llama(keys, Family::Qwen3Moe, &Defaults::default())?;
    stated(keys, "num_key_value_heads")?;
    let mask = match keys.flag("use_sliding_window", false)? {
        true => {
            stated(keys, "sliding_window")?;
            window(keys)?
        }
        false => AttentionMask::Causal,
    };
    // Without effect unless the window is used.
    keys.get("sliding_window");
    let hidden = keys.required("moe_intermediate_size", MAX_SIZE)?;
    let normalized = keys.flag("norm_topk_prob", false)?;
    let mixture = mixture(keys, "num_experts", "num_local_experts", config.layers.len(), hidden, normalized)?;
    let every = keys.size("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let numbers = keys.list("mlp_only_layers")?.unwrap_or_default().iter().map(serde_json::Value::as_u64);
    let Some(without) = numbers.collect::<Option<Vec<u64>>>() else {
        return keys.refuse("mlp_only_layers", "numbers of layers");
    };
    for (number, layer) in config.layers.iter_mut().enumerate() {
        let has_experts = (number + 1).is_multiple_of(every) && !without.contains(&(number as u64));
        (layer.mask, layer.mixture) = (mask, has_experts.then_some(mixture));
    }
    let (qk_norm, router_loss) = (Some(QkNormKind::Heads), router_loss(keys)?);
    Ok(ModelConfig { qk_norm, qkv_bias: bias, output_bias: bias, router_loss, ..config })
}

fn mixtral(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    keys.only("router_jitter_noise", &[json!(0.0), json!(0)])?;
    let mask = window(keys)?;
    let epsilon = epsilon(keys, "rms_norm_eps", 1e-5)?;
    let defaults = Defaults { base: Some(1_000_000.0), ..Defaults::default() };
    let mut config = like_llama(keys, Family::Mixtral, &defaults)?;
    stated(keys, "num_key_value_heads")?;
    let mixture = mixture(keys, "num_local_experts", "num_experts", config.layers.len(), config.hidden, true)?;
    config.layers.iter_mut().for_each(|layer| (layer.mask, layer.mixture) = (mask, Some(mixture)));
    Ok(ModelConfig { epsilon, router_loss: router_loss(keys)?, ..config })
}

/// Reads the settings of experts of so many hidden columns, whose number has two names.
fn mixture(
    keys: &Keys<'_>,
    key: &str,
    other: &str,
    layers: usize,
    hidden: usize,
    normalized: bool,
) -> Outcome<MixtureConfig> {
    let experts = named_twice(keys, key, other, MAX_EXPERTS)?;
    if experts.saturating_mul(layers) > MAX_EXPERTS {
        return keys.refuse(key, format!("at most {MAX_EXPERTS} experts in {layers} layers"));
    }
    let chosen = keys.required("num_experts_per_tok", MAX_EXPERTS)?;
    if chosen > experts {
        return keys.refuse("num_experts_per_tok", format!("at most {experts} experts"));
    }
    Ok(MixtureConfig { experts, chosen, hidden, normalized })
}

/// Reads the factor of the routers' auxiliary loss.
fn router_loss(keys: &Keys<'_>) -> Outcome<Option<f32>> {
    let factor = keys.real("router_aux_loss_coef", 0.0..=1e6)?.unwrap_or(0.001);
    Ok(keys.flag("output_router_logits", false)?.then_some(factor as f32))
}

fn smollm3(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let bias = keys.flag("attention_bias", false)?;
    let feed_forward_bias = keys.flag("mlp_bias", false)?;
    let tied = keys.flag("tie_word_embeddings", true)?;
    let mut config = like_llama(keys, Family::SmolLm3, &Defaults { base: Some(2_000_000.0), ..Defaults::default() })?;
    stated(keys, "num_key_value_heads")?;
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
    windows(keys, &mut config, |number| !rotates[number])?;
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
    let defaults = Defaults { scaling: rope::LONGROPE, share: Some(1.0), ..Defaults::default() };
    let mut config = like_llama(keys, Family::Phi3, &defaults)?;
    config.layers.iter_mut().for_each(|layer| layer.mask = mask);
    Ok(ModelConfig { epsilon, ..config })
}

fn gpt_neox(keys: &Keys<'_>) -> Outcome<ModelConfig> {
    let feed_forward = gelu(keys, "hidden_act", "gelu")?;
    let width = keys.required("hidden_size", MAX_SIZE)?;
    let heads = keys.required("num_attention_heads", MAX_SIZE)?;
    let head_width = divided(keys, "num_attention_heads", width, heads)?;
    keys.only("head_dim", &[json!(head_width)])?;
    let context = keys.required("max_position_embeddings", MAX_SIZE)?;
    let base = keys.real("rotary_emb_base", 1.000_001..=1e12)?.unwrap_or(10_000.0);
    if keys.get("rope_theta").is_some_and(|other| other.as_f64() != Some(base)) {
        return keys.refuse("rope_theta", format!("{base}, as in `rotary_emb_base`"));
    }
    // transformers 4.57 writes the share of rotary columns under both names.
    let share = keys.real("rotary_pct", 0.0..=1.0)?.unwrap_or(0.25);
    if keys.real("partial_rotary_factor", 0.0..=1.0)?.is_some_and(|other| other != share) {
        return keys.refuse("partial_rotary_factor", format!("{share}, as in `rotary_pct`"));
    }
    let defaults = Defaults { base: Some(base), share: Some(share), ..Defaults::default() };
    let rotary = rope::read(keys, head_width, context, &defaults)?;
    fits_kernels(head_width, rotary)?;
    let bias = keys.flag("attention_bias", true)?;
    let parallel = keys.flag("use_parallel_residual", true)?;
    let layer = LayerConfig { mask: AttentionMask::Causal, rotary: Some(rotary), mixture: None };
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
        feed_forward,
        qkv_bias: bias,
        output_bias: bias,
        feed_forward_bias: true,
        qk_norm: None,
        learned_positions: None,
        score_scale: None,
        embedding_scale: None,
        router_loss: None,
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
    let local = keys.real("rope_local_base_freq", 1.000_001..=1e12)?.unwrap_or(10_000.0);
    let (full, sliding) = match keys.object("rope_parameters")? {
        Some(_) => {
            let global = keys.real("rope_theta", 1.000_001..=1e12)?.unwrap_or(1_000_000.0);
            let read = |kind, base| rope::read_kind(keys, kind, base, head_width, context);
            (read("full_attention", global)?, read("sliding_attention", local)?)
        }
        None => {
            let defaults = Defaults { base: Some(1_000_000.0), ..Defaults::default() };
            (rope::read(keys, head_width, context, &defaults)?, Rotary::new(local))
        }
    };
    fits_kernels(head_width, full)?;
    let every = keys.size("sliding_window_pattern", MAX_LAYERS)?.unwrap_or(6);
    // transformers writes the other key next to `layer_types`, and never reads it.
    let unread = keys.count("_sliding_window_pattern", MAX_LAYERS)?.unwrap_or(every);
    let slides = match kinds(keys, count)? {
        Some(slides) => slides,
        None if unread != every => return keys.refuse("_sliding_window_pattern", format!("{every}, or `layer_types`")),
        None => (1..=count).map(|number| !number.is_multiple_of(every)).collect(),
    };
    let layer = |slides| match slides {
        true => LayerConfig { mask, rotary: Some(sliding), mixture: None },
        false => LayerConfig { mask: AttentionMask::Causal, rotary: Some(full), mixture: None },
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
        router_loss: None,
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
fn fits_kernels(head_width: usize, rotary: Rotary) -> Outcome<()> {
    let columns = rotary.columns.unwrap_or(head_width);
    match head_width.is_multiple_of(8) && columns.is_multiple_of(8) && columns > 0 {
        true => Ok(()),
        false => Err(format!(
            "`head_dim`: expected a width and a number of rotary columns of a multiple of 8, got {head_width} and {columns}"
        )),
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

/// Sets the masks of Qwen: a window from one layer on, if it is switched on.
fn windows_by_layer(keys: &Keys<'_>, config: &mut ModelConfig) -> Outcome<()> {
    let first = keys.count("max_window_layers", MAX_LAYERS)?.unwrap_or(28);
    windows(keys, config, |number| number >= first)
}

/// Sets the masks of layers: a window on those that `layer_types` or `slides` names, if it is
/// switched on.
fn windows(keys: &Keys<'_>, config: &mut ModelConfig, slides: impl Fn(usize) -> bool) -> Outcome<()> {
    let count = config.layers.len();
    let on = keys.flag("use_sliding_window", false)?;
    let window = window(keys)?;
    let mask = if on { window } else { AttentionMask::Causal };
    let slides = match kinds(keys, count)? {
        Some(slides) => slides,
        None => (0..count).map(|number| on && slides(number)).collect(),
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

/// Reads a size that transformers knows under two names.
fn named_twice(keys: &Keys<'_>, key: &str, other: &str, most: usize) -> Outcome<usize> {
    match (keys.size(key, most)?, keys.size(other, most)?) {
        (Some(size), Some(same)) if size != same => keys.refuse(other, format!("{size}, as `{key}`")),
        (None, None) => keys.required(key, most),
        (size, same) => Ok(size.or(same).unwrap_or_default()),
    }
}

/// Reads the activation of two linear layers: GELU, exact or in its tanh form.
fn gelu(keys: &Keys<'_>, key: &str, default: &str) -> Outcome<FeedForwardKind> {
    match keys.text(key)?.unwrap_or(default) {
        "gelu" => Ok(FeedForwardKind::GeluExact),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(FeedForwardKind::Gelu),
        _ => keys.refuse(key, "\"gelu\", \"gelu_new\", \"gelu_fast\" or \"gelu_pytorch_tanh\""),
    }
}
