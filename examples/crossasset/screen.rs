//! What a run says on standard output, and shows at its end: the table of folds.
//!
//! Invariant: a standard output that is closed or full ends no run; whether somebody lost a line is told at its end.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use comfy_table::{CellAlignment, Table, presets};

use crate::report::EpochResult;

/// Standard output.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    /// Why a line could not be written; later ones are not tried.
    failed: Option<io::Error>,
}

impl Screen {
    /// Says a line.
    pub(crate) fn say(&mut self, line: impl Display) {
        self.say_to(&mut io::stdout(), line);
    }

    fn say_to(&mut self, output: &mut impl Write, line: impl Display) {
        if self.failed.is_none() {
            self.failed = writeln!(output, "{line}").and_then(|()| output.flush()).err();
        }
    }

    /// An error when a line was lost that somebody may be waiting for. A reader who has gone, as `head` does, is not.
    pub(crate) fn end(self) -> Result<(), String> {
        match self.failed {
            Some(reason) if reason.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {reason}")),
            _ => Ok(()),
        }
    }
}

/// One row for each epoch of each fold. The accuracy of always telling the training part's most frequent label stands
/// beside the model's.
pub(crate) fn epoch_table(epochs: &[EpochResult]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "fold",
        "epoch",
        "train loss",
        "valid loss",
        "valid accuracy",
        "baseline",
        "seconds",
        "samples/s",
    ]);
    for result in epochs {
        table.add_row([
            result.fold.to_string(),
            result.epoch.to_string(),
            format!("{:.4}", result.train_loss),
            format!("{:.4}", result.valid_loss),
            format!("{:.1} %", 100.0 * result.valid_accuracy),
            format!("{:.1} %", 100.0 * result.baseline_accuracy),
            format!("{:.1}", result.seconds),
            format!("{:.0}", result.samples_per_second),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output that fails in this way after so many bytes.
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

    #[test]
    fn an_output_that_fails_ends_nothing_and_is_told_at_the_end() {
        for (kind, told) in [(ErrorKind::BrokenPipe, false), (ErrorKind::StorageFull, true)] {
            let (mut screen, mut output) = (Screen::default(), Failing(5, kind));
            screen.say_to(&mut output, "one");
            assert!(screen.failed.is_none());
            screen.say_to(&mut output, "two");
            output.0 = 100;
            screen.say_to(&mut output, "three");
            assert_eq!((output.0, screen.end().is_err()), (100, told), "{kind}");
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_epoch() {
        let epoch = EpochResult {
            fold: 1,
            epoch: 0,
            train_loss: 0.91,
            valid_loss: 1.0,
            valid_accuracy: 0.415,
            baseline_accuracy: 0.25,
            seconds: 12.34,
            samples_per_second: 81.4,
        };
        let text = epoch_table(&[epoch, EpochResult { train_loss: f64::NAN, ..epoch }]).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(cells(lines[2])[1..9], ["1", "0", "0.9100", "1.0000", "41.5 %", "25.0 %", "12.3", "81"]);
        assert_eq!(cells(lines[3])[3], "NaN");
    }
}
