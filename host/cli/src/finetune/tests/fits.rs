//! The tables of docs/finetune.md: what fits into 128 GB.

use crate::finetune::cli::Quantize;
use crate::predict::step::{self, Adapters, Work};
use crate::train::cli::Precision;
use crate::train::model::{Gpt, Mode, TrainingMemory};
use serde_json::json;
use stepscope::bf16;
use stepscope::models::ModelConfig;
use stepscope_predict::{Forecast, Gpu, Kernels};

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
/// Larger models, of which only adapters are trained, but for the first one in small memory.
const LARGER: [(&str, &str, Sizes, bool); 3] = [
    ("Qwen3-14B", "qwen3", [151_936, 5120, 17_408, 40, 40, 8, 128], false),
    ("Qwen3-32B", "qwen3", [151_936, 5120, 25_600, 64, 64, 8, 128], false),
    ("Llama-3.3-70B", "llama", [128_256, 8192, 28_672, 80, 64, 8, 128], false),
];
/// The rank of the adapters.
const RANK: usize = 16;
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

/// The columns of a table: true if a run recomputes, and its contexts per step.
const COLUMNS: [(bool, usize); 3] = [(false, 1), (true, 1), (true, 8)];
/// The column for which the table has the predicted tokens per second.
const PREDICTED: usize = 1;
const CONTEXT: usize = 2048;

/// Predicts the tokens per second of a run on a GB10, to two digits, which is more than the
/// prediction is worth.
fn tokens_per_second(config: &ModelConfig, memory: TrainingMemory) -> String {
    let (recompute, contexts) = COLUMNS[PREDICTED];
    let mode = Mode { recompute, memory, ..Mode::default() };
    let (gpu, work) = (Gpu::GB10, Work::Gpt { config: Box::new(config.clone()), mode, lora: None });
    let launches = step::launches(&gpu, &work, Precision::Bf16, contexts).unwrap();
    let forecast = Forecast::of(&gpu, &Kernels::of(gpu.arch), &launches);
    let speed = (contexts * CONTEXT) as f64 / forecast.microseconds * 1e6;
    let unit = 10f64.powf(speed.log10().floor() - 1.0);
    format!("{:.0}", (speed / unit).round() * unit)
}

/// Returns the rows that the page lacks: one for each model, with the memory of a run of each
/// column, and for full fine-tuning the predicted tokens per second of one.
fn missing_rows(
    models: &[(&str, &str, Sizes, bool)],
    memory: TrainingMemory,
    lora: Option<Adapters>,
    digits: usize,
) -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/finetune.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut missing = Vec::new();
    for &named in models {
        let mut config = config(named);
        config.context = CONTEXT;
        let weights = Gpt::<bf16>::new(config.clone(), Mode::default()).unwrap().1.weights();
        let needs = |&(recompute, contexts): &(bool, usize)| {
            let mode = Mode { recompute, memory, ..Mode::default() };
            let bytes = step::memory(&config, mode, lora, Precision::Bf16, contexts).unwrap().total();
            if bytes > MEMORY { "-".to_owned() } else { format!("{:.digits$}", bytes as f64 / GIB) }
        };
        let mut cells: Vec<String> = COLUMNS.iter().map(needs).collect();
        if lora.is_none() {
            let fits = cells[PREDICTED] != "-";
            cells.push(if fits { tokens_per_second(&config, memory) } else { "-".to_owned() });
        }
        let row = format!("| {} | {:.2} | {} |", named.0, weights as f64 / 1e9, cells.join(" | "));
        if !page.contains(&row) {
            missing.push(row);
        }
    }
    missing
}

#[track_caller]
fn assert_none(missing: &[String]) {
    assert!(missing.is_empty(), "docs/finetune.md must have these rows:\n{}", missing.join("\n"));
}

/// The rows of the tables are what `stepscope predict --config` prints.
#[test]
fn tables_of_the_page_are_computed() {
    let mut missing = missing_rows(&MODELS, TrainingMemory::Full, None, 1);
    let models: Vec<_> = MODELS.into_iter().chain(LARGER).take(MODELS.len() + 1).collect();
    for memory in [TrainingMemory::Small, TrainingMemory::Smallest, TrainingMemory::Released] {
        missing.extend(missing_rows(&models, memory, None, 2));
    }
    assert_none(&missing);
}

/// The rows of the tables of adapters are what `stepscope predict --config --lora` prints, without
/// and with `--quantize nf4`.
#[test]
fn tables_of_adapters_are_computed() {
    let models: Vec<_> = MODELS.into_iter().chain(LARGER).collect();
    let rows = |quantize| missing_rows(&models, TrainingMemory::Full, Some(Adapters { rank: RANK, quantize }), 2);
    assert_none(&[rows(None), rows(Some(Quantize::Nf4))].concat());
}
