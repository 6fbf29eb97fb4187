//! The bundle for machines with GPUs: packing it, and what runs there without cargo.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::sanitize::sanitize;
use crate::tools::{EVERY_FEATURE, Outcome, Tools, at, output, run, stdout};

const LIMIT_BYTES: u64 = 64_000_000;
/// The name of this program in the bundle, by what it runs.
const PROGRAMS: [&str; 2] = ["run", "sanitize"];
/// Examples that give the same results on the emulator.
const LEFT_OUT: [&str; 3] = ["one_op", "own_op", "gradients_after_reset"];

/// Packs everything to run on a GPU machine (default `target/gpu-bundle.tar.xz`): the package's
/// test binaries, benches and most examples, optimized and with every feature, and two programs.
/// `run` runs the tests, and `sanitize` runs NVIDIA's sanitizers over them.
///
/// That machine needs the driver, tar and xz; `sanitize` also needs the CUDA toolkit.
/// STEPSCOPE_ARCHS selects the GPU that the kernels are compiled for (default sm_90, and sm_90a
/// with the kernels of warpgroups). Programs that need cargo (`tests/ui`) or no GPU are left out.
/// Fails above 64 MB.
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
            // GPU tests are ignored tests, so a program without any would repeat the emulator's
            // results.
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
    // The programs share much code, so the dictionary spans most of them. For 33 programs, preset 6
    // with a dictionary of 64 MiB gives 84 MB in eleven minutes of one core, and this 63 in two.
    let script = "mkdir -p \"$(dirname \"$2\")\"; \
        tar -cf - --sort=name -C \"$1\" . | xz -T1 --lzma2=preset=2,dict=512MiB > \"$2\"";
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
/// On compute capability 9.0, which has two matrix instructions, the kernels' tests run a second
/// time with mma.sync. Tests of groups with NCCL (`two_gpus::`, `four_gpus::`) are skipped, with a
/// message, on fewer GPUs. Prints a line per program and a total `N passed, N failed`. Fails if a
/// test fails, or a program crashes, exceeds 600 s or ends without running a test.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::write;
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
}
