//! Folders that a run has to itself.
//!
//! Invariant: a lock is the system's, which lets go of it when its process ends, however it ends.
//! Only a file that this process has made is written to.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::files::{is_at, open_without_links};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The file that is locked.
const LOCK: &str = ".stepscope-lock";
/// The most bytes of a process's number.
const MAX_NUMBER_BYTES: u64 = 10;

/// A folder that one run at a time has to itself, from [`RunLock::hold`] to the drop or the end of
/// the process, however it ends.
///
/// Hold one where a run writes checkpoints: two that write to one path would each find the other's.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// let lock = stepscope::RunLock::hold(folder.path())?;
/// let refused = stepscope::RunLock::hold(folder.path()).unwrap_err();
/// assert!(refused.to_string().contains("another run"));
/// drop(lock);
/// stepscope::RunLock::hold(folder.path())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RunLock {
    file: File,
    path: PathBuf,
}

impl RunLock {
    /// Takes a folder, which must exist, by locking a file `.stepscope-lock` in it. Does not wait.
    /// A link of that name, a file with a second name, and a file that holds anything but a
    /// process's number are refused and left as they are.
    ///
    /// # Errors
    /// [`Error::File`] when another run has it, with its process if that can be told; when
    /// something else has the lock's name; with the system's reason where files cannot be made or
    /// locked.
    pub fn hold(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join(LOCK);
        let failed = |reason: io::Error| Error::file(&path, reason);
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let (file, is_new) = match open_without_links(options.clone().create_new(true), &path) {
                Ok(file) => (file, true),
                Err(reason) if reason.kind() == ErrorKind::AlreadyExists => {
                    match open_without_links(&mut options, &path) {
                        Ok(file) => (file, false),
                        // A run that has ended since took it away.
                        Err(reason) if reason.kind() == ErrorKind::NotFound => continue,
                        Err(reason) => return Err(failed(reason)),
                    }
                }
                Err(reason) => return Err(failed(reason)),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(Error::file(folder, taken(file))),
                Err(TryLockError::Error(reason)) => return Err(failed(reason)),
            }
            // What is locked may no longer be what is in the folder.
            if !is_at(&file, &path) {
                continue;
            }
            if is_new {
                write!(&file, "{}", std::process::id()).map_err(failed)?;
                return Ok(Self { file, path });
            }
            // A dead run's. It is not written to, since it may have got another name meanwhile:
            // only its name here goes.
            check_own(&file).and_then(|()| fs::remove_file(&path)).map_err(failed)?;
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // While it is still locked, so that nobody can have taken it. If it stays it stops nobody.
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An error for a file that no lock has made: one with a second name, which would change there too,
/// or with other contents.
fn check_own(file: &File) -> io::Result<()> {
    #[cfg(unix)]
    let names = std::os::unix::fs::MetadataExt::nlink(&file.metadata()?);
    #[cfg(not(unix))]
    let names = 1;
    let got = match number(file)? {
        _ if names > 1 => format!("one file with {names} names"),
        None => "something else".into(),
        Some(_) => return Ok(()),
    };
    let reason = format!(
        "expected a lock of an earlier run, which holds its process's number, got {got}: move it away, or choose another folder"
    );
    Err(io::Error::new(ErrorKind::InvalidData, reason))
}

/// The process that a lock's file names: zero for an empty one, none for other contents.
fn number(file: &File) -> io::Result<Option<u32>> {
    let mut bytes = Vec::new();
    file.take(MAX_NUMBER_BYTES + 1).read_to_end(&mut bytes)?;
    let text = str::from_utf8(&bytes).unwrap_or("?");
    Ok(if text.is_empty() { Some(0) } else { text.parse().ok() })
}

/// Why a lock cannot be had.
fn taken(file: File) -> String {
    let process = number(&file).ok().flatten().filter(|&process| process > 0);
    let process = process.map_or(String::new(), |process| format!(" (process {process})"));
    format!("another run{process} writes here: wait for its end, end it, or choose another folder")
}
