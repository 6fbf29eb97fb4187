//! The table of docs/finetune.md: what fits into 128 GB.

use crate::predict::step;
use crate::train::cli::Precision;
use crate::train::model::{Gpt, Mode};
use serde_json::json;
use stepscope::bf16;
use stepscope::models::ModelConfig;

/// The sizes of a published model: vocabulary, width, hidden columns, layers, heads of queries and
/// of keys, columns of a head.
type Sizes = [usize; 7];

/// The models, with their families and whether head and token table are one.
const MODELS: [(&str, &str, Sizes, bool); 7] = [
    ("Qwen3-0.6B", "qwen3", [151_936, 1024, 3072, 28, 16, 8, 128], true),
    ("Llama-3.2-1B", "llama", [128_256, 2048, 8192, 16, 32, 8, 64], true),
    ("Qwen3-1.7B", "qwen3", [151_936, 2048, 6144, 28, 16, 8, 128], true),
    ("Llama-3.2-3B", "llama", [128_256, 3072, 8192, 28, 24, 8, 128], true),
    ("Qwen3-4B", "qwen3", [151_936, 2560, 9728, 36, 32, 8, 128], true),
    ("Mistral-7B-v0.3", "mistral", [32_768, 4096, 14_336, 32, 32, 8, 128], false),
    ("Llama-3.1-8B", "llama", [128_256, 4096, 14_336, 32, 32, 8, 128], false),
];
/// The bytes of a GB10.
const MEMORY: u64 = 128_000_000_000;
const GIB: f64 = (1 << 30) as f64;

fn config((_, family, sizes, tied): (&str, &str, Sizes, bool)) -> ModelConfig {
    let [vocabulary, width, hidden, layers, heads, kv_heads, head] = sizes;
    let json = json!({
        "model_type": family, "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": tied,
        "sliding_window": null, "hidden_act": "silu",
    });
    ModelConfig::from_json(json.to_string().as_bytes()).unwrap()
}

/// The rows of the table are what `stepscope predict --config` prints.
#[test]
fn table_of_the_page_is_computed() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/finetune.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut missing = Vec::new();
    for named in MODELS {
        let mut config = config(named);
        config.context = 2048;
        let weights = Gpt::<bf16>::new(config.clone(), Mode::default()).unwrap().1.weights();
        let needs = |recompute: bool, contexts: usize| {
            let bytes = step::memory(&config, recompute, Precision::Bf16, contexts).unwrap().total();
            if bytes > MEMORY { "-".to_owned() } else { format!("{:.1}", bytes as f64 / GIB) }
        };
        let cells = [needs(false, 1), needs(true, 1), needs(true, 8)].join(" | ");
        let row = format!("| {} | {:.2} | {cells} |", named.0, weights as f64 / 1e9);
        if !page.contains(&row) {
            missing.push(row);
        }
    }
    assert!(missing.is_empty(), "docs/finetune.md must have these rows:\n{}", missing.join("\n"));
}
