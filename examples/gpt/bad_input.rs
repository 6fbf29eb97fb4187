//! What the user can mend: such an error ends the program with exit code 2, any other with 1.

use std::error::Error;
use std::fmt;

/// What most of the program returns.
pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// An argument or a file that cannot be used: what was found, what is needed.
#[derive(Debug)]
pub(crate) struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for BadInput {}

/// [`BadInput`] of a file, or of another place.
pub(crate) fn bad(place: impl fmt::Display, reason: impl fmt::Display) -> Box<dyn Error + Send + Sync> {
    Box::new(BadInput(format!("{place}: {reason}")))
}
