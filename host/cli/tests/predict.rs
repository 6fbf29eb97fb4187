//! Runs `stepscope predict`: the properties of any forecast, and its byte counts compared with
//! those of the emulator.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/example.rs"]
#[allow(dead_code, reason = "it computes nothing, so it has no device")]
mod example;
#[path = "../../../examples/crossasset/model.rs"]
#[allow(dead_code, reason = "nothing is reported")]
mod model;
#[path = "../../../examples/crossasset/sizes.rs"]
mod sizes;

use cuda_std::emulator::{Mode, Touched, tally};
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Output;
use std::time::Duration;
use stepscope::{AdamW, Arena, Capacity, Device, DeviceKind, Gradients, Model, Optimizer, Parameters, Tape};

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/runs/2026-11-21-h200-kernels.json");

fn run(arguments: &[&str]) -> Output {
    example::program("predict").args(arguments).output().unwrap()
}

/// Returns its output as JSON.
fn json(arguments: &str) -> Value {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let output = run(&arguments.split(' ').chain(["--json", path]).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the kernels of a forecast by name.
fn rows(forecast: &Value) -> BTreeMap<&str, &Value> {
    let rows = forecast["forecast"]["kernels"].as_array().unwrap();
    rows.iter().map(|row| (row["kernel"].as_str().unwrap(), row)).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Warps read the next stage after a stage's barrier, and only multiplies after the barrier hide
/// these reads. Loops with few such multiplies took 7 to 15 % longer (docs/lab/products.md).
/// `ptxas` moves them when a kernel gets one more loop, or when other code follows.
#[test]
fn product_barriers_come_early() {
    let code: Value = serde_json::from_str(include_str!("../../predict/code.json")).unwrap();
    let mut loops = 0;
    for (arch, kernels) in code.as_object().unwrap() {
        let products = kernels.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("matmul"));
        for (name, turn) in products
            .flat_map(|(name, code)| code["ahead"].as_array().into_iter().flatten().map(move |turn| (name, turn)))
        {
            let (all, ahead) = (number(&turn[0]), number(&turn[1]));
            // A warp of a small tile has few multiplies, and the first reads take some of them.
            if all >= 32.0 {
                assert!(3.0 * ahead < all, "{arch}, {name}: too many multiplies before the barrier: {ahead} of {all}");
                loops += 1;
            }
        }
    }
    // The last four multiply groups.
    assert_eq!(loops, 2 * (3 + 18 + 4), "expected two loops in each of the 3 + 18 + 4 kernels");
}

#[test]
fn memory_bound_kernels_scale_with_bandwidth() {
    let step = "--gpu gb10 --model gpt --precision bf16";
    let (whole, half) = (json(&format!("{step} --copy 200")), json(&format!("{step} --copy 100")));
    let (whole, half) = (rows(&whole), rows(&half));
    // Some launches of products and attention are bound by other limits.
    let is_bound = |(name, row): &(&str, &Value)| {
        row["bound"] == "memory"
            && number(&row["microseconds"]) > 1000.0
            && !name.starts_with("matmul")
            && !name.starts_with("flash")
    };
    let mut compared = 0;
    for (name, row) in whole.into_iter().filter(is_bound) {
        // Each launch also has a latency.
        let ratio = number(&half[name]["microseconds"]) / number(&row["microseconds"]);
        assert!((1.9..=2.0).contains(&ratio), "{name}: {ratio}");
        compared += 1;
    }
    assert!(compared >= 5, "{compared}");
}

#[test]
fn cached_data_causes_no_traffic() {
    let bytes = |cache: &str| {
        let step = json(&format!("--gpu h200 --model crossasset --batch 256 --cache {cache}"));
        let touched: f64 = rows(&step).values().map(|row| number(&row["touched_bytes"])).sum();
        (number(&step["forecast"]["memory_bytes"]), touched)
    };
    let (all, touched) = bytes("1000000");
    assert_eq!(all, 0.0, "a step after another must find all its data in the cache");
    let (none, _) = bytes("1");
    assert!(none >= 0.95 * touched, "without a cache, almost all bytes come from memory: {none} of {touched}");
    let (some, _) = bytes("50");
    assert!(0.0 < some && some < none, "{some}");
}

#[test]
fn forecast_is_labelled_and_computes_nothing() {
    let output = run(&["--gpu", "gb10", "--model", "gpt", "--size", "350m", "--batch", "64", "--precision", "bf16"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("prediction, not a measurement: Gpt2 350m, 64 x 1024, bf16, on GB10\n"), "{text}");
    assert!(text.contains("predicted step: ") && text.contains("\nlargest: matmul_"), "{text}");
    // 350 M weights and a step of 64 samples would not fit here, and the emulator would take far
    // too long.
    assert!(text.contains("assumed"), "{text}");
}

#[test]
fn bad_arguments_exit_with_2() {
    for (arguments, wanted) in [
        (&["--gpu", "h100"][..], "[possible values: gb10, h200]"),
        (&["--model", "bert"], "[possible values: crossasset, gpt]"),
        (&["--batch", "0"], "'--batch <SAMPLES>'"),
        (&["--copy=-1"], "give a finite number above zero"),
        (&["--precision", "fp8"], "--precision"),
        (&["--compare", "no/such/file.json"], "no/such/file.json: "),
        (&["--compare", KERNELS], "expected a file of the step bench"),
        (&["--json", "no/such/folder/file.json"], "--json: "),
    ] {
        let output = run(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(wanted), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

/// A run of the step bench gets predictions for any GPU, in its precision and batches.
#[test]
fn bench_runs_get_predictions() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/runs/2026-11-21-h200-step-tf32.json");
    let [there, here] = ["h200", "gb10"].map(|gpu| json(&format!("--compare {file} --gpu {gpu}")));
    let lines = |compared: &Value| compared.as_array().unwrap().clone();
    assert_eq!(lines(&there).len(), 3);
    for (there, here) in lines(&there).iter().zip(&lines(&here)) {
        assert!(there["name"].as_str().unwrap().ends_with("tf32"), "{there}");
        assert_eq!([&there["name"], &there["measured"]], [&here["name"], &here["measured"]]);
        assert!(number(&here["predicted"]) > number(&there["predicted"]), "{there}, {here}");
    }
}

/// The instructions of every kernel of the library are counted, for both GPUs, except those of
/// warpgroups, which are compiled for neither.
#[test]
fn every_kernel_has_been_counted() {
    let code: Value = serde_json::from_str(include_str!("../../predict/code.json")).unwrap();
    for arch in ["sm_90", "sm_121"] {
        let counted = code[arch].as_object().unwrap();
        let compiled = |name: &str| {
            // The emulator's own tile does not run on a GPU.
            !name.ends_with("_on_cpu")
        };
        for entry in kernels::entries().filter(|entry| !entry.is_warpgroup && compiled(entry.name)) {
            let way = &counted
                .get(entry.name)
                .unwrap_or_else(|| panic!("{}: run cargo xtask generate code", entry.name))["way"];
            assert!(number(&way["all"]) > 0.0 && number(&way["alone"]) >= number(&way["all"]), "{}: {way}", entry.name);
            // A block copies its first stages like the others, before it multiplies. After the last
            // stage, nothing is left to copy.
            if entry.name.starts_with("matmul_of_bf16") {
                let code = &counted[entry.name];
                let [hot, first, last] = ["hot", "first", "last"].map(|part| &code[part]);
                let copies = number(&hot["copies"]);
                assert_eq!(
                    [number(&first["copies"]), number(&way["copies"])],
                    [copies, 2.0 * copies],
                    "{}",
                    entry.name
                );
                assert!(
                    last["copies"].is_null() && number(&last["mma"]) >= number(&hot["mma"]),
                    "{}: {last}",
                    entry.name
                );
            }
        }
    }
}

/// The bytes that the model counts as touched match those of the emulator, kernel by kernel.
#[test]
fn counted_bytes_match_the_emulator() {
    const BATCH: usize = 3;
    let touched = touched_by_a_step(BATCH);
    let step = json(&format!("--gpu h200 --model crossasset --batch {BATCH}"));
    // The emulator has a tile of its own.
    let family = |kernel: &str| if kernel.starts_with("matmul_") { "matmul".to_owned() } else { kernel.to_owned() };
    let mut counted: BTreeMap<String, f64> = BTreeMap::new();
    for (kernel, row) in rows(&step) {
        *counted.entry(family(kernel)).or_default() += number(&row["touched_bytes"]);
    }
    let mut seen: BTreeMap<String, f64> = BTreeMap::new();
    for Touched { kernel, arguments } in &touched {
        let bytes: usize = arguments.iter().map(|(_, bytes)| bytes).sum();
        *seen.entry(family(kernel)).or_default() += bytes as f64;
    }
    assert_eq!(counted.keys().collect::<Vec<_>>(), seen.keys().collect::<Vec<_>>());
    for (kernel, counted) in &counted {
        let share = seen[kernel] / counted;
        assert!((0.98..=1.0).contains(&share), "{kernel}: {} of {counted} bytes", seen[kernel]);
    }
}

/// Returns the bytes that a training step of CrossAsset touches on the emulator.
fn touched_by_a_step(batch: usize) -> Vec<Touched> {
    let device = Device::builder(DeviceKind::Emulated).deadline(Duration::from_secs(600)).open().unwrap();
    let (model, layout) = model::Model::<f32>::new().unwrap();
    let mut parameters = Parameters::new(&device, &layout, 7).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let config = AdamW { clip: Some(1.0), ..AdamW::default() };
    let mut optimizer = Optimizer::new(&parameters, config).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build().unwrap();
    let ticket = optimizer.advance().unwrap();
    let (x, labels) = (vec![0.5; batch * 12 * sizes::FEATURES], vec![0; batch]);
    let step = || {
        arena.step(|step| {
            let inputs = stepscope::HostInputs::new().with(&x, [batch, 12, sizes::FEATURES])?.with(&labels, [batch])?;
            let inputs = step.upload_inputs(&inputs)?;
            let tape = Tape::new(step, &parameters);
            let output = model.forward(&tape, &inputs)?;
            let loss = model.loss(&tape, &output, &inputs)?;
            tape.backward_overwrite(&loss, &mut gradients)?;
            optimizer.apply(ticket, step, &mut parameters, &gradients)
        })
    };
    let (outcome, touched) = tally(|| Mode::RACES.scope(step));
    outcome.unwrap();
    touched
}
