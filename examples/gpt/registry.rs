//! The text that every machine has which has built this project: the sources of its locked dependencies, in cargo's registry.
//!
//! Invariant: the same `Cargo.lock` gives the same files in the same order, on every machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::bad_input::{Outcome, bad};

/// The lock that this program was built with.
const LOCK: &str = include_str!("../../Cargo.lock");
/// What every build of the library compiles, whatever its features and its platform: some 4 MB of Rust.
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

/// The Rust files of [`PACKAGES`], in the order of the lock and then of their paths.
pub(crate) fn sources() -> Outcome<Vec<PathBuf>> {
    let folder = registry();
    let mut files = Vec::new();
    for package in locked(LOCK) {
        let found = fs::read_dir(&folder).into_iter().flatten().flatten().map(|index| index.path().join(&package));
        let mut folders: Vec<PathBuf> = found.filter(|folder| folder.is_dir()).collect();
        folders.sort_unstable();
        let Some(package_folder) = folders.into_iter().next() else {
            let reason = format!("has no sources of {package}: run `cargo fetch`, or give text files by --data");
            return Err(bad(folder.display(), reason));
        };
        rust_files(&package_folder, &mut files)?;
    }
    Ok(files)
}

/// `NAME-VERSION` of the packages in a lock that are among [`PACKAGES`].
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

/// Where cargo unpacks what it has fetched.
fn registry() -> PathBuf {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    home.or_else(|| env::home_dir().map(|home| home.join(".cargo"))).unwrap_or_default().join("registry/src")
}

/// Adds the Rust files below a folder, by their paths.
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
