//! Predictions compared with the lines of an H200 that are recorded in `benches/runs/`.
//!
//! `cargo xtask generate predict` writes what the test prints into `docs/predict.md`.

mod bench;
#[path = "../../../../benches/matmul/case.rs"]
#[allow(dead_code, reason = "its cases are those of the recorded lines")]
mod matmul_case;
mod recorded;

use std::path::Path;

use stepscope::bf16;

use self::matmul_case::Case as Product;
use self::recorded::{Factors, Gpt};
use crate::predict::compare::{Line, Outcome, add_steps, lines, median, number, predicted, read, step_line};
use crate::predict::report;
use crate::predict::step::{self, Work};
use crate::train::cli::{Arch, Precision, Size};
use crate::train::model::{self, Mode};
use stepscope_predict::{Gpu, Kernels};

const RUNS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/runs");
/// Tokens per sample.
const CONTEXT: usize = 1024;

/// Checks the figures of `docs/predict.md` for the recorded lines. A change of the model, of a
/// kernel's choice of tile or of a step's launches shows here.
#[test]
fn recorded_predictions_stay_close() {
    // All of them were recorded before there were kernels for `wgmma`.
    let gpu = Gpu { wgmma: None, ..Gpu::H200 };
    let compared = predicted(all(Path::new(RUNS), &gpu).unwrap(), &gpu, &Kernels::of(gpu.arch));
    println!("{}", report::comparison(&compared));
    let within = |group: &str, limit: f64| {
        let of_group: Vec<_> = compared.iter().filter(|line| line.group == group).collect();
        (of_group.iter().filter(|line| line.error().abs() <= limit).count(), of_group.len())
    };
    for (group, ten, twenty, all) in
        [("step", 9, 10, 12), ("kernel", 76, 111, 129), ("product", 117, 183, 195), ("attention", 10, 16, 16)]
    {
        let found = (within(group, 0.1), within(group, 0.2));
        assert_eq!(found.0.1, all, "{group}");
        assert!(found.0.0 >= ten && found.1.0 >= twenty, "{group}: {found:?}");
    }
    for name in [
        "CrossAsset, batch 4096, f32",
        "CrossAsset, batch 4096, tf32",
        "GPT-2 124M, 16 x 1024, f32",
        "GPT-2 124M, 16 x 1024, tf32",
        "GPT-2 124M, 16 x 1024, bf16",
        "GPT-2 350M, 8 x 1024, bf16",
    ] {
        let line = compared.iter().find(|line| line.name == name).unwrap_or_else(|| panic!("no line {name}"));
        assert!(line.error().abs() <= 0.1, "{line:?}");
    }
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
        let mode = Mode { recompute, ..Mode::default() };
        let work = Work::Gpt { config: Box::new(model::config(size, Arch::Gpt2, 50_304, CONTEXT)), mode, lora: None };
        let again = if recompute { ", recompute" } else { "" };
        found.push(step_line(
            format!("GPT-2 {name}{again}, {batch} x {CONTEXT}, {precision}"),
            measured_us,
            step::launches(gpu, &work, precision, batch)?,
        ));
    }
    Ok(found)
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
