//! The tests of the workspace: all of them, the longest ones, those under loom, and those on
//! another processor.

use crate::tools::{EVERY_FEATURE, Outcome, Tools, is_quick, output, plant, refused, run, say, scratch};

/// Runs every test of the workspace, with feature `cuda` compiled against the stub driver, and the
/// examples of the documentation.
///
/// Tests that need a GPU are ignored; run them with `--run-ignored all`.
pub(crate) fn test(arguments: &[String]) -> Outcome {
    let tools = Tools::install(&["test_tools"])?;
    let folder = scratch()?;
    let within = tools.for_planted(folder.path());
    plant(folder.path(), "planted", "", "#[test]\nfn one() {}\n")?;
    within.output("cargo nextest run")?;
    plant(folder.path(), "planted", "", "#[test]\nfn one() {\n    panic!();\n}\n")?;
    // nextest's status for failed tests.
    refused("a failing test", "exit status: 100", within.output("cargo nextest run"))?;

    say("tests");
    // Two more than the processors, because tests of ranks mostly wait.
    let threads = std::thread::available_parallelism().map_or(4, |count| count.get() + 2);
    let threads = std::env::var("NEXTEST_TEST_THREADS").unwrap_or(threads.to_string());
    let tools = tools.with("NEXTEST_TEST_THREADS", threads);
    run(tools.command(format!("cargo nextest run --workspace --features {EVERY_FEATURE}")).args(arguments))?;
    say("examples in the documentation");
    tools.run(format!("cargo test --quiet --workspace --features {EVERY_FEATURE} --doc"))
}

/// Runs what `.config/nextest.toml` leaves out of every other run, and the faults of groups.
///
/// The emulator's tests and the attacks on contracts also run in a release build.
pub(crate) fn long(_: &[String]) -> Outcome {
    let tools = Tools::install(&["test_tools"])?;
    let nextest = "cargo nextest run";
    let workspace = format!("{nextest} --workspace --features {EVERY_FEATURE}");
    // Ranks have a separate command, and tests that need two GPUs are ignored.
    run(tools.command(&workspace).args(["--ignore-default-filter", "-E", "not (default() | test(/^ranks::/))"]))?;
    say("the emulator and the attacks on contracts, in a release build");
    let release = "--cargo-profile unchecked --package stepscope-cuda-std --package stepscope --test emulator --test faults --test kernels";
    let attacks = "package(stepscope-cuda-std) | test(/contracts::|^hostile::|^huge::/)";
    run(tools.command(format!("{nextest} {release}")).args(["-E", attacks]))?;
    say("a package outside the workspace, with its own kernels");
    // Compiled without optimization, as users would.
    let downstream = "cargo test --quiet --manifest-path tests/downstream/Cargo.toml --features cuda --target-dir";
    run(tools.command(downstream).arg(tools.target()))?;
    say("faults of groups at twenty moments each: how long the other ranks took to end");
    let faults = ["-E", "binary(group) & test(/^group_(faults|ends)::/)", "--success-output", "immediate"];
    let log = output(tools.with("STEPSCOPE_KILLS", "20").command(&workspace).args(faults))?;
    let lines: Vec<&str> = log.lines().filter_map(|line| line.find("FAULT ").map(|start| &line[start..])).collect();
    println!("{}", lines.join("\n"));
    if lines.is_empty() { Err("no fault was reported".to_owned()) } else { Ok(()) }
}

/// Checks the driver thread with loom: interleavings of callers, thread and deadlines, and four
/// planted bugs that loom must find. See `tests/loom`.
pub(crate) fn loom(_: &[String]) -> Outcome {
    let tools = Tools::install(&[])?;
    let tools = tools.with("RUSTFLAGS", "--cfg loom").with("CARGO_TARGET_DIR", tools.target().join("loom"));
    let command = "cargo test --quiet --release --locked --manifest-path tests/loom/Cargo.toml --lib -- --nocapture --test-threads=1";
    let log = tools.output(command)?;
    let counts: Vec<&str> = log.lines().filter(|line| line.ends_with(" interleavings")).collect();
    println!("{}", counts.join("\n"));
    // Without --cfg loom the package is empty and would pass.
    if counts.len() == 4 && log.contains("test result: ok. 8 passed") {
        Ok(())
    } else {
        Err(format!("{log}not all models ran"))
    }
}

/// Links all programs, tests and examples for aarch64, runs the emulator's tests there under qemu,
/// and compares the bits of every kernel with the committed ones. `--quick` links only what runs.
///
/// Only the kernels are optimized. Profile `aarch64` of `.config/nextest.toml` selects the tests
/// that depend on the processor, without the longest.
pub(crate) fn aarch64(arguments: &[String]) -> Outcome {
    if std::env::consts::ARCH == "aarch64" {
        println!("this machine is aarch64: ci/test runs the whole suite");
        return Ok(());
    }
    let tools = Tools::install(&["aarch64_tools"])?;
    let folder = tools.target().join("aarch64");
    let tools = tools.with("CARGO_TARGET_DIR", &folder);
    let kernels = ["stepscope-kernels", "stepscope-cuda-std"];
    let optimized = kernels.map(|package| format!("--config profile.dev.package.{package}.opt-level=2")).join(" ");
    let packages = "--package stepscope-cuda-std --package stepscope --package stepscope-core --package stepscope-train \
        --package stepscope-group --package stepscope-check --lib --test kernels --test capture --test memory";
    let linked = if is_quick(arguments) { packages } else { "--workspace" };
    say("linking programs");
    tools.run(format!("cargo nextest run {optimized} --locked {linked} --no-run"))?;
    tools.run(format!("cargo build {optimized} --locked --package stepscope-cli --bin stepscope"))?;
    say("the bits of every kernel");
    let program = folder.join("aarch64-unknown-linux-gnu/debug/stepscope");
    let header = std::fs::read(&program).map_err(|error| format!("{}: {error}", program.display()))?;
    if header.get(18..20) != Some(&[0xb7, 0]) {
        return Err(format!("{} is not a program for aarch64", program.display()));
    }
    let runner = tools.get("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER")?;
    let log = output(tools.command(runner).arg(&program).args(["check", "--device", "emulated"]))?;
    println!("{}", log.lines().last().unwrap_or_default());
    say("the emulator's tests");
    tools.run(format!("cargo nextest run {optimized} --locked {packages} --profile aarch64 --status-level fail"))
}
