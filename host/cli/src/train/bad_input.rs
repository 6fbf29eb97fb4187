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

/// Returns a [`BadInput`] error about a file or another place.
pub(crate) fn bad(place: impl fmt::Display, reason: impl fmt::Display) -> Box<dyn Error + Send + Sync> {
    Box::new(BadInput(format!("{place}: {reason}")))
}
