//! The prediction as tables.

use std::fmt::Write as _;

use crate::predict::compare::Compared;
use stepscope_predict::Gpu;
use stepscope_predict::forecast::{Forecast, Row};

/// The number of kernels in the last line.
const LARGEST: usize = 5;

/// Formats a line per kernel, the step, and its largest kernels.
pub(crate) fn forecast(title: &str, gpu: &Gpu, forecast: &Forecast) -> String {
    let mut text = format!("prediction, not a measurement: {title}, on {}\n{}\n\n", gpu.name, gpu.sources);
    let _ = writeln!(
        text,
        "{:<30}{:>9}{:>12}{:>12}{:>12}{:>12}{:>14}  bound by",
        "kernel", "launches", "MB, memory", "GFLOP, f32", "GFLOP, mma", "G warp ins.", "predicted us"
    );
    for row in &forecast.kernels {
        let Row { kernel, launches, memory_bytes, f32_operations, matrix_operations, instructions, .. } = row;
        let _ = writeln!(
            text,
            "{kernel:<30}{launches:>9}{:>12.1}{:>12.2}{:>12.2}{:>12.4}{:>14.1}  {}",
            *memory_bytes as f64 / 1e6,
            f32_operations / 1e9,
            matrix_operations / 1e9,
            instructions / 1e9,
            row.microseconds,
            row.bound
        );
    }
    let Forecast { microseconds, launches, memory_bytes, bound, kernels } = forecast;
    let bytes = *memory_bytes as f64 / 1e6;
    let _ = writeln!(
        text,
        "\npredicted step: {:.3} ms, {launches} launches, {bytes:.1} MB from and to memory, bound by {bound}",
        microseconds / 1e3
    );
    let largest = kernels.iter().take(LARGEST);
    let shares = largest.map(|row| format!("{} {:.0} %", row.kernel, 100.0 * row.microseconds / microseconds));
    let _ = writeln!(text, "largest: {}", shares.collect::<Vec<_>>().join(", "));
    text
}

/// Formats each line with prediction, measurement and error, then counts the lines within 10 % and
/// 20 %.
pub(crate) fn comparison(compared: &[Compared]) -> String {
    let mut text = String::new();
    let mut groups: Vec<&str> = compared.iter().map(|line| line.group).collect();
    groups.dedup();
    for group in groups {
        let lines: Vec<&Compared> = compared.iter().filter(|line| line.group == group).collect();
        let _ = writeln!(text, "| {group} | predicted, us | measured, us | error | bound by |\n|---|---|---|---|---|");
        for line in &lines {
            let Compared { name, predicted, measured, bound, .. } = line;
            let (predicted, measured, error) = (figure(*predicted), figure(*measured), 100.0 * line.error());
            let _ = writeln!(text, "| {name} | {predicted} | {measured} | {error:+.1} % | {bound} |");
        }
        let within = |limit: f64| lines.iter().filter(|line| line.error().abs() <= limit).count();
        let [ten, twenty] = [within(0.1), within(0.2)];
        let _ = writeln!(text, "\n{group}: {} lines, {ten} within 10 %, {twenty} within 20 %\n", lines.len());
    }
    text
}

/// Formats a number with about four digits.
fn figure(number: f64) -> String {
    match number {
        ..10.0 => format!("{number:.2}"),
        ..1000.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}
