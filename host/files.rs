//! Files: read as they were when they were opened, and replaced as a whole.
//!
//! Every path that a user gives is opened here. Invariant: no call waits for what a path leads to,
//! none reads more than its caller has bounded, and nothing that a dead process leaves behind stops
//! anybody.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::file_kind::FileKind;
use crate::shortage::HostMemory;
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

    /// Reads all of a file of at most `most` bytes: a configuration, an index, a list.
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
    /// Those of [`PlainFile::open`] and [`PlainFile::check_unchanged`];
    /// [`io::ErrorKind::FileTooLarge`] for a file of more bytes, or of more than the host has
    /// available, before any is read.
    pub fn read_whole(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
        Self::open(path)?.all_bytes(most)
    }

    /// [`PlainFile::read_whole`] of a file that has been opened.
    ///
    /// # Errors
    /// As for [`PlainFile::read_whole`].
    pub fn all_bytes(&mut self, most: u64) -> io::Result<Vec<u8>> {
        if self.len > most {
            let reason = format!("has {} bytes, and may have at most {most}: give the right file", self.len);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        }
        self.file.rewind()?;
        let bytes = self.next_bytes(self.len)?;
        self.check_unchanged()?;
        Ok(bytes)
    }

    /// The kind of the file by its first bytes, if it is known. Reading goes on from where it was.
    ///
    /// # Errors
    /// The system's.
    pub fn kind(&mut self) -> io::Result<Option<FileKind>> {
        let place = self.file.stream_position()?;
        let mut start = Vec::new();
        self.file.rewind()?;
        self.file.by_ref().take(FileKind::BYTES as u64).read_to_end(&mut start)?;
        self.file.seek(SeekFrom::Start(place))?;
        Ok(FileKind::of(&start))
    }

    /// The next bytes, so many, once the host is known to have memory for them.
    pub(crate) fn next_bytes(&mut self, count: u64) -> io::Result<Vec<u8>> {
        // The system may grant memory that it does not have, and end a process that writes to it.
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
            let reason = format!("cut: expected {count} bytes more, got {read}");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        Ok(bytes)
    }

    /// [`PlainFile::check_unchanged`], and an error when the path leads to another file by now.
    pub(crate) fn check_still_at(&self, path: &Path) -> io::Result<()> {
        self.check_unchanged()?;
        if is_at(self.file.get_ref(), path) {
            return Ok(());
        }
        Err(io::Error::other("was replaced or removed while it was read: read it again when nobody writes there"))
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
#[expect(clippy::disallowed_methods, reason = "the one place that opens files")]
fn open_at_once(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK | libc::O_NOCTTY);
    options.open(path)
}

/// [`open_at_once`] of a plain file that is in its folder itself: a symbolic link is not followed.
#[expect(clippy::disallowed_methods, reason = "the one place that opens files")]
pub(crate) fn open_without_links(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
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
#[expect(clippy::disallowed_methods, reason = "a folder, in which a file was made")]
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
        let Ok(file) = open_without_links(OpenOptions::new().read(true), &entry.path()) else { continue };
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

/// Whether `path` still leads to this open file.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
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
