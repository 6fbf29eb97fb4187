//! A decoder-only transformer as data, read from a `config.json`.

mod families;
pub(crate) mod keys;
mod rope;
mod unread;

use crate::names::{self, FileTensor};
use cuda_std::float_mode;
use keys::Keys;
use serde_json::{Map, Value};
use std::path::Path;
use stepscope_core::ops::{AttentionMask, Rotary};
use stepscope_core::{Error, FileKind, PlainFile, Result};
use stepscope_train::FileType;

/// The largest `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The most layers, and the largest of all other sizes. Both are far above any real model.
const MAX_LAYERS: usize = 1 << 14;
const MAX_SIZE: usize = 1 << 26;
/// The most experts in all layers.
const MAX_EXPERTS: usize = 1 << 16;
/// The most weights, above any real model, so that no product of sizes overflows.
const MAX_WEIGHTS: u128 = 1 << 42;

/// A family of models, which decides the names and the layout of the tensors in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2.
    Gpt2,
    /// Llama 2 and 3, and models of the same architecture, such as TinyLlama and SmolLM2.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3.
    Qwen3,
    /// SmolLM3.
    SmolLm3,
    /// OLMo 2.
    Olmo2,
    /// Phi-3.
    Phi3,
    /// GPT-NeoX, such as Pythia.
    GptNeoX,
    /// Gemma 3, text only.
    Gemma3,
    /// Arcee, such as AFM-4.5B.
    Arcee,
    /// Qwen3 with mixtures of experts, such as Qwen3-30B-A3B.
    Qwen3Moe,
    /// Mixtral.
    Mixtral,
}

/// A norm over the columns of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm, with a bias.
    Layer,
    /// RMSNorm.
    Rms,
}

/// The way in which a block adds attention and feed-forward part to its input x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `h = x + attention(norm(x))`, `y = h + feed_forward(norm(h))`.
    PreNorm,
    /// `y = x + attention(norm(x)) + feed_forward(norm(x))`, with two norms.
    Parallel,
    /// `h = x + norm(attention(x))`, `y = h + norm(feed_forward(h))`.
    PostNorm,
    /// `h = x + norm(attention(norm(x)))`, `y = h + norm(feed_forward(norm(h)))`.
    Sandwich,
}

/// An RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// A norm of each head, with gains that all heads share.
    Heads,
    /// A norm of all heads of the queries together, and one of those of the keys.
    Projections,
}

/// The part of a block that processes each token separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// Two linear layers with GELU in its tanh form.
    Gelu,
    /// Two linear layers with GELU.
    GeluExact,
    /// Two linear layers with the square of ReLU.
    ReluSquared,
    /// `(silu(x Wg) * (x Wu)) Wd`.
    SwiGlu,
    /// `(gelu(x Wg) * (x Wu)) Wd`, with GELU in its tanh form.
    GeGlu,
}

/// The settings in which the layers of a model may differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// The tokens that a query attends to.
    pub mask: AttentionMask,
    /// The rotary positions, if the layer has any.
    pub rotary: Option<Rotary>,
    /// The mixture of experts in place of the feed-forward part, if the layer has one.
    pub mixture: Option<MixtureConfig>,
}

/// A mixture of experts; see [`Mixture`](stepscope_train::nn::Mixture). Each expert is a
/// [`FeedForwardKind::SwiGlu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixtureConfig {
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that a token uses.
    pub chosen: usize,
    /// The hidden columns of an expert.
    pub hidden: usize,
    /// True if the weights of a token's experts are shares of the sum of their probabilities.
    pub normalized: bool,
}

/// A decoder-only transformer.
///
/// ```
/// use stepscope::models::ModelConfig;
///
/// let json = r#"{
///     "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
///     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05,
///     "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": true,
///     "rope_theta": 500000.0, "rope_scaling": {
///         "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
///         "original_max_position_embeddings": 8192
///     }
/// }"#;
/// let llama = ModelConfig::from_json(json.as_bytes())?;
/// assert_eq!(llama.head_width, 64);
/// let unknown = json.replace("llama3", "llama4");
/// let error = ModelConfig::from_json(unknown.as_bytes()).unwrap_err();
/// assert!(error.starts_with("`rope_scaling.rope_type`: expected"), "{error}");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub family: Family,
    /// The number of rows of the token table.
    pub vocabulary: usize,
    /// The largest number of tokens in a sample. A program may lower it.
    pub context: usize,
    /// The columns of a token.
    pub width: usize,
    /// The heads of queries.
    pub heads: usize,
    /// The heads of keys and values.
    pub kv_heads: usize,
    /// The columns of a head.
    pub head_width: usize,
    /// The hidden columns of the feed-forward part, in layers without a mixture.
    pub hidden: usize,
    /// The layers, from the input to the output.
    pub layers: Vec<LayerConfig>,
    /// The norms.
    pub norm: NormKind,
    /// The term that keeps norms of zeros finite.
    pub epsilon: f32,
    /// The residual connections.
    pub residual: Residual,
    /// The feed-forward part.
    pub feed_forward: FeedForwardKind,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if attention's output has a bias.
    pub output_bias: bool,
    /// True if the feed-forward part has biases.
    pub feed_forward_bias: bool,
    /// The norm of queries and keys, if there is one.
    pub qk_norm: Option<QkNormKind>,
    /// The rows of the table of positions that is added to the tokens, if there is one.
    pub learned_positions: Option<usize>,
    /// The factor of attention's scores, unless it is `1 / sqrt(head_width)`.
    pub score_scale: Option<f32>,
    /// The factor of the embedded tokens, if there is one.
    pub embedding_scale: Option<f32>,
    /// The factor with which the auxiliary loss of the routers is a part of the loss, if it is one:
    /// `router_aux_loss_coef`, if `output_router_logits` is true.
    pub router_loss: Option<f32>,
    /// True if the head is the token table.
    pub tied: bool,
    /// The file, which is written back with a model.
    json: Map<String, Value>,
}

impl ModelConfig {
    /// Reads the `config.json` of a folder.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or states something that is not supported.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("config.json");
        let bytes = PlainFile::read_whole(&path, MAX_CONFIG_BYTES).map_err(|reason| Error::file(&path, reason))?;
        Self::from_json(&bytes).map_err(|reason| match FileKind::of(&bytes) {
            Some(kind) if kind != FileKind::Json => Error::file(&path, kind.refusal("a model's configuration in JSON")),
            _ => Error::file(&path, reason),
        })
    }

    /// Reads the contents of a `config.json`.
    ///
    /// # Errors
    /// The key whose value is not supported, the supported values, and the actual value.
    pub fn from_json(bytes: &[u8]) -> std::result::Result<Self, String> {
        float_mode::in_default(|| {
            let json: Value = serde_json::from_slice(bytes).map_err(|reason| reason.to_string())?;
            let config = families::read(&Keys::of(&json)?)?;
            let product = |tensor: &FileTensor| tensor.shape.iter().map(|&extent| extent as u128).product::<u128>();
            let weights: u128 = names::tensors(&config).iter().map(product).sum();
            if weights > MAX_WEIGHTS {
                return Err(format!("describes {weights} weights, but the most are {MAX_WEIGHTS}: check its sizes"));
            }
            let Value::Object(json) = json else { unreachable!("`Keys` has accepted an object") };
            Ok(Self { json, ..config })
        })
    }

    /// Returns the type of the weights in files, which the `config.json` states as `dtype`, or as
    /// `torch_dtype`. It is F32 if the file states none.
    pub fn stored(&self) -> FileType {
        match self.stored_name() {
            "bfloat16" => FileType::Bf16,
            "float16" => FileType::F16,
            _ => FileType::F32,
        }
    }

    /// Returns the name of [`ModelConfig::stored`] in a `config.json`.
    pub(crate) fn stored_name(&self) -> &str {
        let stated = ["dtype", "torch_dtype"].iter().find_map(|key| self.json.get(*key)?.as_str());
        stated.filter(|name| ["bfloat16", "float16"].contains(name)).unwrap_or("float32")
    }

    /// Returns the `config.json` that was read, with the type of the stored weights, which are not
    /// quantised. `auto_map` is left out: it names files of code that would have to stand next to
    /// it, and transformers has a class for each [`Family`].
    pub fn to_json(&self, dtype: &str) -> String {
        let mut json = self.json.clone();
        json.remove("quantization_config");
        json.remove("auto_map");
        // transformers 5 has renamed the key.
        let old = json.contains_key("torch_dtype") && !json.contains_key("dtype");
        json.insert(if old { "torch_dtype" } else { "dtype" }.into(), dtype.into());
        serde_json::to_string_pretty(&json).expect("an object of plain values has a JSON form")
    }

    /// Returns the columns of queries, keys and values together.
    pub(crate) fn qkv_columns(&self) -> usize {
        // A product that overflows becomes an extent that no memory can hold.
        self.heads.saturating_add(self.kv_heads.saturating_mul(2)).saturating_mul(self.head_width)
    }
}
