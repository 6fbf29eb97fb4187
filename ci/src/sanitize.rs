//! NVIDIA's compute-sanitizer over every kernel, on a machine with a GPU and the CUDA toolkit.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use crate::tools::{Outcome, Tools, run, scratch, write};

const TOOLS: [&str; 4] = ["memcheck", "racecheck", "synccheck", "initcheck"];
/// compute-sanitizer's exit code on findings, which no program here uses.
const FOUND: i32 = 77;
const LIMIT_SECONDS: u64 = 280;

/// Returns true for a kernel about which racecheck reports reads and writes that are ordered;
/// docs/testing.md says why.
fn is_known(access: &str) -> bool {
    let kernel = access.split('+').next().unwrap_or_default();
    let name = kernel.trim_end_matches(|letter: char| letter.is_ascii_digit()).strip_suffix("_wgmma_");
    let name = name.and_then(|name| name.strip_prefix("flash_bwd_")).unwrap_or_default();
    ["dkv", "dkv_ds", "scores", "dq_from_scores", "dk_from_scores", "dv_from_scores"].contains(&name)
}

/// The end of a program under a tool.
#[derive(Clone)]
struct Ran {
    status: Option<i32>,
    log: String,
}

impl Ran {
    /// Returns the number of findings in the tool's own summary.
    fn findings(&self) -> Option<usize> {
        let summary = |line: &str| {
            let (_, count) = line.split_once(" SUMMARY: ").filter(|_| line.starts_with('='))?;
            count.split(' ').next()?.parse().ok()
        };
        self.log.lines().filter_map(summary).next_back()
    }

    /// Returns the number of racecheck's findings about a write and reads in known kernels.
    ///
    /// A finding begins with one access, and the lines after it name each access with which that
    /// one races.
    fn known(&self) -> usize {
        let (mut count, mut open) = (0, None);
        for line in self.log.lines().chain([""]) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_first = line.contains(": Race reported between ");
            let is_other = words.get(1) == Some(&"and");
            match (&mut open, is_other) {
                (Some((kind, others, is_unknown)), true) => {
                    *others += 1;
                    *is_unknown |= words.get(2) == Some(kind) || !words.get(5).is_some_and(|access| is_known(access));
                }
                (finding, _) => {
                    count += usize::from(matches!(finding, Some((_, 1.., false))));
                    let access = words.get(8).is_some_and(|access| is_known(access));
                    *finding = is_first.then(|| (words.get(5).copied().unwrap_or_default(), 0, !access));
                }
            }
        }
        count
    }

    /// Returns the names of the kernels that the library reports as launched.
    fn kernels(&self) -> BTreeSet<String> {
        let names = self.log.split(" kernel=\"").skip(1).filter_map(|rest| rest.split('"').next());
        names.map(str::to_owned).collect()
    }

    fn fail(&self, what: &str) -> String {
        let lines: Vec<&str> = self.log.lines().filter(|line| !line.contains(" kernel=\"")).take(120).collect();
        format!("{}\n{what}: {:?} findings, status {:?}", lines.join("\n"), self.findings(), self.status)
    }
}

/// Checks that a tool reported its bad kernel by name, and not the fixed one.
fn check_control(tool: &str, bad: &Ran, good: &Ran) -> Outcome {
    let kernel = format!("{tool}_bad");
    if bad.status == Some(0) || bad.findings().is_none_or(|count| count == 0) || !bad.log.contains(&kernel) {
        return Err(bad.fail(&format!("{tool} did not report {kernel}")));
    }
    let is_quiet = good.status == Some(0) && good.findings() == Some(0);
    if is_quiet { Ok(()) } else { Err(good.fail(&format!("{tool} reported the fixed {kernel}"))) }
}

/// Checks that a tool found every bug that a test plants inside an arena; returns their number.
fn check_planted(tool: &str, ran: &Ran) -> Outcome<usize> {
    let planted = ran.log.lines().find_map(|line| line.strip_prefix("planted: ")?.parse().ok());
    match planted {
        Some(planted) if ran.status != Some(0) && ran.findings() == Some(planted) => Ok(planted),
        _ => Err(ran.fail(&format!("{tool} did not find the {planted:?} planted bugs"))),
    }
}

/// Checks that a tool found nothing while a program ran kernels; returns the number of known
/// findings.
fn check_clean(tool: &str, ran: &Ran) -> Outcome<usize> {
    // The tool's exit code hides that of the tests.
    let is_done = ran.log.lines().any(|line| line.starts_with("test result: ok"));
    let known = if tool == "racecheck" && ran.status == Some(FOUND) && is_done { ran.known() } else { 0 };
    let is_clean =
        if known == 0 { ran.status == Some(0) && ran.findings() == Some(0) } else { ran.findings() == Some(known) };
    if is_clean && !ran.kernels().is_empty() { Ok(known) } else { Err(ran.fail(tool)) }
}

/// Runs compute-sanitizer's tools (default: all) over every kernel of the library, with the kernel
/// tests' `same_bits` cases, and over a CrossAsset step, captured and eager.
///
/// For each tool, a known-bad kernel must first be reported by name, and its fixed version must
/// not. memcheck must find each planted write up to 256 bytes after a tensor of an arena, and
/// initcheck each planted read of memory that the step has not written; `tests/sanitized` plants
/// both. Any other finding is a failure, including racecheck's warnings, as are a missing summary
/// and a program without kernels. Reports about known races are counted apart. SANITIZE_FILTER
/// selects other kernel tests.
pub(crate) fn sanitize(here: &Path, arguments: &[String]) -> Outcome {
    let chosen: Vec<&str> =
        if arguments.is_empty() { TOOLS.to_vec() } else { arguments.iter().map(String::as_str).collect() };
    let toolkit = std::env::var("CUDA_HOME").unwrap_or("/usr/local/cuda".to_owned());
    let path = format!("{}:{toolkit}/bin", std::env::var("PATH").unwrap_or_default());
    // Kernels take many times as long, which is too slow for a self-test.
    let tools = Tools::bare()?.with("PATH", path).with("STEPSCOPE_SELF_TEST", "never");
    let work = scratch()?;
    let (source, control) = (work.path().join("control.cu"), work.path().join("control"));
    write(&source, include_str!("control.cu"))?;
    let mut compile = tools.command("nvcc -arch=native -lineinfo -o");
    run(compile.args([&control, &source])).map_err(|error| format!("{error}; install the CUDA toolkit"))?;
    println!("{}", tools.output("compute-sanitizer --version")?.lines().last().unwrap_or_default());

    let under = |tool: &str, program: &Path, options: &str, trace: bool| -> Outcome<Ran> {
        // A finding for each pair of instructions, not for each byte.
        let report = if tool == "racecheck" { "--racecheck-report analysis" } else { "" };
        let line =
            format!("timeout -k 10 {LIMIT_SECONDS} compute-sanitizer --tool {tool} --error-exitcode {FOUND} {report}");
        let mut command = tools.command(format!("{line} --print-limit 0 --destroy-on-device-error kernel"));
        let log = work.path().join("log");
        let file = std::fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let errors = file.try_clone().map_err(|error| error.to_string())?;
        command.arg(program).args(options.split_whitespace()).stdout(file).stderr(errors);
        let status = command.envs(trace.then_some(("RUST_LOG", "stepscope=trace"))).status();
        let status = status.map_err(|error| format!("{line}: {error}"))?.code();
        Ok(Ran { status, log: String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()).into_owned() })
    };
    let filter =
        std::env::var("SANITIZE_FILTER").unwrap_or("same_bits::every_kernel_gives_the_committed_bits::cuda".to_owned());
    // One fold of one batch: a step that is captured and replayed once, or eager with tensors as
    // separate regions.
    let out = work.path().join("crossasset").display().to_string();
    let training = format!("--device cuda --folds 1 --epochs 1 --limit 64 --batch 256 --out {out} --overwrite");
    let mut faults = Vec::new();
    for tool in chosen {
        let mut checked = |what: &str, outcome: Outcome<String>| match outcome {
            Ok(text) => println!("{tool:<10} {what:<12} {text}"),
            Err(fault) => faults.push(fault),
        };
        let bad = under(tool, &control, &format!("{tool} bad"), false)?;
        let good = under(tool, &control, &format!("{tool} good"), false)?;
        checked(
            "control",
            check_control(tool, &bad, &good)
                .map(|()| "the known-bad kernel is reported, the fixed one is not".to_owned()),
        );
        let planted = match tool {
            "memcheck" => Some("every_byte_past_a_tensor"),
            "initcheck" => Some("reads_of_unwritten_memory"),
            _ => None,
        };
        if let Some(test) = planted {
            let ran = under(
                tool,
                &here.join("tests/sanitized"),
                &format!("--ignored --nocapture --test-threads=1 {test}"),
                false,
            )?;
            checked("arena", check_planted(tool, &ran).map(|count| format!("{count} planted bugs, each found")));
        }
        let mut launched = BTreeSet::new();
        for (name, program, options, trace) in [
            ("kernels", "tests/kernels", format!("--include-ignored --nocapture --test-threads=1 {filter}"), false),
            ("captured", "examples/crossasset", format!("--capture on {training}"), true),
            ("eager", "examples/crossasset", format!("--capture off {training}"), true),
        ] {
            let started = Instant::now();
            let ran = under(tool, &here.join(program), &options, trace)?;
            let text = |known| {
                format!(
                    "0 findings over {} kernels, {} s, and {known} known ones",
                    ran.kernels().len(),
                    started.elapsed().as_secs()
                )
            };
            checked(name, check_clean(tool, &ran).map(text));
            launched.extend(ran.kernels());
        }
        println!("{tool}: {} kernels in all", launched.len());
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(status: i32, log: &str) -> Ran {
        Ran { status: Some(status), log: log.to_owned() }
    }

    #[test]
    fn blind_and_crying_tools_are_reported() {
        let bad = ran(77, "========= at memcheck_bad\n========= ERROR SUMMARY: 3 errors\n");
        let good = ran(0, "========= ERROR SUMMARY: 0 errors\n");
        assert_eq!(check_control("memcheck", &bad, &good), Ok(()));
        let nameless = ran(77, "========= ERROR SUMMARY: 3 errors\n");
        for (bad, good) in
            [(&good, &good), (&nameless, &good), (&bad, &bad), (&bad, &ran(0, "")), (&ran(0, &bad.log), &good)]
        {
            assert!(check_control("memcheck", bad, good).is_err());
        }
        let planted = "planted: 512\n========= ERROR SUMMARY: 512 errors\n";
        assert_eq!(check_planted("memcheck", &ran(77, planted)), Ok(512));
        for (status, log) in [
            (0, planted.to_owned()),
            (77, planted.replace("512 errors", "0 errors")),
            (77, planted.replace("planted", "x")),
        ] {
            assert!(check_planted("memcheck", &ran(status, &log)).is_err(), "passed: {log}");
        }
    }

    #[test]
    fn findings_crashes_and_silence_are_reported() {
        let launch = "launch kernel=\"add\" grid=1\n";
        let none = "========= ERROR SUMMARY: 0 errors\n";
        assert_eq!(check_clean("memcheck", &ran(0, &format!("{launch}{none}"))), Ok(0));
        for (status, log) in [
            (77, format!("{launch}========= ERROR SUMMARY: 1 errors\n")),
            (0, format!("{launch}========= ERROR SUMMARY: 1 errors\n")),
            (3, format!("{launch}{none}")),
            (0, launch.to_owned()),
            (0, none.to_owned()),
        ] {
            assert!(check_clean("memcheck", &ran(status, &log)).is_err(), "passed: {log}");
        }
    }

    #[test]
    fn only_known_races_pass() {
        let race = |one: &str, other: &str, kernel: &str| {
            format!(
                "========= Error: Race reported between {one} access at {kernel}+0x10\n\
                 =========     and {other} access at {kernel}+0x20 [512 hazards]\n========= \n"
            )
        };
        let known =
            race("Write", "Read", "flash_bwd_dkv_wgmma_128") + &race("Read", "Write", "flash_bwd_dkv_ds_wgmma_128");
        let run = |races: &str, count: usize, result: &str| {
            let log = format!(
                "launch kernel=\"add\"\n{races}{result}\n========= RACECHECK SUMMARY: {count} hazards displayed (0 errors)\n"
            );
            check_clean("racecheck", &ran(FOUND, &log))
        };
        let passed = "test result: ok. 1 passed";
        assert_eq!(run(&known, 2, passed), Ok(2));
        assert!(run(&known, 2, "").is_err(), "passed a test that failed");
        assert!(run(&(known.clone() + &race("Write", "Read", "add")), 3, passed).is_err(), "passed another kernel");
        let overwriting = race("Write", "Write", "flash_bwd_dkv_ds_wgmma_128");
        assert!(run(&(known + &overwriting), 3, passed).is_err(), "passed two writes");
    }
}
