//! Programs that the checks run, and what `ci/setup` installs for them.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// The result of a check: an error has the text to print.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// All features of the package. The same everywhere, so that nothing is built twice.
pub(crate) const EVERY_FEATURE: &str = "check,cuda,dlpack,encrypted,group,ndarray,nvtx,progress";

/// Prints the title of a part of a check.
pub(crate) fn say(title: impl Display) {
    println!("\n=== {title}");
}

/// Turns an error of the system into one that names the path.
pub(crate) fn at<T, E: Display>(path: impl AsRef<Path>, result: Result<T, E>) -> Outcome<T> {
    result.map_err(|error| format!("{}: {error}", path.as_ref().display()))
}

/// Reads a text file.
pub(crate) fn read(path: impl AsRef<Path>) -> Outcome<String> {
    at(&path, fs::read_to_string(&path))
}

/// Writes a text file, and creates its folder.
pub(crate) fn write(path: impl AsRef<Path>, text: impl AsRef<[u8]>) -> Outcome {
    if let Some(folder) = path.as_ref().parent() {
        at(folder, fs::create_dir_all(folder))?;
    }
    at(&path, fs::write(&path, text))
}

/// Creates a temporary folder, which is removed at the end of the scope.
pub(crate) fn scratch() -> Outcome<TempDir> {
    tempfile::tempdir().map_err(|error| format!("cannot create a temporary folder: {error}"))
}

/// Runs a command; its output is printed as it comes.
pub(crate) fn run(command: &mut Command) -> Outcome {
    let status = command.status();
    let status = at(command.get_program(), status)?;
    if status.success() { Ok(()) } else { Err(format!("failed with {status}: {}", words(command))) }
}

/// Runs a command and returns all that it printed; an error contains that too.
pub(crate) fn output(command: &mut Command) -> Outcome<String> {
    let (standard, errors) = printed(command)?;
    Ok(standard + &errors)
}

/// Runs a command and returns its standard output; an error contains its messages.
pub(crate) fn stdout(command: &mut Command) -> Outcome<String> {
    Ok(printed(command)?.0)
}

/// Runs a command and returns its standard output and its messages; an error contains both.
fn printed(command: &mut Command) -> Outcome<(String, String)> {
    let done = command.stdin(Stdio::null()).output();
    let done = at(command.get_program(), done)?;
    let [standard, errors] = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    if done.status.success() {
        Ok((standard, errors))
    } else {
        Err(format!("{standard}{errors}failed with {}: {}", done.status, words(command)))
    }
}

fn words(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Fails unless a check refused a planted violation, with a message that contains `reason`.
pub(crate) fn refused<T>(what: &str, reason: &str, outcome: Outcome<T>) -> Outcome {
    match outcome {
        Ok(_) => Err(format!("passed a planted violation: {what}")),
        Err(message) if !message.contains(reason) => Err(format!("{message}\nrefused for another reason: {what}")),
        Err(_) => {
            println!("refused: {what}");
            Ok(())
        }
    }
}

/// Returns true if a short form of a check is asked for.
pub(crate) fn is_quick(arguments: &[String]) -> bool {
    arguments.iter().any(|argument| argument == "--quick")
}

/// Returns the named parts, or all without a name; an unknown name is an error.
pub(crate) fn selected<'p, F>(parts: &'p [(&str, F)], names: &[String]) -> Outcome<Vec<&'p (&'p str, F)>> {
    if let Some(name) = names.iter().find(|name| !parts.iter().any(|part| part.0 == *name)) {
        let known: Vec<&str> = parts.iter().map(|part| part.0).collect();
        return Err(format!("no part `{name}`; there are {}", known.join(", ")));
    }
    Ok(parts.iter().filter(|part| names.is_empty() || names.iter().any(|name| name == part.0)).collect())
}

/// Writes a package with this source to a folder; `manifest` follows its name and edition.
pub(crate) fn plant(folder: &Path, name: &str, manifest: &str, source: &str) -> Outcome {
    let head =
        format!("[package]\nname = \"{name}\"\nedition = \"2024\"\nlicense = \"MIT\"\n{manifest}\n[workspace]\n");
    write(folder.join("Cargo.toml"), head)?;
    write(folder.join("src/lib.rs"), source)
}

/// The environment in which the checks run programs.
#[derive(Clone)]
pub(crate) struct Tools {
    variables: Vec<(String, String)>,
    folder: PathBuf,
}

impl Tools {
    /// Calls functions of `ci/setup`, which install what is missing, and keeps the variables that
    /// they set.
    pub(crate) fn install(functions: &[&str]) -> Outcome<Self> {
        let calls: String = functions.iter().map(|function| format!("{function} >&2; ")).collect();
        let script = format!("set -a; source ci/setup; {calls} env -0");
        let before: Vec<(String, String)> = std::env::vars().collect();
        let done = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &script, "ci/setup"])
            .env("every_feature", EVERY_FEATURE)
            .stderr(Stdio::inherit())
            .output();
        let done = at("bash", done)?;
        if !done.status.success() {
            return Err(format!("ci/setup could not install: {}", functions.join(", ")));
        }
        let printed = String::from_utf8_lossy(&done.stdout);
        let variables = printed.split('\0').filter_map(|entry| entry.split_once('='));
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let variables = variables.filter(|variable| variable.0 != "_" && !before.contains(variable)).collect();
        Ok(Self { variables, folder: at(".", std::env::current_dir())? })
    }

    /// Returns the environment of this process.
    pub(crate) fn bare() -> Outcome<Self> {
        Ok(Self { variables: Vec::new(), folder: at(".", std::env::current_dir())? })
    }

    /// Copies the files that git tracks or would track, without build output, to a new folder.
    pub(crate) fn copy_sources(&self, folder: &Path) -> Outcome {
        run(self
            .command("bash -euo pipefail -c")
            .arg("source ci/setup; copy_sources \"$1\"")
            .arg("ci/setup")
            .arg(folder))
    }

    /// Returns a variable that a function of `ci/setup` set.
    pub(crate) fn get(&self, name: &str) -> Outcome<&str> {
        let found = self.variables.iter().rev().find(|variable| variable.0 == name);
        found.map(|(_, value)| value.as_str()).ok_or_else(|| format!("ci/setup sets no {name}"))
    }

    /// Returns cargo's target folder.
    pub(crate) fn target(&self) -> PathBuf {
        PathBuf::from(self.get("target").unwrap_or("target"))
    }

    /// Returns the folder in which commands run.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns these tools with another variable.
    pub(crate) fn with(&self, name: &str, value: impl AsRef<Path>) -> Self {
        let mut more = self.clone();
        more.variables.push((name.to_owned(), value.as_ref().display().to_string()));
        more
    }

    /// Returns these tools for commands in another folder.
    pub(crate) fn within(&self, folder: impl AsRef<Path>) -> Self {
        Self { variables: self.variables.clone(), folder: folder.as_ref().to_owned() }
    }

    /// Returns these tools for a planted package, which is built within its folder.
    pub(crate) fn for_planted(&self, folder: &Path) -> Self {
        self.within(folder).with("CARGO_TARGET_DIR", folder.join("target"))
    }

    /// Returns the command of a line of words.
    pub(crate) fn command(&self, line: impl AsRef<str>) -> Command {
        let mut words = line.as_ref().split_whitespace();
        let mut command = Command::new(words.next().expect("a command has a program"));
        command.args(words).current_dir(&self.folder);
        // ci/setup's own variables are in lower case.
        let exported = self.variables.iter().filter(|(name, _)| !name.contains(char::is_lowercase));
        command.envs(exported.map(|(name, value)| (name, value)));
        command
    }

    /// Runs a line of words; see [`run`].
    pub(crate) fn run(&self, line: impl AsRef<str>) -> Outcome {
        run(&mut self.command(line))
    }

    /// Runs a line of words quietly; see [`output`].
    pub(crate) fn output(&self, line: impl AsRef<str>) -> Outcome<String> {
        output(&mut self.command(line))
    }
}
