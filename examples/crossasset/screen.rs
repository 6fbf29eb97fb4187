//! What a run shows while it works: a progress bar, and at the end the table of folds.

use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};

use crate::report::EpochResult;

/// Without a terminal a line is printed instead of the bar, at most once in this time.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of one epoch, on standard error.
pub(crate) struct Progress {
    bar: ProgressBar,
    name: String,
    total: usize,
    done: usize,
    start: Instant,
    last_line: Instant,
}

impl Progress {
    /// Starts the clock for an epoch of `total` samples; `name` says which, such as `fold 0, epoch 1`.
    ///
    /// # Panics
    /// Never: the bar's template is constant.
    pub(crate) fn new(name: &str, total: usize) -> Self {
        let style = ProgressStyle::with_template("{prefix}  {bar:30} {pos}/{len} samples  {msg}  {eta} left")
            .expect("the template is well-formed");
        let bar = ProgressBar::new(total as u64).with_style(style).with_prefix(name.to_owned());
        let now = Instant::now();
        Self { bar, name: name.to_owned(), total, done: 0, start: now, last_line: now }
    }

    /// A batch of `samples` was trained on; `loss` is its mean.
    pub(crate) fn advance(&mut self, samples: usize, loss: f64) {
        self.done += samples;
        self.bar.set_message(self.state(loss));
        self.bar.inc(samples as u64);
        if self.bar.is_hidden() && self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            eprintln!("{}  {}/{} samples  {}", self.name, self.done, self.total, self.state(loss));
        }
    }

    /// Ends the epoch, whose mean loss is this: its seconds and its samples per second.
    pub(crate) fn finish(&self, loss: f64) -> (f64, f64) {
        let seconds = self.start.elapsed().as_secs_f64();
        self.bar.finish_and_clear();
        eprintln!("{}  {} samples in {seconds:.1} s  {}", self.name, self.done, self.state(loss));
        (seconds, self.done as f64 / seconds)
    }

    fn state(&self, loss: f64) -> String {
        let rate = self.done as f64 / self.start.elapsed().as_secs_f64();
        format!("loss {loss:.4}  {rate:.0} samples/s")
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

    #[test]
    fn progress_counts_samples() {
        let mut progress = Progress::new("fold 0, epoch 0", 4);
        progress.advance(3, 1.0);
        progress.advance(1, 2.0);
        let (seconds, rate) = progress.finish(1.25);
        assert!(seconds > 0.0 && (rate * seconds - 4.0).abs() < 1e-9);
    }
}
