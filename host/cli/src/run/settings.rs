//! The settings of a model, which a run that resumes must share, and those that ranks must share.

use sha2::{Digest, Sha256};
use stepscope::models::ModelConfig;
use stepscope_core::internals::hex;

use crate::program::settings::Settings;
use crate::run::cli::RunArgs;

/// Returns the settings of a model that decide the weights.
pub(crate) fn of_model(config: &ModelConfig) -> Settings {
    let ModelConfig { family, vocabulary, context, ref layers, width, heads, kv_heads, hidden, tied, .. } = *config;
    vec![
        ("arch", format!("{family:?}")),
        ("vocabulary", vocabulary.to_string()),
        ("context", context.to_string()),
        ("layers", layers.len().to_string()),
        ("width", width.to_string()),
        ("heads", format!("{heads}, {kv_heads}")),
        ("hidden", hidden.to_string()),
        ("tied", tied.to_string()),
        ("config.json", hex(&Sha256::digest(config.to_json("float32")))),
    ]
}

/// Adds to the settings that decide the weights the times of evaluations and checkpoints, which all
/// ranks do together.
pub(crate) fn of_ranks(mut settings: Settings, args: &RunArgs, evaluate_every: u64, resumes: bool) -> Settings {
    settings.push(("evaluate-every", evaluate_every.to_string()));
    settings.push(("checkpoint-every", format!("{:?}", args.checkpoint_every)));
    settings.push(("resumes", resumes.to_string()));
    settings
}
