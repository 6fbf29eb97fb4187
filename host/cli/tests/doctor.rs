//! Runs `stepscope doctor`: every check over its fixtures, this machine, hostile facts, and
//! the report.
//!
//! A fixture `CHECK.json` is a merge patch over `well-gb10.json`, and the level that the check must
//! then have. A check without a fixture fails.

#![forbid(unsafe_code)]

#[path = "../../../tests/support/example.rs"]
#[allow(dead_code, reason = "it trains nothing")]
mod example;

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doctor/fixtures");

fn doctor(arguments: &[&str]) -> Output {
    example::program("doctor").args(arguments).output().unwrap()
}

fn fixture(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(format!("{FIXTURES}/{name}.json")).unwrap()).unwrap()
}

/// Applies a merge patch (RFC 7396).
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return *target = patch.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut target[name], value);
        }
    }
}

/// Returns the exit code and the findings on these facts, as (check, level).
fn judged(facts: &Value) -> (i32, Vec<(String, String)>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, facts.to_string()).unwrap();
    findings(&doctor(&["--json", "--facts", file.path().to_str().unwrap()]))
}

fn findings(output: &Output) -> (i32, Vec<(String, String)>) {
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let words = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let found = report["findings"].as_array().unwrap().iter();
    (output.status.code().unwrap(), found.map(|one| (words(one, "check"), words(one, "level"))).collect())
}

fn level<'f>(found: &'f [(String, String)], check: &str) -> &'f str {
    &found.iter().find(|(name, _)| name == check).unwrap_or_else(|| panic!("no check {check}")).1
}

#[test]
fn well_machines_are_well() {
    for name in ["well-gb10", "well-h200"] {
        let (code, found) = judged(&fixture(name));
        assert_eq!(code, 0, "{name}: {found:?}");
        for (check, level) in &found {
            // The recorded H200 had no second machine and no logind, and steps were not timed yet.
            let not_there = name == "well-h200" && ["network_rate", "remove_ipc"].contains(&check.as_str());
            assert_eq!(level, if not_there { "not_looked_at" } else { "well" }, "{name}: {check}");
        }
    }
}

#[test]
fn every_check_has_a_fixture() {
    let well = fixture("well-gb10");
    let (_, checks) = judged(&well);
    assert!(checks.len() >= 20);
    let mut left: BTreeSet<_> = fs::read_dir(FIXTURES).unwrap().map(|entry| entry.unwrap().path()).collect();
    left.retain(|path| !path.file_name().unwrap().to_str().unwrap().starts_with("well-"));
    for (check, _) in checks {
        assert!(left.remove(&PathBuf::from(format!("{FIXTURES}/{check}.json"))), "no fixture for {check}");
        let (overlay, mut facts) = (fixture(&check), well.clone());
        merge(&mut facts, &overlay["patch"]);
        let (code, found) = judged(&facts);
        assert_eq!(level(&found, &check), overlay["level"], "{check}");
        let stops = found.iter().any(|(_, level)| level == "stops_training");
        assert_eq!(code, i32::from(stops), "{check}");
    }
    assert!(left.is_empty(), "fixtures of no check: {left:?}");
}

/// The facts next to those of the fixture are no reason for its finding.
#[test]
fn kernels_without_hidden_memory_are_well() {
    let mut affected = fixture("well-gb10");
    merge(&mut affected, &fixture("kernel_handover")["patch"]);
    for (patch, expected) in [
        (json!({}), "warning"),
        (json!({ "kernel": "7.0.0-1021-nvidia-64k" }), "warning"),
        (json!({ "command_line": null }), "warning"),
        (json!({ "command_line": "quiet kho=on" }), "warning"),
        (json!({ "command_line": "quiet kho=off" }), "well"),
        (json!({ "kernel": "6.17.0-1014-nvidia" }), "well"),
        (json!({ "kernel": "7.0.0-14-generic" }), "well"),
        (json!({ "cma_total_bytes": 27_917_287_424_u64 }), "well"),
        (json!({ "cma_free_bytes": 0 }), "well"),
        (json!({ "cma_total_bytes": null, "cma_free_bytes": null }), "not_looked_at"),
        (json!({ "kernel": null }), "not_looked_at"),
    ] {
        let mut facts = affected.clone();
        merge(&mut facts["host"], &patch);
        assert_eq!(level(&judged(&facts).1, "kernel_handover"), expected, "{patch}");
    }
}

/// Only error 100 of `cuInit`, next to an NVML that answers, is a dead compute engine.
#[test]
fn missing_devices_are_told_apart() {
    let mut dead = fixture("well-gb10");
    merge(&mut dead, &fixture("gpu_found")["patch"]);
    let printed = |facts: &Value| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, facts.to_string()).unwrap();
        let output = doctor(&["--facts", file.path().to_str().unwrap()]);
        String::from_utf8(output.stdout).unwrap()
    };
    let words = printed(&dead);
    assert!(words.contains("compute engine is dead") && words.contains("do: reboot"), "{words}");
    assert!(!words.contains("is the NVIDIA driver installed"), "{words}");
    dead["gpu"]["visible_devices"] = json!("");
    let words = printed(&dead);
    assert!(words.contains("unset CUDA_VISIBLE_DEVICES") && !words.contains("engine is dead"), "{words}");
    for (patch, found, opens) in [
        (json!({ "load": { "error": "cuInit: CUDA_ERROR_NO_DEVICE" } }), "stops_training", "not_looked_at"),
        (json!({ "load": { "error": "`cuInit` failed: SystemNotReady" } }), "not_looked_at", "stops_training"),
        (json!({ "load": { "error": null, "opened": true } }), "well", "well"),
        (json!({ "gpu": { "name": null, "driver": null, "nvml_error": "no" } }), "not_looked_at", "stops_training"),
    ] {
        let mut facts = dead.clone();
        merge(&mut facts, &patch);
        let (_, all) = judged(&facts);
        assert_eq!((level(&all, "gpu_found"), level(&all, "gpu_opens")), (found, opens), "{patch}");
    }
}

#[test]
fn rates_are_judged_on_gb10_only() {
    let mut facts = fixture("well-gb10");
    for (rate, expected) in [(186.14, "warning"), (186.16, "well")] {
        facts["load"]["copy_gb_per_s"] = json!(rate);
        assert_eq!(level(&judged(&facts).1, "copy_rate"), expected, "{rate}");
    }
    let mut facts = fixture("well-h200");
    facts["load"]["copy_gb_per_s"] = json!(1.0);
    assert_eq!(level(&judged(&facts).1, "copy_rate"), "well");
}

/// A GPU unknown to `predict` has no expected step time.
#[test]
fn step_time_is_compared_with_prediction() {
    let mut facts = fixture("well-gb10");
    for (step, expected) in [(4.22, "warning"), (4.20, "well"), (1.0, "well")] {
        facts["load"]["step_ms"] = json!(step);
        assert_eq!(level(&judged(&facts).1, "step_time"), expected, "{step}");
    }
    facts["load"]["predicted_step_ms"] = Value::Null;
    facts["load"]["step_ms"] = json!(1000.0);
    assert_eq!(level(&judged(&facts).1, "step_time"), "well");
}

#[test]
fn this_machine_is_checked_quickly() {
    let start = Instant::now();
    let (code, found) = findings(&doctor(&["--json"]));
    assert!(start.elapsed() < Duration::from_secs(60));
    let stops = found.iter().any(|(_, level)| level == "stops_training");
    assert_eq!(code, i32::from(stops), "{found:?}");
    if !Path::new("/dev/nvidiactl").exists() && !Path::new("/proc/driver/nvidia").exists() {
        for check in ["gpu_driver", "copy_rate", "bf16_rate", "step_time", "same_bits", "clock", "throttling"] {
            assert_eq!(level(&found, check), "not_looked_at", "{check}");
        }
    }
}

#[test]
fn missing_or_absurd_facts_are_tolerated() {
    let (code, found) = judged(&json!({}));
    assert_eq!(code, 0, "{found:?}");
    let well: Vec<_> = found.iter().filter(|(_, level)| level == "well").map(|(check, _)| check.as_str()).collect();
    assert_eq!(well, ["cgroup"], "unknown facts must not be reported as well, but a missing cgroup limit is");
    let huge = json!(u64::MAX);
    let mut facts = fixture("well-gb10");
    for name in ["mem_available_bytes", "dirty_bytes", "swap_total_bytes", "swap_free_bytes"] {
        facts["host"][name] = huge.clone();
    }
    facts["host"]["cgroup"] = json!({ "version": 2, "limit_bytes": huge, "used_bytes": huge });
    facts["load"]["copy_gb_per_s"] = json!(-1e300);
    let (code, found) = judged(&facts);
    assert_eq!((code, level(&found, "memory_figures"), level(&found, "copy_rate")), (1, "warning", "warning"));
    let file = tempfile::NamedTempFile::new().unwrap();
    for text in ["", "{", "[1]", r#"{"host": 3}"#, r#"{"host": {"user_id": -1}}"#] {
        fs::write(&file, text).unwrap();
        let output = doctor(&["--facts", file.path().to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{text}");
    }
    assert_eq!(doctor(&["--facts", "/nowhere"]).status.code(), Some(2));
}

#[test]
fn report_is_complete_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(path("run")).unwrap();
    fs::write(path("run/report.json"), "{}").unwrap();
    let facts = format!("{FIXTURES}/well-gb10.json");
    let report = path("report.tar.gz");
    let output = doctor(&["--facts", &facts, "--report", &report, "--add", &path("run")]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let mut tar = tar::Archive::new(GzDecoder::new(fs::File::open(&report).unwrap()));
    let names = tar.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string());
    let names: BTreeSet<_> = names.map(|name| name.trim_end_matches('/').to_owned()).collect();
    let expected = ["added/0-run", "added/0-run/report.json", "doctor.json", "doctor.txt", "meminfo.txt"];
    assert_eq!(names, expected.map(String::from).into());

    for (report, add) in [("/nowhere/report.tar.gz", "run"), (&path("other.tar.gz"), "none")] {
        let output = doctor(&["--facts", &facts, "--report", report, "--add", &path(add)]);
        assert_eq!(output.status.code(), Some(1), "{report} {add}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{report} {add}");
        assert!(!Path::new(report).exists(), "a failed report must leave no file");
    }
}
