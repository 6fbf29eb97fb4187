//! Comparison of predictions with a run of the step bench.

use std::path::Path;

use clap::ValueEnum as _;
use serde::Serialize;
use serde_json::Value;
use stepscope::files::PlainFile;
use stepscope_core::internals::Launch;

use crate::predict::step::{self, Work};
use crate::train::cli::Precision;
use stepscope_predict::{Forecast, Gpu, Kernels};

/// A measured line.
pub(super) struct Line {
    /// The kind of line.
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) measured_us: f64,
    /// The repeated sequence of launches, and the number of calls in it.
    pub(super) launches: Vec<Launch>,
    pub(super) calls: usize,
}

/// The largest samples file.
const MAX_BYTES: u64 = 64 << 20;

pub(super) type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub(super) fn read(path: &Path) -> Outcome<Value> {
    let text = PlainFile::read_whole(path, MAX_BYTES).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?)
}

/// A line, predicted and measured.
#[derive(Debug, Serialize)]
pub(crate) struct Compared {
    pub(crate) group: &'static str,
    pub(crate) name: String,
    /// Microseconds per call.
    pub(crate) predicted: f64,
    pub(crate) measured: f64,
    /// The resource that binds it for the longest time.
    pub(crate) bound: &'static str,
}

impl Compared {
    pub(crate) fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// Predicts the steps that a run of the step bench measured.
///
/// # Errors
/// Returns an error if its file cannot be read, or is from another bench.
pub(crate) fn compare(file: &Path, gpu: &Gpu, kernels: &Kernels) -> Outcome<Vec<Compared>> {
    let run = read(file)?;
    let of_command = run["command"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named = of_command
        .windows(2)
        .find(|words| words[0] == "--precision" || words[0] == "--stored")
        .and_then(|words| words[1].as_str());
    // Older files name f32 `ieee`.
    let named = named.filter(|name| *name != "ieee").unwrap_or("f32");
    let precision = Precision::from_str(named, false).map_err(|error| format!("{}: {error}", file.display()))?;
    // Older files name no instruction: their kernels used `mma.sync`.
    let wgmma = gpu.wgmma.filter(|_| run["matrix_instruction"] == "wgmma");
    let gpu = &Gpu { wgmma, ..*gpu };
    let mut found = Vec::new();
    add_steps(&run, gpu, precision, &mut found)?;
    if found.is_empty() {
        return Err(format!("{}: expected a file of the step bench, found no captured step", file.display()).into());
    }
    Ok(predicted(found, gpu, kernels))
}

/// Predicts each line.
pub(super) fn predicted(lines: Vec<Line>, gpu: &Gpu, kernels: &Kernels) -> Vec<Compared> {
    let compared = lines.into_iter().map(|Line { group, name, measured_us, launches, calls }| {
        let forecast = Forecast::of(gpu, kernels, &launches);
        let predicted = forecast.microseconds / calls as f64;
        Compared { group, name, predicted, measured: measured_us, bound: forecast.bound }
    });
    compared.collect()
}

/// Returns the median of samples.
pub(super) fn median(samples: &Value) -> Option<f64> {
    let mut samples: Vec<f64> = samples.as_array()?.iter().filter_map(Value::as_f64).collect();
    samples.sort_by(f64::total_cmp);
    let (low, high) = (samples.get((samples.len().max(1) - 1) / 2)?, samples.get(samples.len() / 2)?);
    Some((low + high) / 2.0)
}

/// Returns the lines of a contender in a bench's file.
pub(super) fn lines<'v>(run: &'v Value, contender: &'static str) -> impl Iterator<Item = &'v Value> {
    let lines = run["lines"].as_array().map(Vec::as_slice).unwrap_or_default();
    lines.iter().filter(move |line| line["contender"] == contender)
}

pub(super) fn number(line: &Value, name: &str) -> usize {
    line[name].as_u64().unwrap_or(0) as usize
}

/// Adds the captured steps of a run of the step bench, with inputs on the device.
pub(super) fn add_steps(run: &Value, gpu: &Gpu, precision: Precision, found: &mut Vec<Line>) -> Outcome<()> {
    for line in lines(run, "stepscope captured").filter(|line| line["measure"] == "resident") {
        let batch = number(line, "batch");
        let measured_us = median(&line["nanoseconds"]).ok_or("no samples")? / 1e3;
        let launches = step::launches(gpu, &Work::CrossAsset, precision, batch)?;
        found.push(step_line(format!("CrossAsset, batch {batch}, {precision}"), measured_us, launches));
    }
    Ok(())
}

pub(super) fn step_line(name: String, measured_us: f64, launches: Vec<Launch>) -> Line {
    Line { group: "step", name, measured_us, launches, calls: 1 }
}
