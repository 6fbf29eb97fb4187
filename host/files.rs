//! Files: read as they were when they were opened, replaced as a whole, and folders that a run has to itself.
//!
//! Invariant: no call waits for what a path leads to, and nothing that a dead process leaves behind stops anybody: locks are the
//! system's, which lets go of them when their process ends, however it ends.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Take, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tempfile::NamedTempFile;

/// How the names of temporary files end. Before it stand the file's own name and [`RANDOM`] characters.
const TEMPORARY: &str = ".stepscope-tmp";
/// Random characters of a temporary file's name.
const RANDOM: usize = 6;
/// Bytes of the file's own name that are in it: names have a limit.
const OWN_NAME: usize = 200;
/// Temporary files that are made before giving up, each because another process took the last one away.
const ATTEMPTS: usize = 16;
/// The file that a [`RunLock`] locks.
const LOCK: &str = ".stepscope-lock";

/// A plain file, open for reading: no folder, pipe or device, for which a reader could wait for ever. It is read to the length that it
/// had when it was opened, and [`PlainFile::check_unchanged`] tells whether that was all of it.
#[derive(Debug)]
pub struct PlainFile {
    file: Take<File>,
    len: u64,
    modified: Option<SystemTime>,
}

impl PlainFile {
    /// Opens a file, and does not wait.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::InvalidInput`] when it is something else than a plain file, and says what.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        // To open a device may already do something, so it is not even opened.
        check_plain(&fs::metadata(path)?)?;
        let file = open_at_once(OpenOptions::new().read(true), path)?;
        // The path may lead elsewhere by now; what counts is what was opened.
        let found = file.metadata()?;
        check_plain(&found)?;
        Ok(Self { len: found.len(), modified: found.modified().ok(), file: file.take(found.len()) })
    }

    /// Its bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it was empty then.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// An error when it has been cut, prolonged or written to since it was opened, as far as the system tells: by its length and its time
    /// of modification. To replace it by another file is no change of this one.
    ///
    /// # Errors
    /// The system's, or what has changed.
    pub fn check_unchanged(&self) -> io::Result<()> {
        let now = self.file.get_ref().metadata()?;
        let changed = if now.len() != self.len {
            format!("had {} bytes when it was opened, and has {} now", self.len, now.len())
        } else if now.modified().ok() != self.modified {
            "was written to while it was read".into()
        } else {
            return Ok(());
        };
        Err(io::Error::other(format!("{changed}: read it again when nobody writes to it")))
    }
}

impl Read for PlainFile {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.file.read(place)
    }
}

impl Seek for PlainFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Opens a file without waiting for a pipe's other end.
fn open_at_once(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK);
    options.open(path)
}

fn check_plain(found: &Metadata) -> io::Result<()> {
    let kind = found.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let got = if kind.is_dir() { "a folder" } else { "a pipe, a socket or a device" };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a plain file, got {got}")))
}

/// Replaces a file as a whole: the new bytes are on the disk, in a temporary file of the same folder, before the name points to them.
/// Temporary files of the same name that killed processes have left are removed first.
///
/// # Errors
/// [`Error::File`] with the system's reason, or when something else than a plain file is there; what was there is untouched then.
pub fn replace_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    replace_file_by(path.as_ref(), |mut file| file.write_all(bytes))
}

/// [`replace_file`] by what `write` writes to the temporary file.
pub(crate) fn replace_file_by(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<()> {
    Replacement::write(path, write)?.put()
}

/// A whole file that waits under a temporary name, on the disk, to get its own. Dropped before that it is gone.
#[derive(Debug)]
pub(crate) struct Replacement {
    file: NamedTempFile,
    path: PathBuf,
}

impl Replacement {
    /// Writes it; what is at `path` stays. See [`replace_file`].
    ///
    /// # Errors
    /// As for [`replace_file`].
    pub(crate) fn write(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<Self> {
        sweep(path);
        let written = || {
            // To rename over a device would take it away from everybody.
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

    /// Gives it its name, in one step: what was there is gone.
    ///
    /// # Errors
    /// [`Error::File`] with the system's reason; what was there is untouched then.
    pub(crate) fn put(self) -> Result<()> {
        let Self { file, path } = self;
        let renamed = file.persist(&path).map_err(|failed| failed.error);
        // The rename itself is on the disk once the folder is.
        renamed.and_then(|_| sync_folder(folder(&path))).map_err(|reason| Error::file(&path, reason))
    }
}

/// Waits until the names in a folder are on the disk.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes a file, if it is there, and waits until its name is gone from the disk.
///
/// # Errors
/// [`Error::File`] with the system's reason.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    let removed = match fs::remove_file(path) {
        Err(reason) if reason.kind() == io::ErrorKind::NotFound => return Ok(()),
        removed => removed.and_then(|()| sync_folder(folder(path))),
    };
    removed.map_err(|reason| Error::file(path, reason))
}

/// Removes temporary files that killed processes have left beside `path`: those that nobody has locked. What cannot be removed stays.
pub(crate) fn sweep(path: &Path) {
    let Some(start) = temporary_start(path) else { return };
    let Ok(entries) = fs::read_dir(folder(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(&start)?.strip_suffix(TEMPORARY));
        let ours = random.is_some_and(|random| random.len() == RANDOM && !random.contains('.'));
        // Not through a symbolic link, which is none of ours.
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(file) = open_at_once(OpenOptions::new().read(true), &entry.path()) else { continue };
        if file.try_lock().is_ok() {
            // While it is locked, so that no writer takes it for its own. Another process may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A locked temporary file for `path`. It goes away with its value, and by [`sweep`] if the process is killed.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "expected the name of a file");
    let start = temporary_start(path).ok_or_else(no_name)?;
    let mut options = tempfile::Builder::new();
    options.prefix(&start).rand_bytes(RANDOM).suffix(TEMPORARY);
    // A temporary file is its owner's alone; a checkpoint is as readable as any file (the umask still applies).
    #[cfg(unix)]
    options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    for _ in 0..ATTEMPTS {
        let file = options.tempfile_in(folder(path))?;
        // Another process may sweep it before it is locked.
        match file.as_file().try_lock() {
            Ok(()) if file.path().exists() => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            // Where files cannot be locked nobody sweeps.
            Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
    Err(io::Error::other("its temporary file is taken away again and again"))
}

/// How the names of the temporary files for `path` start.
fn temporary_start(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    Some(format!(".{}.", &name[..name.floor_char_boundary(OWN_NAME)]))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A folder that one run at a time has to itself, from [`RunLock::hold`] to the drop or the end of the process, however it ends.
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
    ///
    /// # Errors
    /// [`Error::File`] when another run has it, with its process if that can be told; with the system's reason where files cannot be
    /// made or locked.
    pub fn hold(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join(LOCK);
        let failed = |reason: io::Error| Error::file(&path, reason);
        loop {
            let mut options = OpenOptions::new();
            let file =
                open_at_once(options.read(true).write(true).create(true).truncate(false), &path).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(Error::file(folder, taken(file))),
                Err(TryLockError::Error(reason)) => return Err(failed(reason)),
            }
            // A run that has ended since took the file away: what is locked then is no longer in the folder.
            if is_at(&file, &path) {
                file.set_len(0).and_then(|()| write!(&file, "{}", std::process::id())).map_err(failed)?;
                return Ok(Self { file, path });
            }
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

/// Why a lock cannot be had.
fn taken(file: File) -> String {
    let mut text = String::new();
    let process = file.take(20).read_to_string(&mut text).ok().and_then(|_| text.parse::<u32>().ok());
    let process = process.map_or(String::new(), |process| format!(" (process {process})"));
    format!("another run{process} writes here: wait for its end, end it, or choose another folder")
}

/// Whether `path` still leads to this open file.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    let same = |a: Metadata, b: Metadata| {
        use std::os::unix::fs::MetadataExt;
        (a.dev(), a.ino()) == (b.dev(), b.ino())
    };
    // Elsewhere no open file can be removed.
    #[cfg(not(unix))]
    let same = |_: Metadata, _: Metadata| true;
    file.metadata().is_ok_and(|open| fs::metadata(path).is_ok_and(|there| same(open, there)))
}
