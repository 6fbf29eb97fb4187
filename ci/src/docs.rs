//! The documentation: rustdoc, the rules of [`crate::pages`], and the commands of the pages.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::all::FULL;
use crate::pages;
use crate::tools::{EVERY_FEATURE, Outcome, Tools, at, is_quick, output, plant, read, refused, say, scratch, write};

const LIMIT_SECONDS: u64 = 300;
/// The variable that names cargo for [`cargo`].
const CARGO: &str = "STEPSCOPE_DOCS_CARGO";

/// Checks that rustdoc documents everything without warnings, that every path, link and program of
/// the pages exists, the figures of docs/performance.md, and that every command that needs no GPU
/// runs. `--quick` skips the commands.
pub(crate) fn docs(arguments: &[String]) -> Outcome {
    let tools = Tools::install(&["library_tools"])?;
    let folder = scratch()?;
    say("the checks refuse planted violations");
    tools.run("python3 benches/tables.py self-test")?;
    refuse_plants(&tools, folder.path())?;

    say("rustdoc");
    documented(&tools, &format!("--workspace --features {EVERY_FEATURE}"))?;
    say("pages");
    let tracked = tools.output("git ls-files")?;
    let files: Vec<String> = tracked.lines().map(str::to_owned).filter(|path| Path::new(path).is_file()).collect();
    let is_in = |path: &&String, folder: &str| path.ends_with(".md") && path.starts_with(folder);
    let all: Vec<String> = files.iter().filter(|path| is_in(path, "")).cloned().collect();
    pages::check(Path::new("."), &all)?;
    println!("{} pages", all.len());
    let texts = files.iter().filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?)));
    pages::check_adding(&texts.collect::<BTreeMap<_, _>>())?;
    tools.run("python3 benches/tables.py docs/performance.md --check")?;
    if is_quick(arguments) {
        return Ok(());
    }
    // The commands of notes are not run.
    let run = files.iter().filter(|path| *path == "README.md" || is_in(path, "docs/") && !is_in(path, "docs/lab/"));
    let run: Vec<String> = run.cloned().collect();
    say("building what the commands run");
    let texts = run.iter().map(read).collect::<Outcome<Vec<_>>>()?.concat();
    let tests = texts.split("--test ").skip(1).filter_map(|rest| rest.split_whitespace().next());
    let tests: BTreeSet<&str> = tests.filter(|name| Path::new(&format!("tests/{name}")).exists()).collect();
    tools.run(format!("cargo build --quiet --features {EVERY_FEATURE} --bins --examples"))?;
    let tests: String = tests.iter().map(|name| format!("--test {name} ")).collect();
    tools.run(format!("cargo test --quiet --features {EVERY_FEATURE} --no-run {tests}"))?;
    say("commands");
    run_commands(&tools, folder.path(), &run)
}

fn documented(tools: &Tools, arguments: &str) -> Outcome {
    let tools = tools.with("RUSTDOCFLAGS", "-D warnings -D missing_docs");
    tools.output(format!("cargo doc --quiet --no-deps {arguments}")).map(|_| ())
}

fn refuse_plants(tools: &Tools, folder: &Path) -> Outcome {
    let within = tools.for_planted(folder);
    for (what, reason, source) in [
        ("", "", "//! A crate.\n/// One.\npub fn one() {}\n"),
        ("a function without documentation", "missing documentation", "//! A crate.\npub fn one() {}\n"),
        ("a broken link in documentation", "unresolved link", "//! See [`Nothing`].\n"),
    ] {
        plant(folder, "planted", "", source)?;
        let outcome = documented(&within, "");
        if what.is_empty() { outcome? } else { refused(what, reason, outcome)? }
    }
    let page = folder.join("page.md");
    let runs = |text: &str| {
        write(&page, text)?;
        run_commands(tools, folder, &[page.display().to_string()])
    };
    runs("```sh\ncargo --version\n! false\n```\n")?;
    refused("a command that fails", "false | true", runs("```sh\ncargo --version\nfalse | true\n```\n"))?;
    refused("pages without commands", "no commands", runs("Text.\n"))
}

/// Runs each command of the pages once, in order; fails at the first failure.
///
/// Commands run as written, but by [`cargo`].
fn run_commands(tools: &Tools, folder: &Path, pages: &[String]) -> Outcome {
    let shim = folder.join("bin/cargo");
    at(&shim, std::fs::create_dir_all(folder.join("bin")))?;
    // Fails if it is not there.
    let _ = std::fs::remove_file(&shim);
    at(&shim, symlink(at(".", std::env::current_exe())?, &shim))?;
    let paths = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let which = tools.output("which cargo")?;
    let tools = tools.with(CARGO, which.trim()).with("PATH", paths);
    let mut seen = BTreeSet::new();
    for page in pages {
        for (line, command) in pages::commands(&read(page)?) {
            let words: Vec<&str> = command.split(" #").next().unwrap_or_default().split_whitespace().collect();
            if !seen.insert(words.join(" ")) {
                continue;
            }
            if is_run_elsewhere(&words) {
                println!("run by another check: {command}");
                continue;
            }
            let started = Instant::now();
            let mut shell = tools.command(format!("timeout {LIMIT_SECONDS} bash -euo pipefail -c"));
            output(shell.arg(&command)).map_err(|error| format!("{error}\n{page}:{line}: failed: {command}"))?;
            println!("{:4} s  {command}", started.elapsed().as_secs());
        }
    }
    if seen.is_empty() { Err("no commands".to_owned()) } else { Ok(()) }
}

/// Returns true for a check that `ci/all` runs, and for `ci/all`.
fn is_run_elsewhere(words: &[&str]) -> bool {
    let name = match words {
        ["cargo", "xtask", name, ..] => name,
        [script, ..] => script.trim_start_matches('.').strip_prefix("ci/").unwrap_or_default(),
        [] => "",
    };
    ["all", "run"].contains(&name) || FULL.contains(&name)
}

/// Returns the arguments with which the cargo of the pages' commands runs cargo.
///
/// Without `--release` and with all features if the command names none, it uses what `ci/test` has
/// built. Language models and the vision transformer train for minutes, so they train less. Results
/// of an earlier run may be replaced.
fn shortened(arguments: &[String]) -> Vec<String> {
    let end = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
    let (ours, theirs) = (&arguments[..end], arguments.get(end + 1..).unwrap_or_default());
    let has = |list: &[String], word: &str| list.iter().any(|argument| argument == word);
    let mut all: Vec<String> = ours.iter().filter(|argument| *argument != "--release").cloned().collect();
    let builds =
        ["run", "test", "build", "nextest"].iter().any(|name| arguments.first().is_some_and(|first| first == name));
    if builds && !has(ours, "--features") {
        all.extend(["--features".to_owned(), EVERY_FEATURE.to_owned()]);
    }
    let mut more: Vec<&str> = Vec::new();
    let is_run = has(ours, "run") && !has(ours, "nextest");
    let trains = theirs.first().filter(|_| is_run && !has(ours, "--example")).map_or("", String::as_str);
    if trains == "train" {
        more.extend(["--updates", "5", "--sample-tokens", "10"]);
    }
    if is_run && has(ours, "vit") {
        more.extend(["--epochs", "1"]);
    }
    let stores = ["train", "finetune"].contains(&trains) || is_run && has(ours, "crossasset");
    if stores && !has(theirs, "--resume") && !has(theirs, "--overwrite") {
        more.push("--overwrite");
    }
    if end < arguments.len() || !more.is_empty() {
        all.push("--".to_owned());
    }
    all.extend(theirs.iter().cloned().chain(more.into_iter().map(str::to_owned)));
    all
}

/// Runs cargo with [`shortened`] arguments; returns only if that fails.
pub(crate) fn cargo(arguments: &[String]) -> String {
    let program = std::env::var_os(CARGO).unwrap_or("cargo".into());
    format!("cargo: {}", Command::new(program).args(shortened(arguments)).exec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_reuse_builds_and_train_less() {
        let short = |line: &str| shortened(&line.split(' ').map(str::to_owned).collect::<Vec<_>>()).join(" ");
        let every = format!("--features {EVERY_FEATURE}");
        assert_eq!(
            short("run --release -- train"),
            format!("run {every} -- train --updates 5 --sample-tokens 10 --overwrite")
        );
        assert_eq!(short("run --release --features cuda -- check --list"), "run --features cuda -- check --list");
        assert_eq!(short("run --example vit"), format!("run --example vit {every} -- --epochs 1"));
        assert_eq!(
            short("run --example crossasset -- --resume a"),
            format!("run --example crossasset {every} -- --resume a")
        );
        assert_eq!(short("nextest run --test kernels"), format!("nextest run --test kernels {every}"));
        assert_eq!(short("--version"), "--version");
    }
}
