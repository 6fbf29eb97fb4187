//! The folder of a run's results.
//!
//! Invariants:
//!
//! - Only one run at a time writes there. A run that ends without results leaves no folder that it
//!   created.
//! - A run replaces only files that a run has written, and only with `--overwrite`, or with
//!   `--resume` of the folder's checkpoint.
//! - A run replaces no file that it reads.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use stepscope::files::RunLock;
use time::OffsetDateTime;
use time::macros::format_description;

use super::marks;

/// The file name of the checkpoint, which `--resume` reads.
pub const CHECKPOINT: &str = "model.safetensors";
/// The file name of the weights with the lowest loss.
pub const BEST: &str = "best.safetensors";
/// The log-probabilities of answers by the reference of a preference loss.
pub const REFERENCES: &str = "references.safetensors";
/// The most names that a message lists.
const LISTED: usize = 8;

/// This process's folder. It is global because the signal thread also releases it.
static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// A locked folder.
struct Held {
    lock: RunLock,
    /// The folders that [`Claim::take`] created, the innermost first.
    created: Vec<PathBuf>,
}

/// Ownership of the folder until this is dropped.
pub struct Results(());

/// A run's claim to a folder.
#[derive(Clone, Debug)]
pub struct Claim<'r> {
    /// The folder.
    pub out: &'r Path,
    /// The checkpoint that the run continues.
    pub resume: Option<&'r Path>,
    /// True if the run may replace the results of an earlier one.
    pub overwrite: bool,
    /// The files, and the folders of models, that the run reads, with the options that name them.
    pub reads: Vec<(&'static str, &'r Path)>,
}

impl Claim<'_> {
    /// Locks the folder, which is created if missing.
    ///
    /// # Errors
    /// Returns an error if another run has locked it, [`Claim::check`] refuses it, or the system
    /// fails.
    pub fn take(&self) -> Result<Results, Box<dyn Error + Send + Sync>> {
        let Self { out, .. } = *self;
        let created = out.ancestors().take_while(|folder| !folder.exists()).map(Path::to_path_buf).collect();
        fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
        let lock = RunLock::hold(out)?;
        *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(Held { lock, created });
        let results = Results(());
        // Another run may have ended since this one began to load.
        self.check()?;
        Ok(results)
    }

    /// Checks that the run replaces only what it may.
    ///
    /// # Errors
    /// A text that names the files found there and the options to add to the command.
    pub fn check(&self) -> Result<(), String> {
        let place = self.out.display();
        if let Some((option, file)) = self.read_and_replaced() {
            return Err(format!(
                "{place} is where {option} reads {}, which this run would replace: give another folder with --out DIR",
                file.display()
            ));
        }
        let checkpoint = self.out.join(CHECKPOINT);
        let same = || Some(fs::canonicalize(self.resume?).ok()? == fs::canonicalize(&checkpoint).ok()?);
        let goes_on = same() == Some(true);
        let found = marks::found(self.out);
        // The checkpoint that the run continues is loaded and verified.
        let is_own = |found: &marks::Found| found.is_own || goes_on && found.name == CHECKPOINT;
        let others: Vec<&str> = found.iter().filter(|found| !is_own(found)).map(|found| &*found.name).collect();
        if !others.is_empty() {
            return Err(format!(
                "{place} holds files that this run would replace, and that no run has written: {}. Move them to another \
                 folder, or write to another folder with --out DIR",
                listed(&others)
            ));
        }
        if found.is_empty() || self.overwrite || goes_on {
            return Ok(());
        }
        let names: Vec<&str> = found.iter().map(|found| &*found.name).collect();
        let (what, go_on) = match names[0] {
            CHECKPOINT => {
                let go_on = format!("\n  --resume {}   to continue that run", checkpoint.display());
                (format!("the checkpoint of an earlier run: {CHECKPOINT}{}", description(&checkpoint)), go_on)
            }
            BEST => (format!("weights of an earlier run: {BEST}{}", description(&self.out.join(BEST))), String::new()),
            _ => (format!("files of an earlier run: {}", listed(&names)), String::new()),
        };
        Err(format!(
            "{place} holds {what}. Add to the command{go_on}\n  --overwrite   to replace it\n  --out DIR   to keep it and write to \
             another folder"
        ))
    }

    /// Returns a file that the run reads and would replace, under this name or another, with the
    /// option that names it.
    fn read_and_replaced(&self) -> Option<(&'static str, PathBuf)> {
        let folders = || marks::EXPORTS.iter().map(|name| self.out.join(name)).chain([self.out.to_owned()]);
        let written: Vec<PathBuf> = folders().filter_map(|folder| fs::canonicalize(folder).ok()).collect();
        let replaced: Vec<_> = marks::replaceable(self.out).iter().filter_map(|path| identity(path)).collect();
        for &(option, path) in &self.reads {
            let is_folder = path.is_dir();
            if is_folder && fs::canonicalize(path).is_ok_and(|path| written.contains(&path)) {
                return Some((option, path.to_owned()));
            }
            let files = if is_folder { marks::entries(path) } else { vec![path.to_owned()] };
            let is_replaced = |file: &PathBuf| identity(file).is_some_and(|file| replaced.contains(&file));
            if let Some(file) = files.into_iter().find(is_replaced) {
                return Some((option, file));
            }
        }
        None
    }
}

/// Returns the device and the number of the file to which a path leads, which all its names share.
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|file| (file.dev(), file.ino()))
}

fn listed(names: &[&str]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let shown = names.iter().take(LISTED).copied().collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// Releases the folder, and removes it if [`Claim::take`] created it and it is still empty.
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

/// Describes a checkpoint by its notes and its time: `, 500 updates, written 2026-11-26 01:02 UTC`.
fn description(path: &Path) -> String {
    let notes = marks::notes(path).unwrap_or_default();
    let updates = notes["stepscope.updates"].as_str().and_then(|updates| updates.parse::<u64>().ok());
    let modified = fs::metadata(path).and_then(|found| found.modified()).ok();
    let form = format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
    let written = modified.and_then(|time| OffsetDateTime::from(time).format(form).ok());
    let updates = updates.map(|updates| format!(", {updates} updates"));
    let written = written.map(|written| format!(", written {written}"));
    [updates, written].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn claim(out: &Path) -> Claim<'_> {
        Claim { out, resume: None, overwrite: false, reads: Vec::new() }
    }

    /// Writes a file whose header a run's checkpoint could have.
    fn write_checkpoint(path: &Path) {
        let header = r#"{"__metadata__":{"stepscope.format":"1","stepscope.updates":"500"}}"#;
        fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    }

    /// Checks that a run removes the empty folders that it created, and no others.
    #[test]
    fn empty_folders_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let outer = folder.path().join("runs");
        let out = outer.join("first");
        drop(claim(&out).take().unwrap());
        assert!(!outer.exists() && folder.path().exists());
        let results = claim(&out).take().unwrap();
        fs::write(out.join("report.json"), "{}").unwrap();
        drop(results);
        assert!(out.join("report.json").exists());
        fs::remove_file(out.join("report.json")).unwrap();
        drop(claim(&out).take().unwrap());
        assert!(out.exists(), "an earlier run created it");
    }

    #[test]
    fn earlier_results_need_overwrite() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let checkpoint = out.join(CHECKPOINT);
        let resumed = |path: &Path| Claim { resume: Some(path), ..claim(out) }.check();
        assert_eq!(claim(out).check(), Ok(()));
        assert_eq!(claim(&out.join("absent")).check(), Ok(()));
        let lines = r#"{"update":1,"loss":2.0,"arena_bytes":3}"#;
        fs::write(out.join(marks::LINES), format!("{lines}\n{{\"upd")).unwrap();
        assert!(claim(out).check().unwrap_err().contains("holds files of an earlier run: log.jsonl. Add"));
        write_checkpoint(&out.join(BEST));
        let error = claim(out).check().unwrap_err();
        assert!(error.contains("holds weights of an earlier run: best.safetensors, 500 updates, written "), "{error}");
        write_checkpoint(&checkpoint);
        let error = claim(out).check().unwrap_err();
        assert!(
            error.contains("holds the checkpoint of an earlier run: model.safetensors, 500 updates, written 20"),
            "{error}"
        );
        let go_on = format!("\n  --resume {}   to continue", checkpoint.display());
        assert!(
            error.contains(&go_on) && error.contains("\n  --overwrite ") && error.contains("\n  --out DIR "),
            "{error}"
        );
        // Resuming from any other file, even one in the folder, would replace the checkpoint.
        let other = out.join("copy.safetensors");
        fs::copy(&checkpoint, &other).unwrap();
        assert!(resumed(&other).is_err());
        assert_eq!(resumed(&checkpoint), Ok(()));
        assert_eq!(resumed(&out.join("..").join(out.file_name().unwrap()).join(CHECKPOINT)), Ok(()));
        fs::create_dir(out.join("adapter")).unwrap();
        fs::write(out.join("adapter/adapter_config.json"), "{}").unwrap();
        assert_eq!(Claim { overwrite: true, ..claim(out) }.check(), Ok(()));
        fs::write(&checkpoint, "cut").unwrap();
        assert_eq!(resumed(&checkpoint), Ok(()), "the reader of a damaged checkpoint names the damage");
    }

    /// Files that no run has written are refused by name, also with `--overwrite`.
    #[test]
    fn files_of_others_are_never_replaced() {
        let own_log = r#"{"my":"own log"}"#;
        for (name, text) in [
            (CHECKPOINT, "somebody's"),
            (BEST, "somebody's"),
            ("log.jsonl", own_log),
            ("log.jsonl", r#"{"step":1,"loss":2.0}"#),
            ("report.json", "mine"),
            ("report.json", r#"{"accuracy":1}"#),
            ("tensorboard/events.out.tfevents.1.other", "years of logs"),
            ("adapter/adapter_model.safetensors", "my adapter"),
            ("transformers/model-00001-of-00002.safetensors", "my shard"),
            ("transformers/README.md", "about my model"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("out");
            let path = out.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let listed = name.strip_suffix("/adapter_model.safetensors").unwrap_or(name);
            let listed = if listed.starts_with("transformers") { "transformers" } else { listed };
            for overwrite in [false, true] {
                let error = Claim { overwrite, ..claim(&out) }.check().unwrap_err();
                assert!(error.contains(&format!("no run has written: {listed}. Move them")), "{name}: {error}");
            }
            // Its name leads to the same file, and a run would write through it or replace it.
            let linked = folder.path().join("linked");
            let first = linked.join(Path::new(name).iter().next().unwrap());
            fs::create_dir(&linked).unwrap();
            symlink(out.join(Path::new(name).iter().next().unwrap()), &first).unwrap();
            write_checkpoint(&linked.join(if name == CHECKPOINT { BEST } else { CHECKPOINT }));
            let error = Claim { overwrite: true, ..claim(&linked) }.check().unwrap_err();
            assert!(error.contains("no run has written: "), "{name}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("notes.txt"), "never replaced").unwrap();
        symlink(folder.path().join("nowhere"), folder.path().join(BEST)).unwrap();
        let error = Claim { overwrite: true, ..claim(folder.path()) }.check().unwrap_err();
        assert!(error.contains("no run has written: best.safetensors. "), "{error}");
    }

    /// A run does not replace its own model or data, whatever the path that leads to it.
    #[test]
    fn files_that_are_read_stay() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        fs::create_dir(&model).unwrap();
        fs::write(model.join("model-00001-of-00002.safetensors"), "a shard").unwrap();
        let link = folder.path().join("link");
        symlink(&model, &link).unwrap();
        let out = folder.path().join("out");
        fs::create_dir_all(out.join("transformers")).unwrap();
        write_checkpoint(&out.join(CHECKPOINT));
        let export = out.join("transformers/model.safetensors");
        fs::write(&export, "an export").unwrap();
        let view = folder.path().join("view");
        fs::create_dir(&view).unwrap();
        symlink(&export, view.join("model.safetensors")).unwrap();
        let hard = folder.path().join("hard");
        fs::create_dir(&hard).unwrap();
        fs::hard_link(&export, hard.join("weights.safetensors")).unwrap();
        fs::write(out.join("log.jsonl"), "").unwrap();
        for (out, reads) in [
            (&model, &model),
            (&link, &model),
            (&model, &link),
            (&out, &out.join("transformers")),
            (&out, &view),
            (&out, &hard),
            (&out, &out.join("log.jsonl")),
        ] {
            let error = Claim { overwrite: true, reads: vec![("--weights", reads)], ..claim(out) }.check().unwrap_err();
            assert!(error.contains("is where --weights reads ") && error.contains("--out DIR"), "{error}");
        }
        let inside = model.join("run");
        let absent = folder.path().join("absent");
        let reads = vec![("--weights", &*model), ("--data", &*absent)];
        assert_eq!(Claim { reads, ..claim(&inside) }.check(), Ok(()));
    }
}
