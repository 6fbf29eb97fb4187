//! Descriptions for other systems: the flake for nix, and a test of the workflow for GitHub.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::tools::{Outcome, Tools, output, read, refused, run, stdout, write};

const SYSTEMS: [&str; 2] = ["aarch64-linux", "x86_64-linux"];
const OUTPUTS: [(&str, &[&str]); 4] = [
    ("packages", &["default", "docs", "ptx", "ptx-rust-cuda"]),
    ("apps", &["crossasset", "stepscope"]),
    ("devShells", &["default", "rust-cuda"]),
    ("checks", &["lint", "nextest", "ptx"]),
];
/// Planted errors: what they are, a part of the message, the file, and the text that replaces
/// another.
const FLAKE_PLANTS: [[&str; 5]; 6] = [
    ["a syntax error", "syntax error", "nix/default.nix", "inherit ptx;", "inherit ptx"],
    ["a package that is not there", "cargo-nextst", "nix/default.nix", "pkgs.cargo-nextest", "pkgs.cargo-nextst"],
    ["an app without a program", "program", "nix/default.nix", "    program = ", "    programme = "],
    ["a missing output", "instead of", "nix/default.nix", "    docs = cargo", "    doc = cargo"],
    ["a system less", "x86_64-linux", "flake.nix", "\"aarch64-linux\" \"x86_64-linux\"", "\"x86_64-linux\""],
    ["two revisions of rust-cuda", "revisions", "device/rust-cuda/Cargo.toml", "rev = \"103a", "rev = \"103b"],
];

/// Evaluates every output of flake.nix for both systems, with Debian's nix, against the small
/// stand-ins in `nix/stand-ins`, which have only the names that the flake uses. rust-cuda must have
/// one revision in all files.
///
/// It builds nothing and fetches no input, so it does not show that nixpkgs, crane, rust-overlay
/// and rust-cuda provide these names.
pub(crate) fn flake(_: &[String]) -> Outcome {
    let tools = Tools::install(&["nix_package"])?;
    let sources = tools.target().join("flake/sources");
    for [what, reason, file, old, new] in FLAKE_PLANTS {
        copy_flake(&tools, &sources)?;
        let text = read(sources.join(file))?;
        if !text.contains(old) {
            return Err(format!("{what}: nothing was planted in {file}"));
        }
        write(sources.join(file), text.replacen(old, new, 1))?;
        refused(what, reason, evaluate(&tools, &sources))?;
    }
    copy_flake(&tools, &sources)?;
    println!("{} outputs evaluated against stand-ins", evaluate(&tools, &sources)?);
    Ok(())
}

/// Copies the flake's own files, without the stand-ins.
fn copy_flake(tools: &Tools, folder: &Path) -> Outcome {
    let files = "flake.nix flake.lock nix/*.nix Cargo.toml Cargo.lock device/rust-cuda/{Cargo.toml,Cargo.lock,rust-toolchain.toml}";
    let script = format!("rm -rf \"$1\"; mkdir -p \"$1\"; cp --parents -t \"$1\" {files}");
    run(tools.command("bash -euo pipefail -c").args([&script, "cp"]).arg(folder))
}

/// Returns the number of outputs.
fn evaluate(tools: &Tools, folder: &Path) -> Outcome<usize> {
    let root = Tools::bare()?;
    let inputs = ["nixpkgs", "rust-overlay", "crane", "rust-cuda"];
    let inputs = inputs.map(|name| {
        format!("--override-input {name} path:{}", root.folder().join("nix/stand-ins").join(name).display())
    });
    let nix = |line: &str| {
        let mut command =
            tools.with("HOME", tools.target().join("flake/home")).command("nix --extra-experimental-features");
        command.arg("nix-command flakes").arg("--store").arg(tools.target().join("flake/store"));
        command
            .args(line.split(' '))
            .args(inputs.iter().flat_map(|input| input.split(' ')))
            .arg("--no-write-lock-file");
        command
    };
    let flake = format!("path:{}", folder.display());
    output(&mut nix(&format!("flake check {flake} --no-build")))?;
    let (mut faults, mut count) = (Vec::new(), 0);
    for (kind, names) in OUTPUTS {
        let apply = "builtins.mapAttrs (_: builtins.mapAttrs (_: output: output.drvPath or output.program))";
        let mut command = nix(&format!("eval {flake}#{kind} --json"));
        let outputs: BTreeMap<String, BTreeMap<String, Value>> =
            serde_json::from_str(&stdout(command.args(["--apply", apply]))?)
                .map_err(|error| format!("nix eval: {error}"))?;
        let systems: Vec<&String> = outputs.keys().collect();
        if systems != SYSTEMS {
            faults.push(format!("{kind}: for {systems:?} instead of {SYSTEMS:?}"));
        }
        for (system, outputs) in &outputs {
            let found: Vec<&String> = outputs.keys().collect();
            if found != names {
                faults.push(format!("{kind}.{system}: {found:?} instead of {names:?}"));
            }
            count += found.len();
        }
    }
    let mut revisions = BTreeSet::new();
    for (file, marks) in [
        ("flake.nix", &["Rust-CUDA/"][..]),
        ("device/rust-cuda/Cargo.toml", &["rev = \""]),
        ("device/rust-cuda/Cargo.lock", &["Rust-CUDA?rev=", "#"]),
    ] {
        let text = read(folder.join(file))?;
        for line in text.lines().filter(|line| file != "device/rust-cuda/Cargo.lock" || line.contains("Rust-CUDA?rev="))
        {
            let found = marks.iter().flat_map(|mark| line.split(mark).skip(1)).filter_map(|rest| rest.get(..40));
            revisions
                .extend(found.filter(|text| text.chars().all(|digit| digit.is_ascii_hexdigit())).map(str::to_owned));
        }
    }
    if revisions.len() != 1 {
        faults.push(format!(
            "flake.nix, Cargo.toml and Cargo.lock of device/rust-cuda pin other revisions: {revisions:?}"
        ));
    }
    if faults.is_empty() { Ok(count) } else { Err(faults.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::STEPS;
    use crate::all::FULL;

    /// Returns an error for each command of a workflow that is neither a check nor a command in a
    /// fence of a page, and for each check of `ci/all` that it does not run.
    fn nothing_own(workflow: &str, pages: &str) -> Outcome {
        let fences = pages.split("```sh").skip(1).filter_map(|part| part.split("```").next());
        let known: BTreeSet<&str> =
            fences.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or_default().trim()).collect();
        let matrix = workflow.lines().filter_map(|line| line.trim().strip_prefix("check: [")?.strip_suffix(']'));
        let checks: Vec<&str> = matrix.flat_map(|line| line.split(", ")).collect();
        let commands = workflow.lines().filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("run: "));
        let (mut faults, mut called) = (Vec::new(), BTreeSet::new());
        for command in commands {
            let checks = if command.contains("${{ matrix.check }}") { &checks[..] } else { &[""] };
            for check in checks {
                let command = command.replace("${{ matrix.check }}", check);
                let step = command.strip_prefix("cargo xtask ").or(command.strip_prefix("ci/")).unwrap_or_default();
                match STEPS.iter().find(|known| known.0 == step.split(' ').next().unwrap_or_default()) {
                    Some(step) => _ = called.insert(step.0),
                    None if known.contains(command.as_str()) => (),
                    None => faults.push(format!("neither a check nor a command of a page: {command}")),
                }
            }
        }
        faults.extend(
            FULL.iter()
                .filter(|step| !called.contains(*step))
                .map(|step| format!("no workflow runs {step}, of ci/all")),
        );
        if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
    }

    #[test]
    fn workflows_run_all_checks_and_no_more() {
        let checks = FULL.join(", ");
        let good =
            format!("check: [{checks}]\n  - run: cargo xtask ${{{{ matrix.check }}}}\n  - run: cargo run # so\n");
        let pages = "```sh\ncargo run # so\n```\n";
        let good = good.replace(" # so", "");
        assert_eq!(nothing_own(&good, pages), Ok(()));
        for (old, new) in
            [("cargo run", "cargo walk"), ("cargo xtask $", "cargo xtask s$"), (" ptx,", ""), ("loom, ", "")]
        {
            assert!(nothing_own(&good.replace(old, new), pages).is_err(), "passed: {new}");
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pages = ["README.md", "CONTRIBUTING.md", "docs/testing.md", "docs/platforms.md"]
            .map(|page| read(root.join(page)).unwrap());
        let workflow = read(root.join(".github/workflows/ci.yml")).unwrap();
        assert_eq!(nothing_own(&workflow, &pages.concat()), Ok(()));
    }
}
