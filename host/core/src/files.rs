//! Files: read as they were when they were opened, and replaced as a whole.
//!
//! Every path that a user supplies is opened here. Invariant: no call blocks on what a path leads
//! to, and none reads more than its caller's bound. Leftovers of dead processes never block a later
//! run.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::file_kind::FileKind;
use crate::shortage::HostMemory;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Take, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tempfile::NamedTempFile;

/// The suffix of temporary file names. The file's own name and [`RANDOM`] characters precede it.
const TEMPORARY: &str = ".stepscope-tmp";
/// The number of random characters in a temporary file's name.
const RANDOM: usize = 6;
/// The number of bytes of the file's own name in it, because names have a limit.
const OWN_NAME: usize = 200;
/// The number of temporary files that are tried. A try fails if another process removes the file.
const ATTEMPTS: usize = 16;

/// A plain file, open for reading. It is not a folder, pipe or device, on which a reader could
/// block forever. It is read up to the length that it had when it was opened.
/// [`PlainFile::check_unchanged`] checks that it has not changed since.
#[derive(Debug)]
pub struct PlainFile {
    file: Take<File>,
    len: u64,
    modified: Option<SystemTime>,
}

impl PlainFile {
    /// Opens a file without blocking.
    ///
    /// # Errors
    /// The system's error, or [`io::ErrorKind::InvalidInput`] that names the kind if it is not a
    /// plain file.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        // Opening a device may already have an effect, so it is not even opened.
        check_plain(&fs::metadata(path)?)?;
        let file = open_at_once(OpenOptions::new().read(true), path)?;
        // The path may lead elsewhere by now. Only the opened file counts.
        let found = file.metadata()?;
        check_plain(&found)?;
        Ok(Self { len: found.len(), modified: found.modified().ok(), file: file.take(found.len()) })
    }

    /// Reads all of a file of at most `most` bytes, such as a configuration, an index or a list.
    ///
    /// ```
    /// let file = tempfile::NamedTempFile::new()?;
    /// std::fs::write(file.path(), "{}")?;
    /// assert_eq!(stepscope::PlainFile::read_whole(file.path(), 1 << 20)?, b"{}");
    /// let refused = stepscope::PlainFile::read_whole(file.path(), 1).unwrap_err().to_string();
    /// assert!(refused.contains("2 bytes") && refused.contains("at most 1"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`PlainFile::open`] and [`PlainFile::check_unchanged`].
    /// [`io::ErrorKind::FileTooLarge`] if the file has more bytes than `most`, or than the host has
    /// available, before any is read.
    pub fn read_whole(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
        Self::open(path)?.all_bytes(most)
    }

    /// Reads all of an opened file, like [`PlainFile::read_whole`].
    ///
    /// # Errors
    /// The errors of [`PlainFile::read_whole`].
    pub fn all_bytes(&mut self, most: u64) -> io::Result<Vec<u8>> {
        if self.len > most {
            let reason = format!("has {} bytes, but may have at most {most}: choose the right file", self.len);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        }
        self.file.rewind()?;
        let bytes = self.next_bytes(self.len)?;
        self.check_unchanged()?;
        Ok(bytes)
    }

    /// Returns the kind of the file by its first bytes, if it is recognized. The reading position
    /// does not change.
    ///
    /// # Errors
    /// The system's error.
    pub fn kind(&mut self) -> io::Result<Option<FileKind>> {
        let place = self.file.stream_position()?;
        let mut start = Vec::new();
        self.file.rewind()?;
        self.file.by_ref().take(FileKind::BYTES as u64).read_to_end(&mut start)?;
        self.file.seek(SeekFrom::Start(place))?;
        Ok(FileKind::of(&start))
    }

    /// Returns the next `count` bytes, after checking that the host has memory for them.
    pub fn next_bytes(&mut self, count: u64) -> io::Result<Vec<u8>> {
        // The system may grant memory that it does not have, and kill a process that writes to it.
        let available = HostMemory::available_bytes();
        let too_large = |reason: String| io::Error::new(io::ErrorKind::FileTooLarge, reason);
        if count > available {
            return Err(too_large(format!(
                "expected at most the {available} bytes that the host, or this process's cgroup, has available, got {count}: free some \
                 memory"
            )));
        }
        let mut bytes = Vec::new();
        let room = usize::try_from(count).ok().filter(|&room| bytes.try_reserve_exact(room).is_ok());
        let room = room.ok_or_else(|| too_large(format!("no memory for its {count} bytes")))?;
        let read = self.take(count).read_to_end(&mut bytes)?;
        if read != room {
            let reason = format!("truncated: expected {count} more bytes, got {read}");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        Ok(bytes)
    }

    /// Checks like [`PlainFile::check_unchanged`], and also returns an error if the path leads to
    /// another file by now.
    pub fn check_still_at(&self, path: &Path) -> io::Result<()> {
        self.check_unchanged()?;
        if is_at(self.file.get_ref(), path) {
            return Ok(());
        }
        Err(io::Error::other("was replaced or removed while it was read: read it again when no process writes there"))
    }

    /// Returns the file's length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if it was empty then.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns an error if the file was truncated, extended or written to since it was opened, as
    /// far as its length and modification time show. Replacing it with another file does not change
    /// this one.
    ///
    /// # Errors
    /// The system's error, or a description of the change.
    pub fn check_unchanged(&self) -> io::Result<()> {
        let now = self.file.get_ref().metadata()?;
        let changed = if now.len() != self.len {
            format!("had {} bytes when it was opened, and has {} now", self.len, now.len())
        } else if now.modified().ok() != self.modified {
            "was written to while it was read".into()
        } else {
            return Ok(());
        };
        Err(io::Error::other(format!("{changed}: read it again when no process writes to it")))
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
#[expect(clippy::disallowed_methods, reason = "the one place that opens files")]
fn open_at_once(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK | libc::O_NOCTTY);
    options.open(path)
}

/// Opens a plain file that lies in its folder itself. Symbolic links are not followed.
#[expect(clippy::disallowed_methods, reason = "the one place that opens files")]
pub fn open_without_links(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    if let Ok(found) = fs::symlink_metadata(path) {
        check_plain(&found)?;
    }
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW);
    let file = options.open(path)?;
    check_plain(&file.metadata()?)?;
    Ok(file)
}

fn check_plain(found: &Metadata) -> io::Result<()> {
    let kind = found.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let got = match kind {
        _ if kind.is_dir() => "a folder",
        _ if kind.is_symlink() => "a symbolic link",
        _ => "a pipe, a socket or a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a plain file, got {got}")))
}

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
    ///
    /// # Errors
    /// The errors of [`replace_file`].
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
#[expect(clippy::disallowed_methods, reason = "a folder, in which a file was made")]
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

/// Returns true if `path` still leads to this open file.
pub fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    let same = |a: Metadata, b: Metadata| {
        use std::os::unix::fs::MetadataExt;
        (a.dev(), a.ino()) == (b.dev(), b.ino())
    };
    // On other systems an open file cannot be removed.
    #[cfg(not(unix))]
    let same = |_: Metadata, _: Metadata| true;
    file.metadata().is_ok_and(|open| fs::metadata(path).is_ok_and(|there| same(open, there)))
}
