//! Formatting, prose, contracts and clippy.

use std::collections::BTreeSet;
use std::path::Path;

use crate::tools::{EVERY_FEATURE, Outcome, Tools, plant, read, refused, run, say, scratch, write};
use crate::{contracts, prose};

/// Checks formatting, the rules of prose, the reasons of contracts, and clippy with warnings
/// denied.
///
/// Clippy runs on everything with all features. `publish features` lints other combinations.
pub(crate) fn lint(_: &[String]) -> Outcome {
    let tools = Tools::install(&["component fmt rustfmt", "component clippy clippy", "cuda_stub", "no_kernels"])?;
    say("the checks refuse planted violations");
    refuse_plants(&tools)?;
    for file in ["device/clippy.toml", "clippy.toml"] {
        all_refused(&tools, file)?;
    }
    for package in ["core", "group", "train", "check", "models", "chat", "cli"] {
        let library = format!("host/{package}/src/lib.rs");
        if !read(&library)?.contains("warn(clippy::disallowed_methods)") {
            return Err(format!("{library} does not enable clippy::disallowed_methods"));
        }
    }
    say("contracts and prose");
    contracts::check(Path::new("device/src"))?;
    prose::check_all()?;
    say("format");
    tools.run("cargo fmt --all --check")?;
    files_formatted(&tools, Path::new("tests/kernels"))?;
    say("clippy");
    tools.run(format!("cargo clippy --quiet --workspace --all-targets --features {EVERY_FEATURE} -- -D warnings"))
}

/// Checks the format of a folder whose modules no file lists, which `cargo fmt` does not find.
fn files_formatted(tools: &Tools, folder: &Path) -> Outcome {
    let mut command = tools.command("rustfmt --check");
    let entries = folder.read_dir().map_err(|error| format!("{}: {error}", folder.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    run(command.args(paths.filter(|path| path.extension().is_some_and(|end| end == "rs"))))
}

fn refuse_plants(tools: &Tools) -> Outcome {
    let folder = scratch()?;
    let within = tools.for_planted(folder.path());
    for (what, source, check) in [
        ("bad formatting", "fn  f( ){}", "cargo fmt --all --check"),
        ("bad formatting of a file that none lists", "fn  f( ){}", "rustfmt --check src/lib.rs"),
        ("a clippy warning", "pub fn f(x: u32) -> u32 { return x; }", "cargo clippy --quiet -- -D warnings"),
    ] {
        plant(folder.path(), "planted", "", "//! A crate.\n")?;
        within.output(check)?;
        plant(folder.path(), "planted", "", source)?;
        refused(what, "", within.output(check))?;
    }
    Ok(())
}

/// Plants a use of each method that a clippy.toml disallows, one per line, and requires that clippy
/// refuses every line.
fn all_refused(tools: &Tools, file: &str) -> Outcome {
    let text = read(file)?;
    let is_path = |text: &&str| {
        text.contains("::") && text.chars().all(|letter| letter.is_alphanumeric() || "_:".contains(letter))
    };
    let methods: Vec<&str> = text.split('"').filter(is_path).collect();
    let uses: Vec<String> = methods.iter().zip(0..).map(|(path, number)| disallowed_use(path, number)).collect();
    let folder = scratch()?;
    plant(folder.path(), "planted", "", &uses.join("\n"))?;
    write(folder.path().join("clippy.toml"), &text)?;
    let within = tools.for_planted(folder.path());
    // Fails if the lint is denied by default.
    let (Ok(log) | Err(log)) = within.output("cargo clippy --message-format short");
    let lines = log.lines().filter(|line| line.contains("use of a disallowed method"));
    let refused: BTreeSet<_> = lines.filter_map(|line| line.strip_prefix("src/lib.rs:")?.split(':').next()).collect();
    if methods.len() < 2 || refused.len() != methods.len() {
        return Err(format!("{log}\n{} of {} methods of {file} were refused", refused.len(), methods.len()));
    }
    println!("{} methods of {file}, each refused", refused.len());
    Ok(())
}

/// Returns a function that names a method, with the generic arguments that it needs.
fn disallowed_use(path: &str, number: usize) -> String {
    let (place, name) = path.rsplit_once("::").expect("a path of a method");
    let generics = match (path, place.split("::").next()) {
        ("std::fs::write", _) => "::<&str, &str>",
        ("slice::get_unchecked" | "slice::get_unchecked_mut", _) => "::<usize>",
        (_, Some("std")) => "::<&str>",
        (_, Some("core")) => "::<u8>",
        _ => "",
    };
    let place = match place {
        "const_ptr" => "<*const u8>",
        "mut_ptr" => "<*mut u8>",
        "slice" => "<[u8]>",
        _ => place,
    };
    format!("pub fn f{number}() -> impl Sized {{ {place}::{name}{generics} }}")
}
