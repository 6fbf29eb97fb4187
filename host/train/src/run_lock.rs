//! Exclusive locks on the folder of a run.
//!
//! Invariant: the lock is the operating system's, which releases it when its process ends, however
//! it ends. Only a file that this process has created is written to.

#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use stepscope_core::internals::{is_at, open_without_links};
use stepscope_core::{Error, Result};

/// The file that is locked.
const LOCK: &str = ".stepscope-lock";
/// The most bytes of a process id.
const MAX_NUMBER_BYTES: u64 = 10;

/// A folder that one run at a time owns exclusively, from [`RunLock::hold`] until the drop or any
/// end of the process.
///
/// Hold one in the folder where a run writes checkpoints. Two runs that write to the same path
/// would each read the other's.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// let lock = stepscope::files::RunLock::hold(folder.path())?;
/// let refused = stepscope::files::RunLock::hold(folder.path()).unwrap_err();
/// assert!(refused.to_string().contains("another run"));
/// drop(lock);
/// stepscope::files::RunLock::hold(folder.path())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RunLock {
    file: File,
    path: PathBuf,
}

impl RunLock {
    /// Locks an existing folder by locking a file `.stepscope-lock` in it. Does not wait. Refuses a
    /// link of that name, a file with a second name, and a file that contains anything other than a
    /// process id. These are left unchanged.
    ///
    /// # Errors
    /// [`Error::File`] if another run holds it, with its process id if that can be read, or if
    /// another kind of file has the lock's name. It has the system's reason if files cannot be
    /// created or locked.
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
                        // A run that has ended since removed it.
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
            // The locked file may no longer be the one in the folder.
            if !is_at(&file, &path) {
                continue;
            }
            if is_new {
                write!(&file, "{}", std::process::id()).map_err(failed)?;
                return Ok(Self { file, path });
            }
            // The file of a dead run. It may have another name by now, so it is not written to, and
            // only its name here is removed.
            check_own(&file).and_then(|()| fs::remove_file(&path)).map_err(failed)?;
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // The file is removed while it is still locked, so no other run can have taken it. If it
        // stays, it blocks no later run.
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns an error for a file that no lock has created. Such a file has a second name, under which
/// it would change too, or other contents.
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
        "expected the lock of an earlier run, which contains its process id, got {got}: move it away, or choose another folder"
    );
    Err(io::Error::new(ErrorKind::InvalidData, reason))
}

/// Returns the process id that a lock's file contains. It is zero for an empty file, and none for
/// other contents.
fn number(file: &File) -> io::Result<Option<u32>> {
    let mut bytes = Vec::new();
    file.take(MAX_NUMBER_BYTES + 1).read_to_end(&mut bytes)?;
    let text = str::from_utf8(&bytes).unwrap_or("?");
    Ok(if text.is_empty() { Some(0) } else { text.parse().ok() })
}

/// Returns the reason why a lock is not available.
fn taken(file: File) -> String {
    let process = number(&file).ok().flatten().filter(|&process| process > 0);
    let process = process.map_or(String::new(), |process| format!(" (process {process})"));
    format!("another run{process} writes here: wait for its end, end it, or choose another folder")
}
