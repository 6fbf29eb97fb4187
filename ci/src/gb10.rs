//! The first run on a machine with a GPU.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::tools::{Outcome, Tools, at, read, write};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Models of ci/gb10-models: the file, contexts an update, tokens a context, and the tokens/s that
/// owners measured. docs/predict.md has the sources.
const MODELS: [(&str, usize, usize, &str); 5] = [
    ("gpt2-124m", 16, 1024, ""),
    ("gpt2-350m", 16, 1024, "13,626"),
    ("nanochat-d24", 8, 2048, "13,125"),
    ("llama-3.2-1b", 8, 1024, ""),
    ("llama-3.2-3b", 4, 1024, "9,600"),
];

/// Runs a group of steps, on the GPU or with `--device emulated` on the emulator, with less memory.
///
/// - `kernels`: the kernels give the committed bits, and the tests and the three bugs behave as
///   expected.
/// - `memory`: page cache does not block a run; what does not fit is refused; an overflow under
///   pressure ends.
/// - `figures`: the benches, and steps compared with their predictions.
///
/// Prints a line per step: `well`, or WRONG with the reason. The first wrong step ends the run. All
/// output is stored in `target/gb10/`, which `doctor --report` packs. A program that exceeds its
/// time limit is inspected through `/proc/PID` before it is killed.
pub(crate) fn gb10(arguments: &[String]) -> Outcome {
    let (group, is_gpu) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [group] | [group, "--device", "cuda"] => (group, true),
        [group, "--device", "emulated"] => (group, false),
        _ => ("", true),
    };
    let steps = match group {
        "kernels" => kernels,
        "memory" => memory,
        "figures" => figures,
        _ => return Err("usage: cargo xtask gb10 kernels|memory|figures [--device cuda|emulated]".to_owned()),
    };
    let tools = Tools::bare()?;
    let archs = std::env::var("STEPSCOPE_ARCHS").unwrap_or("sm_121".to_owned());
    let out = tools.folder().join("target/gb10").join(group);
    steps(&mut Steps { tools: tools.with("STEPSCOPE_ARCHS", archs), out, is_gpu, done: Vec::new() })
}

/// Runs programs, and stores their output and outcome in a folder.
struct Steps {
    tools: Tools,
    out: PathBuf,
    is_gpu: bool,
    done: Vec<Value>,
}

impl Steps {
    /// Runs a line of words and returns its output; it must end in time, with this code and this
    /// text.
    fn run(&mut self, name: &str, line: &str, limit_seconds: u64, code: i32, text: &str) -> Outcome<String> {
        let file_name: String =
            name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '-' }).collect();
        let log = self.out.join(format!("{file_name}.log"));
        write(&log, "")?;
        let mut file = at(&log, File::create(&log))?;
        let [output, errors] = [at(&log, file.try_clone())?, at(&log, file.try_clone())?];
        let started = Instant::now();
        let mut command = self.tools.command("setsid --wait");
        let mut process =
            at(line, command.args(line.split_whitespace()).stdin(Stdio::null()).stdout(output).stderr(errors).spawn())?;
        let status = loop {
            if let Some(status) = at(line, process.try_wait())? {
                break status.code();
            }
            if started.elapsed().as_secs() >= limit_seconds {
                at(&log, write!(file, "\n--- not ended after {limit_seconds} s\n{}", end_tree(&mut process)))?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let output = String::from_utf8_lossy(&at(&log, fs::read(&log))?).into_owned();
        let why = match status {
            None => format!("did not end within {limit_seconds} s, or by a signal"),
            Some(status) if status != code => format!("ended with {status}, expected {code}"),
            Some(_) if !output.contains(text) => format!("did not print `{text}`"),
            Some(_) => String::new(),
        };
        self.note(name, &why, started.elapsed().as_secs_f64(), line)?;
        Ok(output)
    }

    /// Records a check by this program itself.
    fn expect(&mut self, name: &str, holds: bool, what: &str) -> Outcome {
        self.note(name, if holds { "" } else { what }, 0.0, what)
    }

    fn note(&mut self, name: &str, why: &str, seconds: f64, what: &str) -> Outcome {
        self.done.push(json!({ "step": name, "well": why.is_empty(), "why": why, "seconds": seconds, "what": what }));
        write(self.out.join("steps.json"), serde_json::to_string_pretty(&self.done).unwrap_or_default())?;
        let mark = if why.is_empty() { "well" } else { "WRONG" };
        println!("{mark:<6}{seconds:6.0} s  {name}  {why}");
        if why.is_empty() { Ok(()) } else { Err(format!("{name}: {why}; its output is in {}", self.out.display())) }
    }

    fn device(&self) -> &'static str {
        if self.is_gpu { "cuda" } else { "emulated" }
    }

    /// Returns a cargo command in a release build for the device.
    fn cargo(&self, command: &str, arguments: &str) -> String {
        let features = if self.is_gpu { "--features cuda" } else { "" };
        let release = if command == "bench" { "" } else { "--release" };
        format!("cargo {command} {release} {features} {arguments}")
    }

    fn crossasset(&self, name: &str, device: &str, arguments: &str) -> String {
        let out = self.out.join(name);
        let out = out.display();
        self.cargo(
            "run",
            &format!("--example crossasset -- --device {device} --folds 1 --out {out} --overwrite {arguments}"),
        )
    }

    /// Checks that two runs have the same weights.
    fn expect_same_weights(&mut self, one: &str, other: &str) -> Outcome {
        let weights =
            |name: &str| Ok::<_, String>(report(&self.out.join(name).join("report.json"))?["weights_sha256"].clone());
        let (first, second) = (weights(one)?, weights(other)?);
        self.expect(
            &format!("{one} and {other} have the same weights"),
            first == second,
            &format!("{first} and {second}"),
        )
    }
}

fn report(path: &Path) -> Outcome<Value> {
    serde_json::from_str(&read(path)?).map_err(|error| format!("{}: {error}", path.display()))
}

/// Kills a process with its descendants, and returns the kernel's state of each.
fn end_tree(process: &mut Child) -> String {
    let (mut found, mut text) = (vec![process.id()], String::new());
    let mut places = 0..;
    while let Some(&pid) = places.next().and_then(|place| found.get(place)) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let stack =
            fs::read_to_string(format!("/proc/{pid}/stack")).unwrap_or("no permission to read its stack".to_owned());
        text += &format!("--- process {pid}\n{status}\n{stack}\n");
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    let _ = Command::new("kill").arg("-9").args(found.iter().map(u32::to_string)).status();
    let _ = process.wait();
    text
}

fn kernels(steps: &mut Steps) -> Outcome {
    let device = steps.device();
    steps.run("the same bits on this CPU", "cargo run --release -- check", 1800, 0, "all equal")?;
    let rule = steps.cargo("run", &format!("-- check --rule --device {device}"));
    let found = steps.run("the rule of matrix instructions", &rule, 1800, 0, "emulator's")?;
    found.lines().filter(|line| line.contains("products at once")).for_each(|line| println!("       {line}"));
    if steps.is_gpu {
        let exponential = steps.cargo("run", &format!("--example scalars -- --device {device} --only ex2"));
        steps.run("attention's exponential on all inputs", &exponential, 900, 0, "all bits equal")?;
        steps.run("every kernel assembles for sm_121", "cargo xtask ptx sm_121", 3600, 0, "every rule kept")?;
        steps.run("the same bits on the GPU", &steps.cargo("run", "-- check --device cuda"), 1800, 0, "all equal")?;
        steps.run(
            "tests of the kernels",
            &steps.cargo("nextest run", "--test kernels --run-ignored all"),
            3600,
            0,
            "",
        )?;
    }
    let overflow = steps.cargo("run", &format!("--example overflow -- --device {device}"));
    steps.run("an arena that is too small reports the cause", &overflow, 900, 0, "Each cause was named correctly.")?;
    let reset = steps.cargo("run", "--example gradients_after_reset");
    steps.run("gradients after a reset", &reset, 900, 0, "The first three agree bit for bit.")?;
    let short = "--limit 100 --batch 32";
    steps.run("training on the emulator", &steps.crossasset("emulated", "emulated", short), 1800, 0, "")?;
    steps.run("training on the device", &steps.crossasset("device", device, short), 1800, 0, "")?;
    steps.expect_same_weights("emulated", "device")?;
    if steps.is_gpu {
        let tests = "--test capture --run-ignored all";
        steps.run("tests of captures and deadlines", &steps.cargo("nextest run", tests), 3600, 0, "")?;
    }
    Ok(())
}

/// Returns a figure of /proc/meminfo in bytes.
fn memory_bytes(name: &str) -> Outcome<u64> {
    let text = read("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| 1024 * kib).ok_or_else(|| format!("/proc/meminfo has no {name}"))
}

/// A process that holds memory until this value ends.
struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets another process allocate memory until only this much is available.
fn hold(leave_bytes: u64) -> Outcome<Held> {
    let take = memory_bytes("MemAvailable")?.saturating_sub(leave_bytes);
    let code = format!("import time; held = b'\\1' * {take}; print('held', flush=True); time.sleep(36000)");
    let mut process = at("python3", Command::new("python3").args(["-c", &code]).stdout(Stdio::piped()).spawn())?;
    let mut byte = [0];
    let output = process.stdout.take();
    let held = Held(process);
    // Ends when it has printed, or failed.
    at("python3", std::io::Read::read(&mut output.ok_or("no output")?, &mut byte))?;
    Ok(held)
}

fn memory(steps: &mut Steps) -> Outcome {
    let device = steps.device();
    let available = memory_bytes("MemAvailable")?;
    // The memory of a GB10, or a little of a machine that only tries the steps.
    let (cache, arena, leave) = if steps.is_gpu { (100 * GIB, 32 * 1024, 12 * GIB) } else { (GIB, 256, available) };
    let cache = cache.min(available * 3 / 4);
    let mut file = tempfile::tempfile_in("/var/tmp").map_err(|error| format!("/var/tmp: {error}"))?;
    let piece = vec![0; 16 << 20];
    for _ in 0..cache / piece.len() as u64 {
        at("/var/tmp", file.write_all(&piece))?;
    }
    at("/var/tmp", file.sync_all())?;
    let (free, available) = (memory_bytes("MemFree")?, memory_bytes("MemAvailable")?);
    let is_full = available.saturating_sub(free) > cache / 2;
    steps.expect(
        "the page cache is full, and available",
        is_full,
        &format!("MemFree {free}, MemAvailable {available}"),
    )?;
    let run = steps.crossasset("cache", device, &format!("--limit 100 --arena-mib {arena}"));
    steps.run("training with a full page cache", &run, 900, 0, "")?;
    drop(file);
    let _held = hold(leave)?;
    let too_much = (leave + 50 * GIB) / MIB;
    let run = steps.crossasset("refused", device, &format!("--arena-mib {too_much}"));
    steps.run("what does not fit is refused at once", &run, 120, 1, "of device memory refused")?;
    let (small, tight) = if steps.is_gpu { ("--limit 600 --batch 256", 64) } else { ("--limit 100 --batch 32", 8) };
    let run =
        steps.crossasset("overflow", device, &format!("{small} --arena-mib {tight} --overflow-mib 2048 --capture off"));
    steps.run("steps that overflow", &run, 900, 0, "0 blocks live")?;
    let run = steps.crossasset("room", device, &format!("{small} --arena-mib 1024"));
    steps.run("the same with room", &run, 900, 0, "0 overflows")?;
    steps.expect_same_weights("overflow", "room")
}

fn figures(steps: &mut Steps) -> Outcome {
    let device = steps.device();
    for bench in ["arena", "upload", "kernels", "matmul"] {
        let command = steps.cargo("bench", &format!("--bench {bench} -- --device {device}"));
        steps.run(&format!("bench {bench}"), &command, 3600, 0, "")?;
    }
    for options in ["--precision f32", "--precision tf32", "--stored bf16"] {
        let command = steps.cargo("bench", &format!("--bench step -- --device {device} {options}"));
        let output = steps.run(&format!("bench step {options}"), &command, 3600, 0, ".json")?;
        let samples = output.split_whitespace().rfind(|word| word.ends_with(".json")).unwrap_or_default();
        let command = steps.cargo("run", &format!("-- predict --gpu gb10 --compare {samples}"));
        let table = steps.run(&format!("predictions {options}"), &command, 900, 0, "| step |")?;
        println!("{}", table[table.find("| step |").unwrap_or(0)..].trim());
    }
    println!("| model | predicted tokens/s | measured | owners |\n|---|---|---|---|");
    let tiny = [("tiny", 2, 32, "")];
    for (name, batch, context, owners) in if steps.is_gpu { &MODELS[..] } else { &tiny } {
        model(steps, name, *batch, *context, owners, if steps.is_gpu { 20 } else { 4 })?;
    }
    Ok(())
}

/// Trains a new model, predicts its update, and prints both as tokens/s. The second half of the
/// updates counts.
fn model(steps: &mut Steps, name: &str, batch: usize, context: usize, owners: &str, updates: usize) -> Outcome {
    let shape = format!("--config ci/gb10-models/{name}.json --batch {batch} --context {context} --precision bf16");
    let (out, forecast) = (steps.out.join(name), steps.out.join(format!("{name}.json")));
    // Without an evaluation on the way, and without a sample.
    let quiet =
        format!("--updates {updates} --evaluate-every {updates} --sample-tokens 0 --overwrite --out {}", out.display());
    let train = steps.cargo("run", &format!("-- train --device {} {shape} {quiet}", steps.device()));
    steps.run(&format!("train {name}"), &train, 7200, 0, "")?;
    let predict = steps.cargo("run", &format!("-- predict --gpu gb10 {shape} --json {}", forecast.display()));
    steps.run(&format!("predict {name}"), &predict, 900, 0, "")?;
    let run = report(&out.join("report.json"))?;
    let seconds = run["seconds"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    let mut seconds: Vec<f64> = seconds.skip(updates / 2).collect();
    seconds.sort_by(f64::total_cmp);
    let measured = seconds.get(seconds.len() / 2).ok_or_else(|| format!("{name}: the report has no seconds"))?;
    let predicted = report(&forecast)?["forecast"]["microseconds"].as_f64().unwrap_or(f64::NAN) / 1e6;
    let [predicted, measured] = [predicted, *measured].map(|seconds| (batch * context) as f64 / seconds);
    println!("| {name}, {batch} x {context} | {predicted:.0} | {measured:.0} | {owners} |");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_step_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let tools = Tools::bare().unwrap();
        let mut steps = Steps { tools, out: folder.path().join("out"), is_gpu: false, done: Vec::new() };
        steps.run("sound", "echo all equal", 60, 0, "all equal").unwrap();
        for (name, line, limit, code, text) in [
            ("another exit code", "false", 60, 0, ""),
            ("success where it must fail", "true", 60, 1, ""),
            ("a text that is missing", "echo one differs", 60, 0, "all equal"),
            ("a hang", "sleep 600", 1, 0, ""),
        ] {
            assert!(steps.run(name, line, limit, code, text).is_err(), "passed: {name}");
        }
        let log = fs::read_to_string(folder.path().join("out/a-hang.log")).unwrap();
        assert!(log.contains("State:"), "{log}");
        let stored = report(&folder.path().join("out/steps.json")).unwrap();
        let well: Vec<bool> = stored.as_array().unwrap().iter().filter_map(|step| step["well"].as_bool()).collect();
        assert_eq!(well, [true, false, false, false, false]);
    }
}
