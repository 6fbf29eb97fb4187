//! The bundle for machines with GPUs: packing it, and what runs there without cargo.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::sanitize::sanitize;
use crate::tools::{EVERY_FEATURE, Outcome, Tools, at, output, read, run, say, stdout, write};

const LIMIT_BYTES: u64 = 60_000_000;
/// The name of this program in the bundle, by what it runs.
const PROGRAMS: [&str; 3] = ["run", "run-many", "sanitize"];
/// Examples that give the same results on the emulator.
const LEFT_OUT: [&str; 3] = ["one_op", "own_kernel", "gradients_after_reset"];

/// Packs everything to run on a GPU machine (default `target/gpu-bundle.tar.xz`): the package's test
/// binaries, benches and most examples, optimized and with every feature, and three programs. `run`
/// runs the tests, `sanitize` runs NVIDIA's sanitizers over them, and `run-many` is for hosts with
/// several GPUs.
///
/// That machine needs the driver, tar and xz; `sanitize` also needs the CUDA toolkit. STEPSCOPE_ARCHS
/// selects the GPU that the kernels are compiled for (default sm_90, and sm_90a with the kernels of
/// warpgroups). Programs that need cargo (`tests/ui`) or no GPU are left out. Fails above 60 MB.
pub(crate) fn pack(arguments: &[String]) -> Outcome {
    let archs = std::env::var("STEPSCOPE_ARCHS").unwrap_or("sm_90,sm_90a".to_owned());
    let tools = Tools::install(&["device_compiler", "cuda_stub", "cuda_stub_at_run_time", "packers"])?
        .with("STEPSCOPE_ARCHS", archs);
    let folder = tools.target().join("gpu-bundle");
    let archive = arguments.first().map_or(tools.target().join("gpu-bundle.tar.xz"), PathBuf::from);
    // Fails if it is not there.
    let _ = fs::remove_dir_all(&folder);
    let packages = format!("--package stepscope --package stepscope-cli --features {EVERY_FEATURE}");
    let libraries =
        "--package stepscope-core --package stepscope-train --package stepscope-group --package stepscope-check";
    let downstream = format!(
        "--manifest-path tests/downstream/Cargo.toml --target-dir {} --features cuda,nvtx",
        tools.target().display()
    );
    for (kind, line, kinds) in [
        (
            "tests",
            format!("test {libraries} {packages} --release --no-run --lib --tests"),
            &["lib", "test", "example"][..],
        ),
        ("tests", format!("test --release --no-run --tests {downstream}"), &["lib", "test"]),
        ("examples", format!("build --release --bins --examples {packages}"), &["example", "bin"]),
        ("benches", format!("bench --no-run --benches {packages}"), &["bench"]),
    ] {
        let messages = stdout(&mut tools.command(format!("cargo {line} --message-format=json-render-diagnostics")))?;
        for (name, path) in programs(&messages, kind == "tests", kinds) {
            // GPU tests are ignored tests, so a program without any would repeat the emulator's results.
            let is_for_gpus = kind != "tests" || tools.output(format!("{path} --list --ignored"))?.contains(": test");
            if is_for_gpus && !LEFT_OUT.contains(&name.as_str()) {
                // Tests expect the program where cargo builds it, next to their folder.
                let place = if name == "stepscope" { folder.clone() } else { folder.join(kind) };
                at(&place, fs::create_dir_all(&place))?;
                run(tools.command("strip -o").arg(place.join(name)).arg(path))?;
            }
        }
    }
    let first = folder.join(PROGRAMS[0]);
    run(tools.command("strip -o").arg(&first).arg(at(".", std::env::current_exe())?))?;
    for name in &PROGRAMS[1..] {
        at(&first, fs::hard_link(&first, folder.join(name)))?;
    }
    write(folder.join("peers/gpt2.py"), read("benches/peers/gpt2.py")?)?;
    // The programs share much code, so the dictionary spans several of them. Blocks are few, because
    // each begins with an empty dictionary. For 56 programs, preset 3 gives 65 MB and this 58, in
    // seven minutes on two cores.
    let script = "mkdir -p \"$(dirname \"$2\")\"; \
        tar -cf - --sort=name -C \"$1\" . | xz -T0 --block-size=640MiB --lzma2=preset=6,dict=64MiB > \"$2\"";
    run(tools.command("bash -euo pipefail -c").args([script, "pack"]).args([&folder, &archive]))?;
    let bytes = at(&archive, fs::metadata(&archive))?.len();
    println!("{}: {bytes} bytes", archive.display());
    if bytes > LIMIT_BYTES { Err(format!("{} is larger than {LIMIT_BYTES} bytes", archive.display())) } else { Ok(()) }
}

/// Returns name and path of the programs in cargo's messages.
fn programs(messages: &str, is_test: bool, kinds: &[&str]) -> BTreeMap<String, String> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let built = messages.filter_map(|message| {
        let path = message["executable"].as_str()?.to_owned();
        let target = &message["target"];
        let is_kind = target["kind"].as_array()?.iter().filter_map(Value::as_str).any(|kind| kinds.contains(&kind));
        let is_wanted = is_kind && message["profile"]["test"] == is_test | kinds.contains(&"bench");
        is_wanted.then(|| (target["name"].as_str().unwrap_or_default().to_owned(), path))
    });
    built.collect()
}

/// Runs a program of the bundle, if `name` is one.
pub(crate) fn bundled(name: &str, arguments: &[String]) -> Option<Outcome> {
    PROGRAMS.contains(&name).then(|| {
        let program = at(".", std::env::current_exe())?;
        let here = program.parent().unwrap_or(Path::new("."));
        match name {
            "run" => run_tests(here, &Gpus::here(), arguments),
            "run-many" => run_many(here, Gpus::here().count, arguments),
            _ => sanitize(here, arguments),
        }
    })
}

/// The GPUs of a host.
struct Gpus {
    count: usize,
    capability: String,
}

impl Gpus {
    fn here() -> Self {
        let listed =
            |arguments: &str| stdout(Command::new("nvidia-smi").args(arguments.split(' '))).unwrap_or_default();
        let capability = listed("--query-gpu=compute_cap --format=csv,noheader");
        Self {
            count: listed("--list-gpus").lines().count(),
            capability: capability.lines().next().unwrap_or_default().to_owned(),
        }
    }
}

/// Runs every test program of the bundle, including GPU tests, one test at a time.
///
/// On compute capability 9.0, which has two matrix instructions, the kernels' tests run a second time
/// with mma.sync. Tests of groups with NCCL (`two_gpus::`, `four_gpus::`) are skipped, with a message,
/// on fewer GPUs. Prints a line per program and a total `N passed, N failed`. Fails if a test fails,
/// or a program crashes, exceeds 600 s or ends without running a test.
fn run_tests(here: &Path, gpus: &Gpus, filters: &[String]) -> Outcome {
    let mut arguments: Vec<String> = Vec::new();
    for (count, word) in [(2, "two"), (4, "four")] {
        if gpus.count < count {
            println!("fewer than {word} GPUs: tests named {word}_gpus:: are left out");
            arguments.extend(["--skip".to_owned(), format!("{word}_gpus::")]);
        }
    }
    arguments.extend(filters.iter().cloned());
    let folder = here.join("tests");
    let entries = at(&folder, folder.read_dir())?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut programs: Vec<PathBuf> = entries.collect();
    programs.sort();
    let (mut passed, mut failed) = (0, 0);
    let mut add = |program: &Path, arguments: &[String], instruction: Option<&str>| {
        let counts = run_program(program, arguments, instruction);
        let note = instruction.map_or(String::new(), |name| format!(", {name}"));
        println!(
            "{:<24} {:5} passed, {} failed",
            program.file_name().unwrap_or_default().display().to_string() + &note,
            counts.0,
            counts.1
        );
        passed += counts.0;
        failed += counts.1;
    };
    programs.iter().for_each(|program| add(program, &arguments, None));
    if gpus.capability == "9.0" {
        if filters.is_empty() {
            // Only the tests on the GPU.
            arguments.push("cuda".to_owned());
        }
        programs
            .iter()
            .filter(|program| program.ends_with("kernels"))
            .for_each(|program| add(program, &arguments, Some("mma-sync")));
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { Ok(()) } else { Err("not every test ran and passed".to_owned()) }
}

/// Runs each test module in a process of its own, so that a lost device or a global subscriber does
/// not affect others; returns the numbers of passed and failed tests.
fn run_program(program: &Path, arguments: &[String], instruction: Option<&str>) -> (usize, usize) {
    let list = stdout(Command::new(program).args(["--list", "--include-ignored"]).args(arguments)).unwrap_or_default();
    let mut modules: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        modules.entry(name.split("::").next().unwrap_or_default()).or_default().push(name);
    }
    let (mut passed, mut failed) = (0, 0);
    for (module, names) in modules {
        let mut command = Command::new("timeout");
        command.arg("600").arg(program).args(["--exact", "--include-ignored", "--test-threads=1"]).args(names);
        let outcome = output(command.envs(instruction.map(|name| ("STEPSCOPE_MATRIX_INSTRUCTION", name))));
        let (Ok(log) | Err(log)) = &outcome;
        let (passes, failures) = counts(log);
        passed += passes;
        failed += failures;
        if outcome.is_err() || passes == 0 {
            println!("{log}\n{}: {module} failed, or ended without a result", program.display());
            // A crashed program counts as at least one failure.
            failed += usize::from(failures == 0);
        }
    }
    (passed, failed)
}

/// Returns the numbers of passed and failed tests in a log.
fn counts(log: &str) -> (usize, usize) {
    let result = log.lines().rev().find(|line| line.starts_with("test result:")).unwrap_or_default();
    let number =
        |word| result.split(word).next().and_then(|text| text.trim_end().rsplit(' ').next()?.parse().ok()).unwrap_or(0);
    (number(" passed;"), number(" failed;"))
}

/// Tests and measures a host with several GPUs, with 1, 2, 4 .. ranks up to a number (default: all
/// GPUs). STEPSCOPE_NCCL overrides libnccl.so.2, PYTHON the Python interpreter, and OUT the folder.
///
/// - Weights: CrossAsset and a tiny GPT, a hundred updates with 8 shards. Any number of GPUs and the
///   emulator must give the same weights.
/// - Speed: GPT-2 124M, BF16, 16 x 1024 tokens per GPU: tokens/s, compared with PyTorch's DDP if it is
///   there. Speed is only reported.
/// - Faults: faults of a rank at random moments, as many as STEPSCOPE_KILLS (default 5). Prints for
///   each how long the other ranks took to end.
fn run_many(here: &Path, gpus: usize, arguments: &[String]) -> Outcome {
    let most = arguments.first().map_or(Some(gpus), |most| most.parse().ok());
    let most = most
        .filter(|most| (1..=gpus).contains(most))
        .ok_or_else(|| format!("this host has {gpus} GPUs, not {arguments:?}"))?;
    let out =
        PathBuf::from(std::env::var("OUT").unwrap_or(format!("{}/stepscope-many", std::env::temp_dir().display())));
    // Random text, which gives as many tokens as the speed needs.
    let text = out.join("text");
    write(&text, stdout(Command::new("bash").args(["-c", "head -c 3000000 /dev/urandom | base64"]))?)?;
    let ranks: Vec<usize> =
        std::iter::successors(Some(1), |ranks| Some(ranks * 2)).take_while(|ranks| *ranks <= most).collect();
    println!("{gpus} GPUs, by {ranks:?} ranks, into {}", out.display());
    let trained = |name: &str, program: &str, options: &str| -> Outcome<Value> {
        let program = if program == "train" {
            format!("{}/stepscope train", here.display())
        } else {
            format!("{}/examples/{program}", here.display())
        };
        let mut command = Tools::bare()?.command(format!("timeout 600 {program} {options} --overwrite --out"));
        output(command.arg(out.join(name)))?;
        serde_json::from_str(&read(out.join(name).join("report.json"))?).map_err(|error| format!("{name}: {error}"))
    };
    let mut faults = Vec::new();

    say("weights");
    let crossasset = "--limit 105 --horizon 2 --batch 8 --shards 8 --folds 1 --epochs 15 --arena-mib 64";
    let gpt = format!(
        "--size tiny --context 16 --batch 1 --shards 8 --updates 100 --sample-tokens 1 --data {}",
        text.display()
    );
    for (program, options) in [("crossasset", crossasset), ("train", gpt.as_str())] {
        let devices =
            ranks.iter().map(|ranks| (format!("{program}-{ranks}"), format!("--device cuda --ranks {ranks}")));
        let devices = [(format!("{program}-emulated"), "--device emulated".to_owned())].into_iter().chain(devices);
        let mut digests = Vec::new();
        for (name, device) in devices {
            match trained(&name, program, &format!("{device} {options}")) {
                Ok(report) => digests.push((name, report["weights_sha256"].as_str().unwrap_or_default().to_owned())),
                Err(error) => faults.push(error),
            }
        }
        digests.iter().for_each(|(name, digest)| println!("{name:<28} {digest}"));
        faults.extend(differing(&digests));
    }
    say("tokens per second, and PyTorch's");
    let python = std::env::var("PYTHON").unwrap_or("python3".to_owned());
    for ranks in &ranks {
        let options = format!(
            "--device cuda --size 124m --tokenizer gpt2 --data {} --precision bf16 --batch 16 --updates 30 --ranks {ranks} --shards {ranks} --sample-tokens 1",
            text.display()
        );
        let ours =
            trained(&format!("speed-{ranks}"), "train", &options).map(|report| report["tokens_per_second"].clone());
        let peer = Command::new(&python)
            .args(["-m", "torch.distributed.run", "--nproc-per-node", &ranks.to_string()])
            .arg(here.join("peers/gpt2.py"))
            .output();
        let peer = peer.map(|done| String::from_utf8_lossy(&done.stdout).trim().to_owned()).unwrap_or_default();
        println!("{ranks} ranks: {ours:?}; PyTorch: {peer}");
        faults.extend(ours.err());
    }
    say("faults");
    for (test, needed) in [("two_gpus::", 2), ("four_gpus::", 4)] {
        if most >= needed {
            let mut command = Command::new("timeout");
            command.arg("600").arg(here.join("tests/group")).args([
                "--include-ignored",
                "--test-threads=1",
                "--nocapture",
                test,
            ]);
            let kills = std::env::var("STEPSCOPE_KILLS").unwrap_or("5".to_owned());
            let outcome = output(command.env("STEPSCOPE_KILLS", kills));
            let (Ok(log) | Err(log)) = &outcome;
            // The text after a test's name starts on the same line.
            log.lines()
                .filter_map(|line| line.find("FAULT ").map(|start| &line[start..]))
                .for_each(|line| println!("{line}"));
            faults.extend(outcome.err());
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Returns an error unless all runs have the same digest, and there is one.
fn differing(digests: &[(String, String)]) -> Option<String> {
    let [(first, digest), others @ ..] = digests else { return Some("no run has weights".to_owned()) };
    let other = [(first, digest)].into_iter().chain(others.iter().map(|(name, digest)| (name, digest)));
    let other = other.into_iter().find(|(_, other)| *other != digest || other.is_empty());
    other.map(|(name, other)| format!("{name} has other weights than {first}: {other}, {digest}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn each_failure_of_a_program_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tests/kernels");
        let outcome = |body: &str, capability: &str| {
            let script = format!("#!/bin/sh\ncase $* in *--list*) echo 'cuda: test'; exit ;; esac\n{body}\n");
            write(&program, script).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            run_tests(folder.path(), &Gpus { count: 1, capability: capability.to_owned() }, &[])
        };
        let passes = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored;'";
        assert_eq!(outcome(passes, "12.1"), Ok(()));
        assert_eq!(counts("test result: ok. 12 passed; 3 failed; 0 ignored;"), (12, 3));
        for body in [
            "echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored;'; exit 101",
            &format!("{passes}; kill -SEGV $$"),
            "exit 0",
            "echo 'test result: ok. 0 passed; 0 failed; 0 ignored;'",
        ] {
            assert!(outcome(body, "12.1").is_err(), "passed: {body}");
        }
        // A second run of the kernels' tests, with the other instruction.
        let first_only = format!("[ \"$STEPSCOPE_MATRIX_INSTRUCTION\" != mma-sync ] || exit 1; {passes}");
        assert_eq!(outcome(&first_only, "12.1"), Ok(()));
        assert!(outcome(&first_only, "9.0").is_err());
    }

    #[test]
    fn other_weights_are_reported() {
        let run = |name: &str, digest: &str| (name.to_owned(), digest.to_owned());
        assert_eq!(differing(&[run("a", "1"), run("b", "1")]), None);
        for runs in [&[][..], &[run("a", "1"), run("b", "2")], &[run("a", "")]] {
            assert!(differing(runs).is_some(), "passed: {runs:?}");
        }
    }
}
