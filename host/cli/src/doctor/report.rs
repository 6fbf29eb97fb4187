//! The problem report: facts, findings and the files of runs, in one .tar.gz.
//!
//! Invariant: a report that cannot be written completely is an error and leaves no file.

use crate::doctor::facts::Facts;
use crate::doctor::findings::Finding;
use flate2::{Compression, write::GzEncoder};
use std::io;
use std::path::{Path, PathBuf};

/// Returns facts and findings as JSON.
pub(crate) fn json(facts: &Facts, findings: &[Finding]) -> String {
    let value = serde_json::json!({ "facts": facts, "findings": findings });
    format!("{value:#}\n")
}

#[expect(clippy::disallowed_methods, reason = "reads the kernel's own file, which ends")]
/// Packs `json`, `text`, `/proc/meminfo` if it can be read, and `added`.
pub(crate) fn write(path: &Path, json: &str, text: &str, added: &[PathBuf]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let mut tar = tar::Builder::new(GzEncoder::new(&mut file, Compression::default()));
    tar.follow_symlinks(false);
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    for (name, content) in [("doctor.json", json), ("doctor.txt", text), ("meminfo.txt", &meminfo)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, content.as_bytes())?;
    }
    for (at, path) in added.iter().enumerate() {
        let named = |error| io::Error::other(format!("{}: {error}", path.display()));
        let name = path.file_name().map_or_else(|| "folder".into(), |name| name.to_string_lossy().into_owned());
        let name = format!("added/{at}-{name}");
        if path.is_dir() { tar.append_dir_all(name, path) } else { tar.append_path_with_name(path, name) }
            .map_err(named)?;
    }
    tar.into_inner()?.finish()?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
