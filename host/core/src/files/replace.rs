//! Files that are replaced as a whole, through a temporary file of the same folder.
//!
//! Invariant: a file holds either its old or its new bytes, even after a crash. Leftovers of dead
//! processes never block a later run.

#![forbid(unsafe_code)]

use super::plain::{check_plain, open_without_links};
use crate::error::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The suffix of temporary file names. The file's own name and [`RANDOM`] characters precede it.
const TEMPORARY: &str = ".stepscope-tmp";
/// The number of random characters in a temporary file's name.
const RANDOM: usize = 6;
/// The number of bytes of the file's own name in it, because names have a limit.
const OWN_NAME: usize = 200;
/// The number of temporary files that are tried. A try fails if another process removes the file.
const ATTEMPTS: usize = 16;

/// Replaces a file as a whole. The new bytes are on disk, in a temporary file of the same folder,
/// before the name points to them. Temporary files of the same name that killed processes have left
/// are removed first.
///
/// # Errors
/// [`Error::File`] with the system's reason, or if the path is not a plain file. The old file is
/// then untouched.
pub fn replace_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    replace_file_by(path.as_ref(), |mut file| file.write_all(bytes))
}

/// Replaces a file like [`replace_file`], with the contents that `write` writes to the temporary
/// file.
pub fn replace_file_by(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<()> {
    Replacement::write(path, write)?.put()
}

/// A complete file on disk under a temporary name, ready to be renamed. Dropping it removes it.
#[derive(Debug)]
pub struct Replacement {
    file: NamedTempFile,
    path: PathBuf,
}

impl Replacement {
    /// Writes the temporary file. The file at `path` stays. See [`replace_file`].
    pub fn write(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<Self> {
        sweep(path);
        let written = || {
            // Renaming over a device would remove it for all processes.
            if let Ok(found) = fs::metadata(path) {
                check_plain(&found)?;
            }
            let file = temporary(path)?;
            write(file.as_file())?;
            file.as_file().sync_all()?;
            Ok(file)
        };
        let file = written().map_err(|reason: io::Error| Error::file(path, reason))?;
        Ok(Self { file, path: path.into() })
    }

    /// Renames the file in one step, which replaces the old one.
    ///
    /// # Errors
    /// [`Error::File`] with the system's reason. The old file is then untouched.
    pub fn put(self) -> Result<()> {
        let Self { file, path } = self;
        let renamed = file.persist(&path).map_err(|failed| failed.error);
        // The rename itself is on disk once the folder is.
        renamed.and_then(|_| sync_folder(folder(&path))).map_err(|reason| Error::file(&path, reason))
    }
}

/// Waits until the names in a folder are on disk.
#[expect(clippy::disallowed_methods, reason = "opens a folder to sync it")]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes a file if it exists, and waits until its removal is on disk.
///
/// # Errors
/// [`Error::File`] with the system's reason.
pub fn remove_file(path: &Path) -> Result<()> {
    let removed = match fs::remove_file(path) {
        Err(reason) if reason.kind() == io::ErrorKind::NotFound => return Ok(()),
        removed => removed.and_then(|()| sync_folder(folder(path))),
    };
    removed.map_err(|reason| Error::file(path, reason))
}

/// Removes unlocked temporary files that killed processes have left next to `path`. Files that
/// cannot be removed stay.
pub fn sweep(path: &Path) {
    let Some(start) = temporary_start(path) else { return };
    let Ok(entries) = fs::read_dir(folder(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(&start)?.strip_suffix(TEMPORARY));
        let ours = random.is_some_and(|random| random.len() == RANDOM && !random.contains('.'));
        // A symbolic link is never a temporary file of ours.
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(file) = open_without_links(OpenOptions::new().read(true), &entry.path()) else { continue };
        if file.try_lock().is_ok() {
            // The file is removed while it is locked, so that no writer adopts it. Another process
            // may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Creates a locked temporary file for `path`. It is removed with its value, or by [`sweep`] if the
/// process is killed.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "expected the name of a file");
    let start = temporary_start(path).ok_or_else(no_name)?;
    let mut options = tempfile::Builder::new();
    options.prefix(&start).rand_bytes(RANDOM).suffix(TEMPORARY);
    // A temporary file is private to its owner by default. A checkpoint should be as readable as
    // any file (the umask still applies).
    #[cfg(unix)]
    options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    for _ in 0..ATTEMPTS {
        let file = options.tempfile_in(folder(path))?;
        // Another process may sweep it before it is locked.
        match file.as_file().try_lock() {
            Ok(()) if file.path().exists() => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            // On systems without file locks, nothing sweeps.
            Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
    Err(io::Error::other("other processes keep removing its temporary file"))
}

/// Returns the prefix of the names of temporary files for `path`.
fn temporary_start(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    Some(format!(".{}.", &name[..name.floor_char_boundary(OWN_NAME)]))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
