//! Comparisons with JAX, PyTorch, NumPy and transformers, whose programs are Python.

use std::path::{Path, PathBuf};

use crate::tools::{EVERY_FEATURE, Outcome, Tools, is_quick, output, run, say, stdout};

/// Checks losses, gradients, updates and every op against float64 with JAX and PyTorch, and prints
/// the digest of each trace, which is the same on every device (`--device auto|emulated|cuda`).
///
/// Traces three updates of CrossAsset for 5 seeds and batches of 1, 7 and 256 samples, one of 256
/// also as 256 micro-batches, every op on random shapes, and 10,000 random expressions with their
/// gradients. `tests/oracle/oracle.py` checks the traces. NumPy exchanges arrays with
/// `examples/dlpack`. `tests/oracle/gpt.py` checks GPT-2 and Llama against transformers, for which
/// it takes 6 GB of disk. `--quick` uses one seed, batches of 1 and 7, and 500 expressions, without
/// PyTorch.
pub(crate) fn oracle(arguments: &[String]) -> Outcome {
    let is_quick = is_quick(arguments);
    let device = arguments.iter().skip_while(|argument| *argument != "--device").nth(1).map_or("auto", String::as_str);
    let tools = Tools::install(&["library_tools"])?;
    // For the whole workspace, as `test` builds, so that nothing is built twice.
    let programs = "--bin stepscope --example crossasset --example trace_ops --example dlpack";
    tools.run(format!("cargo build --quiet --workspace --features {EVERY_FEATURE} {programs}"))?;
    let built = tools.target().join("debug");
    let traces = tempfile::tempdir_in(tools.target()).map_err(|error| error.to_string())?;

    say("tracing");
    let example = |name: &str| tools.command(built.join("examples").join(name).display().to_string());
    run(example("trace_ops").args(["--device", device]).arg(traces.path().join("ops.safetensors")))?;
    let graphs = if is_quick { "500" } else { "10000" };
    run(example("trace_ops")
        .args(["--device", device, "--graphs", graphs])
        .arg(traces.path().join("graphs.safetensors")))?;
    let (seeds, batches): (u64, &[u64]) = if is_quick { (1, &[1, 7]) } else { (5, &[1, 7, 256]) };
    let mut cases: Vec<_> =
        (1..=seeds).flat_map(|seed| batches.iter().map(move |&batch| (seed, batch, batch))).collect();
    if !is_quick {
        cases.push((1, 256, 1));
    }
    for (seed, batch, micro_batch) in cases {
        let name = format!("seed{seed}-batch{batch}{}", if micro_batch == batch { "" } else { "-by-1" });
        // The fewest samples for three batches: half of them validate, and the horizon is 15.
        let samples = 2 * (3 * batch + 15);
        let options = format!(
            "--folds 1 --seed {seed} --batch {batch} --micro-batch {micro_batch} --limit {samples} --capture off"
        );
        let mut command = example("crossasset");
        command
            .args(options.split(' '))
            .args(["--overwrite", "--device", device, "--out"])
            .arg(traces.path().join("out"));
        output(command.arg("--trace").arg(traces.path().join(format!("{name}.safetensors"))))?;
    }
    let list =
        traces.path().read_dir().map_err(|error| error.to_string())?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut list: Vec<PathBuf> = list.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    list.sort();
    run(tools.command("sha256sum").args(&list))?;

    say("checking");
    let python = tools.with("CARGO_TARGET_DIR", tools.target());
    run(python.command("python3 tests/oracle/oracle.py").args(&list))?;
    say("exchanging buffers with NumPy");
    let interpreter = tools.target().join("oracle-venv/bin/python").display().to_string();
    run(tools.command(interpreter).arg("examples/dlpack/numpy_peer.py").arg(built.join("examples/libdlpack.so")))?;
    if is_quick {
        return Ok(());
    }
    say("GPT-2 and Llama compared with transformers");
    run(python.command("python3 tests/oracle/gpt.py").arg(built.join("stepscope")).args(["--device", device]))
}

/// Checks every family of models (or those named) against transformers 4.57 and 5.24 in float64:
/// logits, loss, every gradient, text from caches, and written folders. Exports of fine-tuned
/// models continue a prompt with equal tokens.
///
/// `tests/models/make.py` writes small random models with each version, in F32, in BF16 and in
/// shards. `tests/models.rs` compares them on the emulator, and finds planted faults in every
/// parameter. `tests/models/greedy.py` compares the tokens. The installed packages take 6 GB of
/// disk and a few minutes; the rest takes three minutes.
pub(crate) fn families(arguments: &[String]) -> Outcome {
    let tools = Tools::install(&["library_tools", "families_venvs"])?;
    let work = tempfile::tempdir_in(tools.target()).map_err(|error| error.to_string())?;
    let versions = [("5.24.0", tools.get("first_python")?), ("4.57.6", tools.get("second_python")?)];
    let tests = format!("cargo test --quiet --workspace --features {EVERY_FEATURE} --test models");
    tools.run(format!("{tests} --no-run"))?;
    tools.run(format!("cargo build --quiet --workspace --features {EVERY_FEATURE} --bin stepscope"))?;
    for (version, python) in versions {
        for (dtype, shard) in [("float32", "50GB"), ("bfloat16", "50GB"), ("float32", "8KB"), ("bfloat16", "4KB")] {
            let folder = work.path().join(version).join(format!("{dtype}-{shard}"));
            let mut make = tools.command(format!("{python} tests/models/make.py"));
            output(make.arg(&folder).args(arguments).args(["--dtype", dtype, "--shard", shard]))?;
            let selected = "--test-threads 1 --nocapture emulated --skip lora:: --skip stated_type";
            let log = tools.with("STEPSCOPE_MODELS", &folder).output(format!("{tests} -- {selected}"))?;
            println!("transformers {version}, {dtype}, shards of {shard}");
            print_closest(&log);
            let mut greedy = tools.command(format!("{python} tests/models/greedy.py"));
            println!("{}", stdout(greedy.arg(&folder).arg(tools.target().join("debug/stepscope")))?.trim_end());
        }
    }
    Ok(())
}

/// Prints each family's parameter that came closest to its limit.
fn print_closest(log: &str) {
    for line in log.lines() {
        let Some((family, rest)) = line.split_once(": ") else { continue };
        let Some((parameter, error)) = rest.split_once(" comes closest to its limit, with ") else { continue };
        let family = Path::new(family).file_name().unwrap_or_default().to_string_lossy();
        println!("  {family}: {} ({parameter})", error.split(',').next().unwrap_or_default());
    }
}
