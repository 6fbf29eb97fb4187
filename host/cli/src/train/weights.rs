//! The weights that a run begins with, from a folder of Hugging Face transformers.

use std::path::Path;

use stepscope::models::{Lora, ModelConfig, WeightFiles};
use stepscope::{Error, Parameters};

use crate::train::bad_input::{Outcome, bad, for_users};

/// The most tokens in a sample, unless the command line says otherwise. Recent models allow a
/// hundred thousand tokens and more, which no GPU has the memory to train.
const DEFAULT_CONTEXT: usize = 1024;

/// Opens a folder, for samples of at most `context` tokens. Returns its files, of which only the
/// headers are read, and the model.
pub(crate) fn open(folder: &Path, context: Option<usize>) -> Outcome<(WeightFiles, ModelConfig)> {
    if let Some(reason) = not_a_model(folder) {
        return Err(bad(folder.display(), reason));
    }
    let files = WeightFiles::open(folder).map_err(refused)?;
    let mut config = files.config().clone();
    config.context = checked(folder, config.context, context)?;
    Ok((files, config))
}

/// Reads the settings of an adapter for a model.
pub(crate) fn adapter(folder: &Path, config: &ModelConfig) -> Outcome<Lora> {
    if !folder.join("adapter_config.json").is_file() {
        let reason = "is no folder of an adapter, which has adapter_config.json and adapter_model.safetensors";
        return Err(bad(folder.display(), reason));
    }
    let lora = Lora::read(folder).map_err(refused)?;
    lora.modules(config).map_err(|error| bad(folder.display(), for_users(&error)))?;
    Ok(lora)
}

/// Loads the weights of a folder, tensor by tensor, into the parameters of its model.
pub(crate) fn load(folder: &Path, parameters: &mut Parameters) -> Outcome<()> {
    WeightFiles::open(folder).and_then(|mut files| files.load(parameters)).map_err(refused)
}

/// Returns the requested context, or the default, if the model allows it.
fn checked(folder: &Path, most: usize, context: Option<usize>) -> Outcome<usize> {
    let context = context.unwrap_or(most.min(DEFAULT_CONTEXT));
    if context > most {
        return Err(bad(folder.display(), format!("has a context of {most}, got --context {context}")));
    }
    Ok(context)
}

/// Reports file errors as mistakes of the user, and returns other errors, such as a memory
/// shortage, unchanged.
pub(crate) fn refused(error: Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        Error::File { path, reason } => bad(path.display(), reason),
        error => error.into(),
    }
}

/// Returns what a path is instead of a folder of a model, and what to do.
fn not_a_model(folder: &Path) -> Option<String> {
    let name = folder.to_string_lossy();
    if folder.is_file() {
        let is_gguf = folder.extension().is_some_and(|end| end == "gguf");
        let what = if is_gguf { "is a GGUF file, which serves inference only" } else { "is a file" };
        return Some(format!("{what}: give the folder of a model, with config.json and safetensors files"));
    }
    if !folder.is_dir() {
        let is_hub_name = name.split('/').count() == 2 && name.split('/').all(|part| !part.is_empty() && part != ".");
        return Some(match name.rsplit('/').next() {
            Some(model) if is_hub_name => {
                format!(
                    "is no folder: `hf download {name} --local-dir {model}` downloads the model; give --weights {model}"
                )
            }
            _ => "is no folder: give the folder of a model, with config.json and safetensors files".into(),
        });
    }
    if folder.join("config.json").exists() {
        return None;
    }
    let has = |end: &str| {
        folder.read_dir().is_ok_and(|files| {
            files.flatten().any(|file| file.file_name().to_str().is_some_and(|name| name.ends_with(end)))
        })
    };
    let reason = if has("adapter_config.json") {
        "is an adapter: give the folder of its model as --weights, and this one as --adapter"
    } else if has(".gguf") {
        "has GGUF files, which serve inference only: give the folder of the original model"
    } else if has(".pth") || has("params.json") {
        "has no config.json, but files of another form: download the version of the model for transformers"
    } else {
        "has no config.json: give the folder of a model as transformers saves it; models that ask for consent need \
         `hf auth login` before `hf download`"
    };
    Some(reason.into())
}
