//! Plain files, read as they were when they were opened.
//!
//! Invariant: no call blocks on what a path leads to, and none reads more than its caller's bound.

#![forbid(unsafe_code)]

use super::kind::FileKind;
use crate::host_memory::check_room;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Take};
use std::path::Path;
use std::time::SystemTime;

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
    /// assert_eq!(stepscope::files::PlainFile::read_whole(file.path(), 1 << 20)?, b"{}");
    /// let refused = stepscope::files::PlainFile::read_whole(file.path(), 1).unwrap_err().to_string();
    /// assert!(refused.contains("2 bytes") && refused.contains("at most 1"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`] if the file has more bytes than `most`, or than the host has
    /// available, before any is read.
    pub fn read_whole(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
        Self::open(path)?.all_bytes(most)
    }

    /// Reads all of an opened file, like [`PlainFile::read_whole`].
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
        check_room(count.into())?;
        let mut bytes = Vec::new();
        let room = usize::try_from(count).ok().filter(|&room| bytes.try_reserve_exact(room).is_ok());
        let refused = || io::Error::new(io::ErrorKind::FileTooLarge, format!("no memory for its {count} bytes"));
        let room = room.ok_or_else(refused)?;
        let read = self.take(count).read_to_end(&mut bytes)?;
        if read != room {
            return Err(truncated(format!("expected {count} more bytes, got {read}")));
        }
        Ok(bytes)
    }

    /// Fills `place` with the bytes from `offset` on. Several threads may call it at a time.
    pub fn fill_from(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        #[cfg(unix)]
        let filled = std::os::unix::fs::FileExt::read_exact_at(self.file.get_ref(), place, offset);
        #[cfg(not(unix))]
        let filled = {
            // The position belongs to the open file.
            static POSITION: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _position = POSITION.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let mut file = self.file.get_ref();
            file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(place))
        };
        filled.map_err(|reason| match reason.kind() {
            io::ErrorKind::UnexpectedEof => truncated(format!("expected {} bytes from byte {offset} on", place.len())),
            _ => reason,
        })
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

fn truncated(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("truncated: {reason}"))
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

pub(super) fn check_plain(found: &Metadata) -> io::Result<()> {
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
