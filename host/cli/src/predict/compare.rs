//! Comparison of predictions with measurements: a run of the step bench, or the recorded samples
//! in `benches/runs/`.

use std::path::Path;

use clap::ValueEnum as _;
use serde::Serialize;
use serde_json::Value;
use stepscope::bf16;
use stepscope::files::PlainFile;
use stepscope_core::internals::Launch;

use crate::predict::bench;
use crate::predict::matmul_case::Case as Product;
use crate::predict::recorded::{self, Factors, Gpt};
use crate::predict::step::{self, Work};
use crate::train::cli::{Arch, Precision, Size};
use crate::train::model;
use stepscope_predict::{Forecast, Gpu, Kernels};

/// A measured line.
struct Line {
    /// The kind of line.
    group: &'static str,
    name: String,
    measured_us: f64,
    /// The repeated sequence of launches, and the number of calls in it.
    launches: Vec<Launch>,
    calls: usize,
}

/// Tokens per sample.
const CONTEXT: usize = 1024;
/// The largest samples file.
const MAX_BYTES: u64 = 64 << 20;

type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn read(path: &Path) -> Outcome<Value> {
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

/// Predicts what was measured: every line of an H200 in a folder of recorded runs, or the steps in
/// a file of the step bench.
///
/// # Errors
/// Returns an error if a file cannot be read, or is from another bench.
pub(crate) fn compare(path: &Path, gpu: &Gpu, kernels: &Kernels) -> Outcome<Vec<Compared>> {
    if !path.is_dir() {
        return steps_of_file(path, gpu, kernels);
    }
    // All of them were recorded before there were kernels for `wgmma`.
    let gpu = &Gpu { wgmma: None, ..*gpu };
    Ok(predicted(all(path, gpu)?, gpu, kernels))
}

fn steps_of_file(file: &Path, gpu: &Gpu, kernels: &Kernels) -> Outcome<Vec<Compared>> {
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

fn predicted(lines: Vec<Line>, gpu: &Gpu, kernels: &Kernels) -> Vec<Compared> {
    let compared = lines.into_iter().map(|Line { group, name, measured_us, launches, calls }| {
        let forecast = Forecast::of(gpu, kernels, &launches);
        let predicted = forecast.microseconds / calls as f64;
        Compared { group, name, predicted, measured: measured_us, bound: forecast.bound }
    });
    compared.collect()
}

/// Returns the median of samples.
fn median(samples: &Value) -> Option<f64> {
    let mut samples: Vec<f64> = samples.as_array()?.iter().filter_map(Value::as_f64).collect();
    samples.sort_by(f64::total_cmp);
    let (low, high) = (samples.get((samples.len().max(1) - 1) / 2)?, samples.get(samples.len() / 2)?);
    Some((low + high) / 2.0)
}

/// Returns the lines of a contender in a bench's file.
fn lines<'v>(run: &'v Value, contender: &'static str) -> impl Iterator<Item = &'v Value> {
    let lines = run["lines"].as_array().map(Vec::as_slice).unwrap_or_default();
    lines.iter().filter(move |line| line["contender"] == contender)
}

fn number(line: &Value, name: &str) -> usize {
    line[name].as_u64().unwrap_or(0) as usize
}

/// Returns every line that was measured on an H200.
fn all(folder: &Path, gpu: &Gpu) -> Outcome<Vec<Line>> {
    let mut all = steps(folder, gpu)?;
    all.extend(kernels(folder, gpu)?);
    all.extend(products(folder, gpu)?);
    all.extend(attention(folder, gpu)?);
    Ok(all)
}

fn steps(folder: &Path, gpu: &Gpu) -> Outcome<Vec<Line>> {
    let mut found = Vec::new();
    for (precision, file) in recorded::STEPS {
        add_steps(&read(&folder.join(file))?, gpu, precision, &mut found)?;
    }
    let runs = read(&folder.join(recorded::GPT2))?;
    for Gpt { size, precision, batch, recompute } in recorded::GPT {
        let name = if size == Size::Medium { "350M" } else { "124M" };
        let option = if recompute { " --recompute" } else { "" };
        // These runs were recorded when f32 was called `ieee`.
        let recorded = precision.to_string();
        let recorded = if recorded == "f32" { "ieee" } else { &recorded };
        let arguments = format!("--size {} --precision {recorded} --batch {batch}{option}", name.to_lowercase());
        let samples = median(&runs["runs"][&arguments]["seconds_of_updates"]);
        let measured_us = samples.ok_or_else(|| format!("{}: no samples of {arguments}", recorded::GPT2))? * 1e6;
        let work =
            Work::Gpt { config: Box::new(model::config(size, Arch::Gpt2, 50_304, CONTEXT)), recompute, lora: None };
        let again = if recompute { ", recompute" } else { "" };
        found.push(step_line(
            format!("GPT-2 {name}{again}, {batch} x {CONTEXT}, {precision}"),
            measured_us,
            step::launches(gpu, &work, precision, batch)?,
        ));
    }
    Ok(found)
}

/// Adds the captured steps of a run of the step bench, with inputs on the device.
fn add_steps(run: &Value, gpu: &Gpu, precision: Precision, found: &mut Vec<Line>) -> Outcome<()> {
    for line in lines(run, "stepscope captured").filter(|line| line["measure"] == "resident") {
        let batch = number(line, "batch");
        let measured_us = median(&line["nanoseconds"]).ok_or("no samples")? / 1e3;
        let launches = step::launches(gpu, &Work::CrossAsset, precision, batch)?;
        found.push(step_line(format!("CrossAsset, batch {batch}, {precision}"), measured_us, launches));
    }
    Ok(())
}

fn step_line(name: String, measured_us: f64, launches: Vec<Launch>) -> Line {
    Line { group: "step", name, measured_us, launches, calls: 1 }
}

fn kernels(folder: &Path, gpu: &Gpu) -> Outcome<Vec<Line>> {
    let mut found = Vec::new();
    for (file, is_taken) in recorded::KERNELS {
        let run = read(&folder.join(file))?;
        for line in lines(&run, "stepscope") {
            let (name, elements) = (line["kernel"].as_str().unwrap_or_default(), number(line, "elements"));
            if !is_taken(name) {
                continue;
            }
            let measured_us = median(&line["nanoseconds"]).ok_or("no samples")? / 1e3;
            if let Some((launches, calls)) = bench::kernel(gpu, name, elements)? {
                let size =
                    if elements.is_power_of_two() { format!("2^{}", elements.ilog2()) } else { elements.to_string() };
                let name = format!("{name}, {size}");
                found.push(Line { group: "kernel", name, measured_us, launches, calls });
            }
        }
    }
    let run = read(&folder.join(recorded::LAYER_NORM_BACKWARD))?;
    for name in ["layer_norm_backward", "layer_norm_backward_bf16"] {
        let measured_us = run["microseconds p50 p10 p90"][name][0].as_f64().ok_or("no samples")?;
        if let Some((launches, calls)) = bench::kernel(gpu, name, 1 << 28)? {
            found.push(Line { group: "kernel", name: format!("{name}, 2^28"), measured_us, launches, calls });
        }
    }
    Ok(found)
}

fn products(folder: &Path, gpu: &Gpu) -> Outcome<Vec<Line>> {
    let mut found = Vec::new();
    for (factors, file) in recorded::PRODUCTS {
        let run = read(&folder.join(file))?;
        for line in lines(&run, "stepscope") {
            let case: Product = serde_json::from_value(line.clone())?;
            let measured_us = median(&line["nanoseconds"]).ok_or("no samples")? / 1e3;
            let (launches, named) = match factors {
                Factors::F32(precision) => {
                    (bench::product::<f32>(gpu, case, precision.of_f32())?, precision.to_string())
                }
                Factors::Bf16 => (bench::product::<bf16>(gpu, case, Precision::F32.of_f32())?, "BF16 tensors".into()),
            };
            found.push(Line { group: "product", name: format!("{case}, {named}"), measured_us, launches, calls: 1 });
        }
    }
    Ok(found)
}

fn attention(folder: &Path, gpu: &Gpu) -> Outcome<Vec<Line>> {
    let run = read(&folder.join(recorded::ATTENTION))?;
    let mut found = Vec::new();
    for line in lines(&run, "stepscope") {
        let case = ["batch", "tokens", "heads", "kv_heads", "width"].map(|name| number(line, name));
        let causal = line["causal"] == true;
        let [batch, tokens, heads, kv_heads, width] = case;
        for (both, name) in [(false, "forward"), (true, "both")] {
            let measured_us = median(&line[name]).ok_or("no samples")? / 1e3;
            let launches = bench::attention::<bf16>(gpu, case, causal, both)?;
            let sees = if causal { "causal" } else { "all" };
            let name = format!("{batch} x {tokens}, {heads}/{kv_heads} heads of {width}, {sees}, {name}");
            found.push(Line { group: "attention", name, measured_us, launches, calls: 1 });
        }
    }
    Ok(found)
}
