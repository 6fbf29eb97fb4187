//! The weights that a run begins with, from a folder of Hugging Face transformers.

use std::path::Path;

use stepscope::Error;
use stepscope::models::Weights;

use crate::train::bad_input::{Outcome, bad};

/// The most tokens in a sample, unless the command line says otherwise. Recent models allow a
/// hundred thousand tokens and more, which no GPU has the memory to train.
const DEFAULT_CONTEXT: usize = 1024;

/// Reads a folder, for samples of at most `context` tokens.
pub(crate) fn read(folder: &Path, context: Option<usize>) -> Outcome<Weights> {
    let mut weights = Weights::read(folder).map_err(refused)?;
    let most = weights.config.context;
    let context = context.unwrap_or(most.min(DEFAULT_CONTEXT));
    if context > most {
        return Err(bad(folder.display(), format!("has a context of {most}, got --context {context}")));
    }
    weights.limit_context(context)?;
    Ok(weights)
}

/// Reports file errors as mistakes of the user, and returns other errors, such as a memory
/// shortage, unchanged.
pub(crate) fn refused(error: Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        Error::File { path, reason } => bad(path.display(), reason),
        error => error.into(),
    }
}
