//! A file as memory, for sources of uploads that are larger than a copy should be.
//!
//! Invariant: the file was as long as the map when it was mapped, and still is whenever [`Mapped::check`] says so: a page
//! beyond a file's end would end the process.

use crate::error::{Error, Result};
use memmap2::Mmap;
use std::fs::File;
use std::ops::Deref;
use std::path::Path;

/// A file's bytes, read when they are first touched.
#[derive(Debug)]
pub(crate) struct Mapped {
    file: File,
    map: Mmap,
}

impl Mapped {
    /// Maps a whole file.
    ///
    /// # Errors
    /// [`Error::File`] with the system's reason.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |reason| Error::file(path, reason);
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the bytes are read as plain bytes, and a file that others write is caught by its digest. Our own writer
        // replaces files and never writes into one; `check` sees one that was cut.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self { file, map })
    }

    /// An error when the file has been cut since. Look before reading what has not been read for a while.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let bytes = self.file.metadata().map_err(|reason| Error::file(path, reason))?.len();
        if bytes == self.map.len() as u64 {
            return Ok(());
        }
        Err(Error::file(path, format!("had {} bytes when it was loaded, and has {bytes} now", self.map.len())))
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
