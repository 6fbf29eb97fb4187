//! Checks that need the pinned nightly compiler, which rustup installs below `target/`: Miri and
//! fuzzing.

use std::path::Path;

use crate::tools::{Outcome, Tools, is_quick, output, plant, refused, run, say, scratch};

/// Tests that run kernels or read system files, and searches and statistics without unsafe code
/// that take half an hour here.
const SKIPPED: [&str; 9] = [
    "device::driver_thread",
    "loader::",
    "device::self_test",
    "reads_this_host",
    "cgroup::",
    "token_sampler::",
    "every_short_sequence_is_disjoint",
    "any_start_is_classified",
    "single_non_finite_value_is_found",
];

/// Runs under Miri what it supports of the host: unit tests, and steps, launches, dry runs and
/// replays on the emulator. `--quick` runs only the driver thread and the latter.
///
/// Miri finds undefined behavior: bad pointers, races, uninitialized reads, leaks. Kernels without
/// a barrier are plain loops there. It supports neither coroutines nor processes. Groups, which are
/// safe code that communicates by TCP, and stepscope-check are not run.
pub(crate) fn miri(arguments: &[String]) -> Outcome {
    let tools = Tools::install(&["nightly_toolchain"])?;
    let folder = scratch()?;
    let tools = tools.with("CARGO_TARGET_DIR", tools.target().join("miri"));
    // Few random cases, and no failure files.
    let tools = tools.with("PROPTEST_CASES", "4").with("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
    let miri = format!("cargo {} miri test", tools.get("nightly")?);
    let within = tools.for_planted(folder.path());
    let planted = |body: &str| {
        let test = "#[test]\nfn one() {\n    let boxed = Box::new(1);\n    let read = &raw const *boxed;\n";
        plant(folder.path(), "planted", "", &format!("{test}{body}\nassert_eq!(unsafe {{ *read }}, 1);\n}}\n"))?;
        within.output(format!("{miri} --lib"))
    };
    planted("")?;
    refused("a read of freed memory", "Undefined Behavior", planted("drop(boxed);"))?;

    let tests = |flags: &str, selected: &str| {
        let log = output(&mut tools.with("MIRIFLAGS", flags).command(format!("{miri} --quiet --locked {selected}")))?;
        println!("{}", log.lines().filter(|line| line.starts_with("test result")).collect::<Vec<_>>().join("\n"));
        let is_run = log.lines().any(|line| line.starts_with("test result: ok. ") && !line.contains(" ok. 0 "));
        if is_run { Ok(()) } else { Err(format!("{log}no test was selected: {selected}")) }
    };
    say("the driver thread, with Miri's virtual clock; a stuck thread ends with the process");
    tests("-Zmiri-ignore-leaks", "--package stepscope-core --lib -- device::driver_thread")?;
    say("steps, launches, dry runs, replays and drops, on the emulator; its threads end with the process");
    let flags = "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance";
    tests(flags, "--package stepscope --test memory -- inside:: --skip cuda --skip every_operation_in_every_scope")?;
    if is_quick(arguments) {
        return Ok(());
    }
    say("the loader, one of whose threads ends with the process");
    tests("-Zmiri-disable-isolation -Zmiri-ignore-leaks", "--package stepscope-train --lib -- loader::")?;
    say("the host's other unit tests");
    let skipped = SKIPPED.map(|name| format!("--skip {name}")).join(" ");
    let flags = "-Zmiri-disable-isolation";
    tests(flags, &format!("--package stepscope-core --package stepscope-train --lib -- {skipped}"))?;
    say("the reader of price bars");
    tests(flags, "--package stepscope --example crossasset -- bars::")
}

/// Runs each fuzz target of `fuzz/` for some seconds (default 60), with AddressSanitizer, from the
/// inputs in `fuzz/corpus`. Further arguments select targets.
///
/// Each target must first fail on a planted bug. A crash prints the path of its input.
pub(crate) fn fuzz(arguments: &[String]) -> Outcome {
    let seconds = arguments.first().map_or("60", String::as_str);
    seconds.parse::<u32>().map_err(|_| format!("`{seconds}` is not a number of seconds"))?;
    let mut names: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    if names.is_empty() {
        names = vec!["bars", "checkpoint", "arena", "group"];
    }
    let tools = Tools::install(&["nightly_toolchain", "c_compiler", "fuzzer"])?;
    let folder = tools.target().join("fuzz");
    let tools = tools.with("CARGO_TARGET_DIR", &folder);
    tools.run(format!("cargo {} fuzz build", tools.get("nightly")?))?;
    let programs = folder.join(format!("{}-unknown-linux-gnu/release", std::env::consts::ARCH));
    let work = scratch()?;
    for name in names {
        say(name);
        let corpus = format!("fuzz/corpus/{name}");
        if !Path::new(&corpus).read_dir().is_ok_and(|mut inputs| inputs.next().is_some()) {
            return Err(format!("{corpus} holds no input"));
        }
        let (inputs, crashes) = (work.path().join(name), folder.join(format!("artifacts/{name}")));
        run(tools.command("mkdir -p").args([&inputs, &crashes]))?;
        // New inputs leave the committed ones unchanged. Leak detection is off, also that at the
        // end, because a lost device deliberately keeps its memory.
        let fuzzed = |tools: &Tools, end: &str, crashes: &Path| {
            let mut command = tools.command(programs.join(name).display().to_string());
            command.env("ASAN_OPTIONS", "detect_leaks=0");
            command.args(["-detect_leaks=0", "-max_len=4096", "-len_control=20", end]);
            output(command.arg(format!("-artifact_prefix={}/", crashes.display())).arg(&inputs).arg(&corpus))
        };
        refused("a planted bug", "panicked at", fuzzed(&tools.with("STEPSCOPE_PLANT", "1"), "-runs=0", work.path()))?;
        let log = fuzzed(&tools, &format!("-max_total_time={seconds}"), &crashes)?;
        println!(
            "{}",
            log.lines()
                .filter(|line| line.contains("INITED") || line.starts_with("Done"))
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
    Ok(())
}
