//! The default text, which every machine that has built this project has: the sources of its locked
//! dependencies in cargo's registry.
//!
//! Invariant: the same `Cargo.lock` gives the same files in the same order on every machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::train::bad_input::{Outcome, bad};

/// The lock file that this program was built with.
const LOCK: &str = include_str!("../../../../Cargo.lock");
/// Packages that every build of the library compiles, on every platform and with any features:
/// about 4 MB of Rust.
const PACKAGES: [&str; 13] = [
    "bytemuck",
    "half",
    "libm",
    "memmap2",
    "rayon",
    "rayon-core",
    "safetensors",
    "serde",
    "serde_core",
    "serde_json",
    "sha2",
    "tempfile",
    "thiserror",
];

/// Returns the Rust files of [`PACKAGES`], in the order of the lock file and then of their paths.
pub(crate) fn sources() -> Outcome<Vec<PathBuf>> {
    let folder = registry();
    let mut files = Vec::new();
    for package in locked(LOCK) {
        let found = fs::read_dir(&folder).into_iter().flatten().flatten().map(|index| index.path().join(&package));
        let mut folders: Vec<PathBuf> = found.filter(|folder| folder.is_dir()).collect();
        folders.sort_unstable();
        let Some(package_folder) = folders.into_iter().next() else {
            let reason = format!("has no sources of {package}: run `cargo fetch`, or give text files with --data");
            return Err(bad(folder.display(), reason));
        };
        rust_files(&package_folder, &mut files)?;
    }
    Ok(files)
}

/// Returns `NAME-VERSION` of those packages in a lock file that are among [`PACKAGES`].
fn locked(lock: &str) -> Vec<String> {
    let value = |line: &str, key: &str| Some(line.strip_prefix(key)?.trim_matches([' ', '=', '"']).to_owned());
    let mut packages = Vec::new();
    for entry in lock.split("[[package]]").skip(1) {
        let find = |key: &str| entry.lines().find_map(|line| value(line, key)).unwrap_or_default();
        let name = find("name");
        if PACKAGES.contains(&name.as_str()) {
            packages.push(format!("{name}-{}", find("version")));
        }
    }
    packages
}

/// Returns the folder in which cargo unpacks fetched packages.
fn registry() -> PathBuf {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    home.or_else(|| env::home_dir().map(|home| home.join(".cargo"))).unwrap_or_default().join("registry/src")
}

/// Appends the Rust files below a folder, in the order of their paths.
fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> Outcome<()> {
    let entries = fs::read_dir(folder).map_err(|reason| bad(folder.display(), reason))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    for path in paths {
        if path.is_dir() {
            rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
