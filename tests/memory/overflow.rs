//! Runs the built examples beyond their arenas. `crossasset` trains to the same weights with a pool
//! as with a large arena, or fails and gives the cause. `overflow` names each cause, and
//! `docs/memory.md` shows its output.
//!
//! `cargo test` and `cargo nextest run` build the examples first.

#![forbid(unsafe_code)]

mod pool;

use crate::support::example::{SMALL, run, text, train};
use crate::support::on_each_device;

on_each_device! {
    /// An overflow only changes the places of tensors.
    fn pool_and_large_arena_train_alike(device: &Device) {
        let (roomy_screen, roomy) = train(device, &["--arena-mib", "1024", "--capture", "off"]);
        let (pooled_screen, pooled) = train(device, &["--arena-mib", "16", "--overflow-mib", "4096", "--capture", "off"]);
        assert_eq!(roomy["weights_sha256"].as_str().map(str::len), Some(64));
        assert_eq!(roomy["weights_sha256"], pooled["weights_sha256"]);
        assert_eq!(roomy["arena"]["allocations"], pooled["arena"]["allocations"]);

        assert_eq!(roomy["arena"]["overflow_allocations"], 0);
        assert_eq!(pooled["arena"]["capacity_bytes"], 16 << 20);
        let overflow = &pooled["arena"]["report"]["overflow"];
        assert!(overflow["allocations"].as_u64().unwrap() > 0, "{overflow}");
        assert_eq!(overflow["allocations"], pooled["arena"]["overflow_allocations"]);
        assert_eq!((&overflow["live_blocks"], &overflow["refusals"], &overflow["timeouts"]), (&0.into(), &0.into(), &0.into()));

        assert!(!roomy_screen.contains("overflow:"), "{roomy_screen}");
        assert!(pooled_screen.contains(&format!("overflow: {} tensors", overflow["allocations"])), "{pooled_screen}");
    }

    /// Training cannot continue silently without a pool or with one that is too small.
    fn training_without_memory_gives_advice(device: &Device) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("out");
        for (pool, advice) in [("0", "advice: size the arena"), ("1", "the overflow pool's cap is 1048576 bytes")] {
            let memory = ["--arena-mib", "16", "--overflow-mib", pool, "--capture", "off", "--out", out.to_str().unwrap()];
            let output = run("crossasset", device, &[&SMALL[..], &memory].concat());
            let errors = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{errors}");
            for words in ["cause: WorkingSetLargerThanArena", advice, "of 16.0 MiB", "examples/crossasset/model.rs:"] {
                assert!(errors.contains(words), "\"{words}\" is not in: {errors}");
            }
            assert!(!out.join("report.json").exists(), "a run that failed wrote a report");
        }
    }

    fn example_names_each_cause(device: &Device) {
        let output = run("overflow", device, &[]);
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{screen}{errors}");
        for cause in ["RequestLargerThanArena", "NeverReset", "WorkingSetLargerThanArena"] {
            for place in ["cause: ", "cause="] {
                assert!(screen.contains(&format!("{place}{cause}")), "{place}{cause} is not in: {screen}");
            }
        }
        assert!(screen.ends_with("Each cause was named correctly.\n"), "{screen}");
        let printed: Vec<String> = screen.lines().filter_map(constant).collect();
        for line in shown_in_the_guide() {
            assert!(printed.contains(&line), "docs/memory.md shows \"{line}\", which is not in: {screen}");
        }
    }
}

/// Returns the example's runs from the guide: the blocks that begin with a run's number.
fn shown_in_the_guide() -> Vec<String> {
    let guide = include_str!("../../docs/memory.md");
    let blocks = guide.split("```text\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(rest));
    let runs = blocks.filter(|block| block.starts_with(|first: char| first.is_ascii_digit()));
    let lines: Vec<String> =
        runs.filter(|run| run[1..].starts_with(". ")).flat_map(str::lines).filter_map(constant).collect();
    assert!(lines.len() > 30, "docs/memory.md shows too little of the example: {lines:?}");
    lines
}

/// Returns a line without its variable parts: times, the machine's memory, line numbers.
fn constant(line: &str) -> Option<String> {
    if line.is_empty() || line.contains(" ms waited") || line.contains("  memory: ") {
        return None;
    }
    let mut parts = line.split(".rs:");
    let mut constant = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        constant += ".rs";
        constant += part.trim_start_matches(|number: char| number.is_ascii_digit() || number == ':');
    }
    Some(constant)
}
