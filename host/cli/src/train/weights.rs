//! The weights that a run begins with, from a folder of Hugging Face transformers.

use std::path::Path;

use stepscope::models::{ModelConfig, WeightFiles};
use stepscope::{Error, Parameters};

use crate::train::bad_input::{Outcome, bad};

/// The most tokens in a sample, unless the command line says otherwise. Recent models allow a
/// hundred thousand tokens and more, which no GPU has the memory to train.
const DEFAULT_CONTEXT: usize = 1024;

/// Opens a folder, for samples of at most `context` tokens. Returns its files, of which only the
/// headers are read, and the model.
pub(crate) fn open(folder: &Path, context: Option<usize>) -> Outcome<(WeightFiles, ModelConfig)> {
    let files = WeightFiles::open(folder).map_err(refused)?;
    let mut config = files.config().clone();
    config.context = checked(folder, config.context, context)?;
    Ok((files, config))
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
