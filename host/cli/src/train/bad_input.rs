//! Errors that the user can fix. They end the program with exit code 2; all other errors end it
//! with 1.

use std::error::Error;
use std::fmt;

/// The result type of most of the program.
pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// An argument or a file that cannot be used: the value that was found, and the value that is
/// needed.
#[derive(Debug)]
pub(crate) struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for BadInput {}

/// Formats an error of the library for users of the program. They give options, and cannot call the
/// functions that the library advises.
pub(crate) fn for_users(error: &stepscope::Error) -> String {
    use stepscope::Error::{ArenaFull, CaptureNeeds, Misuse, NotFinite};
    let bytes = match error {
        Misuse { expected, got, .. } => return format!("expected {expected}, got {got}"),
        NotFinite { .. } => {
            let text = error.to_string();
            return text.split("; `").next().unwrap_or_default().to_owned();
        }
        ArenaFull { used_bytes, requested_bytes, .. } => used_bytes + requested_bytes,
        CaptureNeeds { bytes, .. } => *bytes,
        error => return error.to_string(),
    };
    format!(
        "a step needs more than {} MiB of memory: give a larger --arena-mib, or leave it out, and the need is measured",
        bytes >> 20
    )
}

/// Returns a [`BadInput`] error about a file or another place.
pub(crate) fn bad(place: impl fmt::Display, reason: impl fmt::Display) -> Box<dyn Error + Send + Sync> {
    Box::new(BadInput(format!("{place}: {reason}")))
}
