//! What a run shows at its end: the table of folds.

use comfy_table::{CellAlignment, Table, presets};

use crate::report::EpochResult;

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
}
