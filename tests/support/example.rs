//! Runs the built examples and the program `stepscope`; `cargo nextest run --workspace` builds them
//! first.
//!
//! Invariant: no settings of the environment reach them.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};
use stepscope::Device;

/// A size that needs 28 MiB in a step.
pub(crate) const SMALL: [&str; 6] = ["--limit", "100", "--batch", "32", "--folds", "1"];

/// Runs [`command`].
pub(crate) fn run(example: &str, device: &Device, arguments: &[&str]) -> Output {
    command(example, device, arguments).output().expect("the example starts")
}

/// The subcommands of `stepscope`.
const SUBCOMMANDS: [&str; 6] = ["train", "finetune", "generate", "doctor", "predict", "check"];

/// Returns a command for a subcommand of `stepscope`, or else for the example of this name. Both
/// are next to this test's folder.
pub(crate) fn program(name: &str) -> Command {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let is_subcommand = SUBCOMMANDS.contains(&name);
    let path = if is_subcommand { folder.join("stepscope") } else { folder.join("examples").join(name) };
    let path = PathBuf::from(format!("{}{}", path.display(), std::env::consts::EXE_SUFFIX));
    assert!(path.is_file(), "{} is missing; run: cargo build --workspace --bins --examples", path.display());
    let mut command = Command::new(path);
    command.args(is_subcommand.then_some(name));
    command
}

/// Returns a command for [`program`], with arguments, on the device's kind, without settings of the
/// environment.
pub(crate) fn command(example: &str, device: &Device, arguments: &[&str]) -> Command {
    let mut command = program(example);
    let settings =
        ["STEPSCOPE_ARENA_GB", "STEPSCOPE_CHECKED", "STEPSCOPE_SELF_TEST", "STEPSCOPE_GROUP_SECRET", "RUST_LOG"];
    let launchers = ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "PMI_RANK"];
    for variable in settings.into_iter().chain(launchers) {
        command.env_remove(variable);
    }
    command.args(["--device", &device.description().kind.to_string()]).args(arguments);
    command
}

/// Returns the screen and the report of a training run.
pub(crate) fn train(device: &Device, memory: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().to_str().expect("a path in UTF-8");
    let output = run("crossasset", device, &[&SMALL[..], memory, &["--out", out]].concat());
    let (screen, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{memory:?}: {screen}{errors}");
    let report = std::fs::read_to_string(PathBuf::from(out).join("report.json")).expect("a report");
    (screen, serde_json::from_str(&report).expect("the report is JSON"))
}

/// Returns the printed text of a program.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
