//! The file of a run: `benches/runs/DATE-GPU-GROUP.json`.

use serde::Serialize;
use serde_json::json;
use std::process::Command;
use stepscope::{Device, DeviceKind};

use super::Result;

/// Writes all of a run's `lines`, with the data needed to repeat it, and returns the file's path.
///
/// `STEPSCOPE_RUNS` overrides the folder. `STEPSCOPE_COMMIT` gives the commit if the program runs
/// without its repository.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn record(group: &str, device: &Device, lines: &impl Serialize) -> Result<String> {
    let date = output_of("date", &["-u", "+%Y-%m-%d"]).unwrap_or_else(|| "undated".into());
    let commit = std::env::var("STEPSCOPE_COMMIT").ok();
    let run = json!({
        "date": date,
        "device": device.description().name,
        "matrix_instruction": device.description().matrix_instruction().to_string(),
        "driver": output_of("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"]),
        "commit": commit.or_else(|| output_of("git", &["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])),
        "command": std::env::args().collect::<Vec<_>>(),
        "lines": lines,
    });
    let folder = std::env::var("STEPSCOPE_RUNS").unwrap_or_else(|_| "benches/runs".into());
    std::fs::create_dir_all(&folder)?;
    let description = device.description();
    let instruction = if description.capability == Some(90) && !description.has_wgmma { "-mma-sync" } else { "" };
    let path = format!("{folder}/{date}-{}-{group}{instruction}.json", short_name(device));
    stepscope::files::replace_file(&path, serde_json::to_string(&run)?.as_bytes())?;
    Ok(path)
}

/// Returns a short name, such as `h200` for "NVIDIA H200".
fn short_name(device: &Device) -> String {
    let description = device.description();
    match description.kind {
        DeviceKind::Cuda => description.name.trim_start_matches("NVIDIA ").to_lowercase().replace(' ', "-"),
        kind => kind.to_string(),
    }
}

/// Returns the output of a program, or none if it is missing or fails.
fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
