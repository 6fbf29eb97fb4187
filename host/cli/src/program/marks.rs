//! The files that runs write into their folder, and the marks by which they are recognized.
//!
//! Invariant: a file counts as a run's own only if its contents have the mark. A link is nobody's
//! file, because no run makes one.

use std::fs::{self, Metadata};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;
use stepscope::files::PlainFile;

use super::results::{BEST, CHECKPOINT, REFERENCES};

/// The other files of a run.
pub(crate) const LINES: &str = "log.jsonl";
pub(crate) const REPORT: &str = "report.json";
/// The folder of the files for TensorBoard, and the start of their names.
pub(crate) const EVENTS: &str = "tensorboard";
pub(crate) const EVENT_FILE: &str = "events.out.tfevents.";
/// The program that a run's event files name as their writer.
pub(crate) const WRITER: &str = "stepscope";
/// The note of a file of references, which has their digests.
pub(crate) const REFERENCES_NOTE: &str = "stepscope.references";
/// The folders of exported weights, which a run writes after its checkpoint.
pub(crate) const EXPORTS: [&str; 2] = ["transformers", "adapter"];

/// The longest checkpoint header from which notes are read.
const MAX_HEADER_BYTES: u64 = 1 << 27;
/// The longest report.
const MAX_BYTES: u64 = 1 << 28;
/// The longest line of a log, and the first bytes of an event file, that are searched for a mark.
const MAX_LINE: u64 = 1 << 16;
const MAX_RECORD: u64 = 256;

/// A file or a folder that a run would replace.
#[derive(Debug)]
pub(crate) struct Found {
    /// The name in the folder.
    pub(crate) name: String,
    /// True if a run has written it.
    pub(crate) is_own: bool,
}

/// Returns what a run would replace in a folder.
pub(crate) fn found(out: &Path) -> Vec<Found> {
    let mut all = Vec::new();
    for name in [CHECKPOINT, BEST, REFERENCES, REPORT, LINES] {
        let path = out.join(name);
        if let Ok(kind) = fs::symlink_metadata(&path) {
            all.push(Found { name: name.into(), is_own: kind.is_file() && has_mark(&path, name) });
        }
    }
    let marks = |found: &&Found| [CHECKPOINT, BEST, REPORT].contains(&&*found.name);
    let is_marked = all.iter().filter(marks).any(|found| found.is_own);
    for name in EXPORTS {
        let path = out.join(name);
        match fs::symlink_metadata(&path) {
            Ok(kind) if !kind.is_dir() => all.push(Found { name: name.into(), is_own: false }),
            Ok(_) if !entries(&path).is_empty() => all.push(Found { name: name.into(), is_own: is_marked }),
            _ => (),
        }
    }
    match fs::symlink_metadata(out.join(EVENTS)) {
        Ok(kind) if !kind.is_dir() => all.push(Found { name: EVENTS.into(), is_own: false }),
        Ok(_) => {
            let event = |path: PathBuf| {
                let name = path.file_name()?.to_str()?.to_owned();
                let is_own = is_own_event_file(&path);
                name.starts_with(EVENT_FILE).then(|| Found { name: format!("{EVENTS}/{name}"), is_own })
            };
            all.extend(entries(&out.join(EVENTS)).into_iter().filter_map(event));
        }
        Err(_) => (),
    }
    all
}

/// Returns the files of the folder that a run may replace or remove, with those of its folders.
pub(crate) fn replaceable(out: &Path) -> Vec<PathBuf> {
    let files = [CHECKPOINT, BEST, REFERENCES, REPORT, LINES].map(|name| out.join(name));
    let inner = EXPORTS.into_iter().chain([EVENTS]).flat_map(|name| entries(&out.join(name)));
    files.into_iter().chain(inner).collect()
}

/// Returns the paths in a folder in order, or none if it cannot be read.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}

/// Returns true for a file of events that a run has written.
pub(crate) fn is_own_event_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|kind: Metadata| kind.is_file())
        && start(path, MAX_RECORD).windows(WRITER.len()).any(|bytes| bytes == WRITER.as_bytes())
}

/// Returns the notes in the header of a safetensors file, without reading the rest.
pub(crate) fn notes(path: &Path) -> Option<Value> {
    let mut file = PlainFile::open(path).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = Some(u64::from_le_bytes(length)).filter(|&length| length <= MAX_HEADER_BYTES)?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).ok()?;
    let header: Value = serde_json::from_slice(&header).ok()?;
    Some(header["__metadata__"].clone())
}

fn has_mark(path: &Path, name: &str) -> bool {
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap_or_default();
    match name {
        CHECKPOINT | BEST => notes(path).is_some_and(|notes| notes["stepscope.format"].is_string()),
        REFERENCES => notes(path).is_some_and(|notes| notes[REFERENCES_NOTE].is_string()),
        REPORT => {
            let report = json(&PlainFile::read_whole(path, MAX_BYTES).unwrap_or_default());
            report["weights_sha256"].is_string() && report["device"].is_string()
        }
        _ => {
            // An empty log has lost nothing.
            let line = start(path, MAX_LINE);
            let line = BufReader::new(&*line).lines().next().unwrap_or_else(|| Ok(String::new())).unwrap_or_default();
            let first = json(line.as_bytes());
            let figures = ["arena_bytes", "evaluation_loss"];
            fs::metadata(path).is_ok_and(|file| file.len() == 0)
                || first["update"].is_u64() && figures.iter().any(|name| first[name].is_number())
        }
    }
}

/// Returns the first bytes of a file, or none if it cannot be read.
fn start(path: &Path, most: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = PlainFile::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    if read.is_ok() { bytes } else { Vec::new() }
}
