//! Reads and writes the weights of Hugging Face transformers, for GPT-2 and Llama.
//!
//! | ours | GPT-2's | Llama's |
//! |---|---|---|
//! | `attention.qkv_proj` | `c_attn`, as it is | `q_proj`, `k_proj`, `v_proj`, each transposed, side by side |
//! | other matrices | as they are (`Conv1D`) | transposed (`Linear`) |
//! | tables, gains, biases | as they are | as they are |
//!
//! Invariant: a folder must give every weight, each finite and of the shape that `config.json`
//! requires; otherwise nothing is changed.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use stepscope::{
    Error, FileKind, HostMemory, ParameterEntry, ParameterSpec, Parameters, PlainFile, Result, StateDict, Transfer,
    replace_file,
};

use crate::train::bad_input::{Outcome, bad};
use crate::train::cli::Arch;
use crate::train::model::Sizes;
use crate::train::plan::layout;

/// The largest `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The most layers, and the largest of all other sizes. Both are far above any real model.
const MAX_LAYERS: usize = 1 << 14;
const MAX_SIZE: usize = 1 << 26;

/// The ranges of a norm's epsilon and of the rotary base.
const EPSILONS: [f64; 2] = [1e-30, 1.0];
const BASES: [f64; 2] = [1.0, 1e12];

/// Masks and frequencies that older files store next to the weights. They are recomputed.
const COMPUTED: [&str; 3] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];

fn is_computed(name: &str) -> bool {
    COMPUTED.iter().any(|end| name.ends_with(end))
}

/// A model's weights, with our names and layout.
pub(crate) struct Weights {
    pub(crate) sizes: Sizes,
    values: HashMap<String, Vec<f32>>,
}

/// A tensor in their files. It holds some or all columns of one of our parameters.
struct Theirs {
    name: String,
    /// Rows in our parameter.
    rows: usize,
    cols: usize,
    /// True if the file stores it as `[cols, rows]`.
    transposed: bool,
    /// The shape in the file.
    shape: Vec<usize>,
}

/// Returns the tensors in their files that hold one of our parameters.
fn theirs(entry: &ParameterEntry, sizes: &Sizes) -> Vec<Theirs> {
    let extents = entry.shape();
    let (rows, cols) = match *extents.extents() {
        [rows, cols] => (rows, cols),
        _ => (1, extents.elements()),
    };
    let one = |name: String, cols: usize, transposed: bool| {
        let shape = match (extents.extents().len(), transposed) {
            (1, _) => vec![cols],
            (_, true) => vec![cols, rows],
            (_, false) => vec![rows, cols],
        };
        Theirs { name, rows, cols, transposed, shape }
    };
    let ours = entry.name().replace(".gain", ".weight");
    let (place, name) = match ours.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
        Some((layer, name)) => (layer, name),
        None => ("", &*ours),
    };
    let (module, kind) = name.rsplit_once('.').unwrap_or((name, ""));
    match sizes.arch {
        Arch::Gpt2 => {
            let (before, module) = match module {
                "tokens" => ("", "wte"),
                "positions" => ("", "wpe"),
                "norm" => ("", "ln_f"),
                "norm1" => ("h.", "ln_1"),
                "norm2" => ("h.", "ln_2"),
                "attention.qkv_proj" => ("h.", "attn.c_attn"),
                "attention.o_proj" => ("h.", "attn.c_proj"),
                "mlp.up" => ("h.", "mlp.c_fc"),
                "mlp.down" => ("h.", "mlp.c_proj"),
                "head" => return vec![one("lm_head.weight".into(), cols, false)],
                other => unreachable!("no parameter `{other}` of GPT-2"),
            };
            let place = if before.is_empty() { String::new() } else { format!("{before}{place}.") };
            vec![one(format!("transformer.{place}{module}.{kind}"), cols, false)]
        }
        Arch::Llama => {
            let layer = format!("model.layers.{place}.");
            match module {
                "tokens" => vec![one("model.embed_tokens.weight".into(), cols, false)],
                "norm" => vec![one("model.norm.weight".into(), cols, false)],
                "head" => vec![one("lm_head.weight".into(), cols, false)],
                "norm1" => vec![one(format!("{layer}input_layernorm.weight"), cols, false)],
                "norm2" => vec![one(format!("{layer}post_attention_layernorm.weight"), cols, false)],
                "attention.qkv_proj" => {
                    let [queries, keys] = sizes.heads.map(|heads| heads * sizes.width / sizes.heads[0]);
                    let part = |(part, cols)| one(format!("{layer}self_attn.{part}_proj.weight"), cols, true);
                    [("q", queries), ("k", keys), ("v", keys)].map(part).into()
                }
                "attention.o_proj" => vec![one(format!("{layer}self_attn.o_proj.weight"), cols, true)],
                mlp => vec![one(format!("{layer}{mlp}.weight"), cols, true)],
            }
        }
    }
}

/// Returns, for each element of their tensor in their order, its index in our parameter. The tensor
/// holds the columns from `first` on; our rows have `all` columns.
fn places(theirs: &Theirs, first: usize, all: usize) -> impl Iterator<Item = usize> + use<> {
    let Theirs { rows, cols, transposed, .. } = *theirs;
    (0..rows * cols).map(move |at| {
        let (row, col) = if transposed { (at % rows, at / rows) } else { (at / cols, at % cols) };
        row * all + first + col
    })
}

/// Converts a flat region of ours to their tensors with their shapes.
///
/// # Errors
/// Never, since shapes and values agree.
pub(crate) fn as_theirs(layout: &ParameterSpec, sizes: &Sizes, flat: &[f32]) -> Result<StateDict> {
    let mut tensors = StateDict::default();
    for entry in layout.entries() {
        let (ours, mut first) = (&flat[entry.range()], 0);
        let parts = theirs(entry, sizes);
        let all = parts.iter().map(|part| part.cols).sum();
        for part in parts {
            let values = places(&part, first, all).map(|place| ours[place]).collect();
            first += part.cols;
            tensors.insert(part.name, part.shape, values)?;
        }
    }
    Ok(tensors)
}

impl Weights {
    /// Reads a folder with `config.json` and the weights, in one file or in several with an index.
    pub(crate) fn read(folder: &Path, context: Option<usize>) -> Outcome<Self> {
        let config = folder.join("config.json");
        let told = PlainFile::read_whole(&config, MAX_CONFIG_BYTES).map_err(|reason| bad(config.display(), reason))?;
        let told = serde_json::from_slice(&told).map_err(|reason| match FileKind::of(&told) {
            Some(kind) if kind != FileKind::Json => {
                bad(config.display(), kind.refusal("a model's configuration in JSON"))
            }
            _ => bad(config.display(), reason),
        })?;
        let mut sizes = sizes(&told).map_err(|reason| bad(config.display(), reason))?;
        check_memory(&sizes).map_err(|reason| bad(config.display(), reason))?;
        let mut found = StateDict::from_pretrained(folder, is_computed).map_err(refused)?;
        let place = folder.display();
        let (layout, mut values) = (layout(sizes)?, HashMap::new());
        for entry in layout.entries() {
            let parts = theirs(entry, &sizes);
            let all: usize = parts.iter().map(|part| part.cols).sum();
            let (mut ours, mut first) = (vec![0.0; entry.shape().elements()], 0);
            for part in parts {
                // The hub's gpt2 is saved without its head, and its names lack the prefix
                // `transformer.`.
                let bare = part.name.trim_start_matches("transformer.").to_owned();
                let tensor = found.remove(&part.name).or_else(|| found.remove(&bare));
                let Some((shape, values)) = tensor else {
                    return Err(bad(
                        place,
                        format!("has no `{}` {:?}, which config.json requires", part.name, part.shape),
                    ));
                };
                if shape != part.shape {
                    let reason = format!("`{}`: config.json requires {:?}, got {shape:?}", part.name, part.shape);
                    return Err(bad(place, reason));
                }
                for (place, value) in places(&part, first, all).zip(values) {
                    ours[place] = value;
                }
                first += part.cols;
            }
            values.insert(entry.name().to_owned(), ours);
        }
        let copied = |name: &str| sizes.tied && name == "lm_head.weight";
        if let Some((more, ..)) = found.iter().find(|(name, ..)| !copied(name)) {
            return Err(bad(place, format!("has `{more}`, which is not a weight of this model")));
        }
        // A shorter context uses the first positions of the table.
        if let Some(context) = context {
            if context > sizes.context {
                return Err(bad(place, format!("has a context of {}, got --context {context}", sizes.context)));
            }
            sizes.context = context;
            if let Some(positions) = values.get_mut("positions.weight") {
                positions.truncate(context * sizes.width);
            }
        }
        Ok(Self { sizes, values })
    }

    /// Overwrites all weights with these.
    ///
    /// # Errors
    /// When the upload fails.
    pub(crate) fn load(&self, parameters: &mut Parameters) -> Result<()> {
        let bytes = |entry: &ParameterEntry| self.values.get(entry.name()).map(|values| bytemuck::cast_slice(values));
        parameters.load(bytes, Transfer::new())
    }
}

/// Reports file errors as the user's to fix, and others, such as a memory shortage, unchanged.
fn refused(error: Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        Error::File { path, reason } => bad(path.display(), reason),
        error => error.into(),
    }
}

/// Writes `config.json` and the weights for transformers into a folder, which is created if
/// missing. Each file has at most `max_shard_size` bytes.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn write(folder: &Path, parameters: &Parameters, sizes: &Sizes, max_shard_size: Option<u64>) -> Result<()> {
    let failed = |reason: std::io::Error| Error::File { path: folder.into(), reason: reason.to_string() };
    fs::create_dir_all(folder).map_err(failed)?;
    let tensors = as_theirs(parameters.layout(), sizes, &parameters.flat().read()?)?;
    tensors.save_pretrained(folder, max_shard_size)?;
    let config = serde_json::to_vec_pretty(&config(sizes)).expect("plain numbers have a JSON form");
    replace_file(folder.join("config.json"), &config)
}

/// Reads the sizes from a `config.json`. Returns an error for any setting that this program does
/// not support.
fn sizes(config: &Value) -> std::result::Result<Sizes, String> {
    let whole = |key: &str, most: usize| -> std::result::Result<usize, String> {
        let found = config[key].as_u64().filter(|&number| number > 0 && number <= most as u64);
        found
            .map(|number| number as usize)
            .ok_or_else(|| format!("`{key}`: expected a whole number from 1 to {most}, got {}", shown(&config[key])))
    };
    let number = |key: &str| whole(key, MAX_SIZE);
    let real_of = |key: &str, value: &Value, default: f64, [least, most]: [f64; 2]| match value {
        Value::Null => Ok(default),
        _ => value
            .as_f64()
            .filter(|number| (least..=most).contains(number))
            .ok_or_else(|| format!("`{key}`: expected a number from {least:e} to {most:e}, got {}", shown(value))),
    };
    let epsilon = |key: &str, default: f64| real_of(key, &config[key], default, EPSILONS).map(|number| number as f32);
    let only = |key: &str, known: &[Value]| {
        let got = &config[key];
        let one = got.is_null() || known.contains(got);
        if one { Ok(()) } else { Err(format!("`{key}`: expected {}, got {}", Value::from(known.to_vec()), shown(got))) }
    };
    let tied = |default| match &config["tie_word_embeddings"] {
        Value::Null => Ok(default),
        Value::Bool(tied) => Ok(*tied),
        other => Err(format!("`tie_word_embeddings`: expected true or false, got {}", shown(other))),
    };
    let heads_fit = |width: usize, heads: usize| match width.is_multiple_of(heads) {
        true => Ok(()),
        false => {
            Err(format!("expected a width that is a multiple of the heads, got {heads} heads and a width of {width}"))
        }
    };
    match config["model_type"].as_str() {
        Some("gpt2") => {
            only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
            only("scale_attn_weights", &[json!(true)])?;
            only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
            let (width, heads) = (number("n_embd")?, number("n_head")?);
            heads_fit(width, heads)?;
            Ok(Sizes {
                arch: Arch::Gpt2,
                vocabulary: number("vocab_size")?,
                context: number("n_positions")?,
                layers: whole("n_layer", MAX_LAYERS)?,
                width,
                heads: [heads; 2],
                hidden: if config["n_inner"].is_null() { 4 * width } else { number("n_inner")? },
                tied: tied(true)?,
                epsilon: epsilon("layer_norm_epsilon", 1e-5)?,
                base: 10_000.0,
            })
        }
        Some("llama") => {
            only("hidden_act", &[json!("silu")])?;
            only("attention_bias", &[json!(false)])?;
            only("mlp_bias", &[json!(false)])?;
            only("rope_scaling", &[])?;
            // Newer files keep all rotary settings in one object.
            let rope = &config["rope_parameters"];
            if !rope["rope_type"].is_null() && rope["rope_type"] != "default" {
                let got = shown(&rope["rope_type"]);
                return Err(format!("`rope_parameters`: expected the type \"default\", got {got}"));
            }
            let (width, heads) = (number("hidden_size")?, number("num_attention_heads")?);
            heads_fit(width, heads)?;
            only("head_dim", &[json!(width / heads)])?;
            let key_heads =
                if config["num_key_value_heads"].is_null() { heads } else { number("num_key_value_heads")? };
            if !heads.is_multiple_of(key_heads) {
                return Err(format!(
                    "`num_key_value_heads`: expected a number that divides {heads} heads, got {key_heads}"
                ));
            }
            let outer = real_of("rope_theta", &config["rope_theta"], 10_000.0, BASES)?;
            Ok(Sizes {
                arch: Arch::Llama,
                vocabulary: number("vocab_size")?,
                context: number("max_position_embeddings")?,
                layers: whole("num_hidden_layers", MAX_LAYERS)?,
                width,
                heads: [heads, key_heads],
                hidden: number("intermediate_size")?,
                tied: tied(false)?,
                epsilon: epsilon("rms_norm_eps", 1e-6)?,
                base: real_of("rope_theta", &rope["rope_theta"], outer, BASES)?,
            })
        }
        _ => Err(format!("`model_type`: expected \"gpt2\" or \"llama\", got {}", shown(&config["model_type"]))),
    }
}

/// Formats a value of a file for a message, shortened.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let start: String = text.chars().take(80).collect();
    if start.len() < text.len() { start + ".." } else { start }
}

/// Returns an error if the host cannot hold the weights twice in f32, as read and as laid out. Runs
/// before any are allocated.
fn check_memory(sizes: &Sizes) -> std::result::Result<(), String> {
    let Sizes { arch, vocabulary, context, layers, width, hidden, .. } = *sizes;
    let positions = if arch == Arch::Gpt2 { context } else { 0 };
    let [vocabulary, positions, layers, width, hidden] =
        [vocabulary, positions, layers, width, hidden].map(|size| size as u128);
    // A lower bound for both architectures: attention's output, two matrices, and the tables.
    let weights = layers * width * (width + 2 * hidden) + (vocabulary + positions) * width;
    let (bytes, available) = (2 * weights * size_of::<f32>() as u128, HostMemory::available_bytes());
    if bytes <= u128::from(available) {
        return Ok(());
    }
    Err(format!(
        "{layers} layers of width {width} and {hidden} hidden columns, and {vocabulary} tokens, are at least {weights} weights, which take {bytes} \
         bytes of the host's memory; {available} are available"
    ))
}

/// Returns the `config.json` of these sizes.
fn config(sizes: &Sizes) -> Value {
    let Sizes { arch, vocabulary, context, layers, width, heads: [heads, key_heads], hidden, tied, epsilon, base } =
        *sizes;
    // Conversion to f64 would add digits that nobody wrote.
    let epsilon: f64 = epsilon.to_string().parse().unwrap_or(epsilon.into());
    match arch {
        Arch::Gpt2 => json!({
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
            "vocab_size": vocabulary, "n_positions": context, "n_ctx": context, "n_embd": width, "n_layer": layers,
            "n_head": heads, "n_inner": hidden, "layer_norm_epsilon": epsilon, "tie_word_embeddings": tied,
        }),
        Arch::Llama => json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
            "intermediate_size": hidden, "rms_norm_eps": epsilon, "rope_theta": base, "tie_word_embeddings": tied,
            "attention_bias": false, "mlp_bias": false,
        }),
    }
}
