//! The folder of a run's results.
//!
//! Invariant: only one run at a time writes there, and a run replaces another run's checkpoint only
//! with `--overwrite`. A run that ends without results leaves no folder that it created.

use std::error::Error;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use stepscope::files::{PlainFile, RunLock};
use time::OffsetDateTime;
use time::macros::format_description;

/// The file name of the checkpoint, which `--resume` reads.
pub const CHECKPOINT: &str = "model.safetensors";
/// The file name of the weights with the lowest loss.
pub const BEST: &str = "best.safetensors";
/// The longest checkpoint header from which notes are read.
const MAX_HEADER_BYTES: u64 = 1 << 24;

/// This process's folder. It is global because the signal thread also releases it.
static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// A locked folder.
struct Held {
    lock: RunLock,
    /// The folders that [`take`] created, the innermost first.
    created: Vec<PathBuf>,
}

/// Ownership of the folder until this is dropped.
pub struct Results(());

/// Locks the folder, which is created if missing.
///
/// # Errors
/// Returns an error if another run has locked it, [`check`] refuses it, or the system fails.
pub fn take(out: &Path, resume: Option<&Path>, overwrite: bool) -> Result<Results, Box<dyn Error + Send + Sync>> {
    let created = out.ancestors().take_while(|folder| !folder.exists()).map(Path::to_path_buf).collect();
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let lock = RunLock::hold(out)?;
    *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(Held { lock, created });
    let results = Results(());
    // Another run may have ended since this one began to load.
    check(out, resume, overwrite)?;
    Ok(results)
}

/// Releases the folder, and removes it if [`take`] created it and it is still empty.
pub fn release() {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Held { lock, created }) = held else { return };
    drop(lock);
    for folder in created {
        // Only an empty folder can be removed.
        if fs::remove_dir(folder).is_err() {
            return;
        }
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        release();
    }
}

/// Checks the folder for the checkpoint of a run other than the one that `--resume` continues.
///
/// # Errors
/// A text that names the files found there and the options to add to the command.
pub fn check(out: &Path, resume: Option<&Path>, overwrite: bool) -> Result<(), String> {
    let checkpoint = out.join(CHECKPOINT);
    let goes_on = || Some(fs::canonicalize(resume?).ok()? == fs::canonicalize(&checkpoint).ok()?);
    if overwrite || goes_on() == Some(true) {
        return Ok(());
    }
    // Links are not followed, because even a dangling link is another run's file.
    let Some(name) = [CHECKPOINT, BEST].into_iter().find(|name| fs::symlink_metadata(out.join(name)).is_ok()) else {
        return Ok(());
    };
    let found = Found::read(&out.join(name));
    let go_on = match found.updates.as_ref().filter(|_| name == CHECKPOINT) {
        Some(_) => format!("\n  --resume {}   to continue that run", checkpoint.display()),
        None => String::new(),
    };
    Err(format!(
        "{} holds {} of an earlier run: {name}{}. Add to the command{go_on}\n  --overwrite   to replace it\n  --out DIR   to keep it and write \
         to another folder",
        out.display(),
        if found.updates.is_some() && name == CHECKPOINT { "the checkpoint" } else { "weights" },
        found.description()
    ))
}

/// Facts about a checkpoint, found without reading all of it.
#[derive(Default)]
struct Found {
    updates: Option<String>,
    written: Option<String>,
}

impl Found {
    fn read(path: &Path) -> Self {
        let modified = fs::metadata(path).and_then(|found| found.modified()).ok();
        let form = format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
        let written = modified.and_then(|time| OffsetDateTime::from(time).format(form).ok());
        Self { updates: updates(path), written }
    }

    /// `, 500 updates, written 2026-11-26 01:02 UTC`.
    fn description(&self) -> String {
        let updates = self.updates.as_ref().map(|updates| format!(", {updates} updates"));
        let written = self.written.as_ref().map(|written| format!(", written {written}"));
        [updates, written].into_iter().flatten().collect()
    }
}

/// Returns the number of updates in a checkpoint's notes.
fn updates(path: &Path) -> Option<String> {
    let mut file = PlainFile::open(path).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = Some(u64::from_le_bytes(length)).filter(|&length| length <= MAX_HEADER_BYTES)?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).ok()?;
    let header: serde_json::Value = serde_json::from_slice(&header).ok()?;
    let updates = header["__metadata__"]["stepscope.updates"].as_str()?;
    updates.parse::<u64>().ok().map(|updates| updates.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a run removes the empty folders that it created, and no others.
    #[test]
    fn empty_folders_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let outer = folder.path().join("runs");
        let out = outer.join("first");
        drop(take(&out, None, false).unwrap());
        assert!(!outer.exists() && folder.path().exists());
        let results = take(&out, None, false).unwrap();
        fs::write(out.join("report.json"), "{}").unwrap();
        drop(results);
        assert!(out.join("report.json").exists());
        fs::remove_file(out.join("report.json")).unwrap();
        drop(take(&out, None, false).unwrap());
        assert!(out.exists(), "an earlier run created it");
    }

    #[test]
    fn another_runs_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let checkpoint = out.join(CHECKPOINT);
        assert_eq!(check(out, None, false), Ok(()));
        assert_eq!(check(&out.join("absent"), None, false), Ok(()));
        fs::write(out.join(BEST), "weights").unwrap();
        assert!(
            check(out, None, false)
                .unwrap_err()
                .contains("holds weights of an earlier run: best.safetensors, written ")
        );
        let header = r#"{"__metadata__":{"stepscope.updates":"500"}}"#;
        fs::write(&checkpoint, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        let told = check(out, None, false).unwrap_err();
        assert!(
            told.contains("holds the checkpoint of an earlier run: model.safetensors, 500 updates, written 20"),
            "{told}"
        );
        let go_on = format!("\n  --resume {}   to continue", checkpoint.display());
        assert!(
            told.contains(&go_on) && told.contains("\n  --overwrite ") && told.contains("\n  --out DIR "),
            "{told}"
        );
        // Resuming from any other file, even one in the folder, would replace the checkpoint.
        let other = out.join("copy.safetensors");
        fs::copy(&checkpoint, &other).unwrap();
        assert!(check(out, Some(&other), false).is_err());
        assert_eq!(check(out, Some(&checkpoint), false), Ok(()));
        assert_eq!(check(out, Some(&out.join("..").join(out.file_name().unwrap()).join(CHECKPOINT)), false), Ok(()));
        assert_eq!(check(out, None, true), Ok(()));
        fs::remove_file(&checkpoint).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(out.join("nowhere"), &checkpoint).unwrap();
        #[cfg(unix)]
        assert!(check(out, None, false).unwrap_err().contains("weights of an earlier run: model.safetensors"));
    }
}
