//! A run's standard output.
//!
//! Invariant: a closed or full standard output does not stop a run. Lost lines are reported as an
//! error at its end.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Standard output.
#[derive(Debug, Default)]
pub struct Screen {
    /// The reason why a line could not be written. Later lines are skipped.
    failed: Option<io::Error>,
    /// True if another rank prints.
    quiet: bool,
}

impl Screen {
    /// Returns a screen that prints nothing.
    pub fn quiet() -> Self {
        Self { quiet: true, ..Self::default() }
    }

    /// Prints a line.
    pub fn say(&mut self, line: impl Display) {
        self.say_to(&mut io::stdout(), line);
    }

    fn say_to(&mut self, output: &mut impl Write, line: impl Display) {
        if self.failed.is_none() && !self.quiet {
            self.failed = writeln!(output, "{line}").and_then(|()| output.flush()).err();
        }
    }

    /// Returns an error if a line was lost. A reader that closed the pipe, as `head` does, is no
    /// error.
    pub fn end(self) -> Result<(), String> {
        match self.failed {
            Some(reason) if reason.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {reason}")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output that fails with this error after this many bytes.
    struct Failing(usize, ErrorKind);

    impl Write for Failing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let Self(left, kind) = self;
            if *left == 0 {
                return Err((*kind).into());
            }
            let taken = bytes.len().min(*left);
            *left -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A failing output does not end the run.
    #[test]
    fn failed_outputs_are_reported_at_the_end() {
        for (kind, is_error) in [(ErrorKind::BrokenPipe, false), (ErrorKind::StorageFull, true)] {
            let (mut screen, mut output) = (Screen::default(), Failing(5, kind));
            screen.say_to(&mut output, "one");
            assert!(screen.failed.is_none());
            screen.say_to(&mut output, "two");
            output.0 = 100;
            screen.say_to(&mut output, "three");
            assert_eq!((output.0, screen.end().is_err()), (100, is_error), "{kind}");
        }
    }
}
