//! A record of kernels that have passed their test, with one small text file each in the user's
//! cache.
//!
//! Invariant: a record can only save a test, and never fails or delays opening a device. A file is
//! valid if it begins with exactly the lines of the requested key. Otherwise the kernels are tested
//! again, with a warning.

#![forbid(unsafe_code)]

use super::description::Description;
use super::self_test::{KernelTest, Tested};
use crate::digest::hex;
use crate::error::{Error, Result};
use crate::files::{PlainFile, replace_file};
use etcetera::BaseStrategy;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest valid file.
const MOST_BYTES: u64 = 4096;
/// The number of digits of a file's name.
const NAME: usize = 32;

/// The key of a test: the source of the kernels, the compiler, the GPU, and the cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key(String);

impl Key {
    /// Returns the key of a device, or none for a device without PTX.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a program that links no test of kernels.
    pub(super) fn of(description: &Description) -> Result<Option<Self>> {
        let Description { name, capability: Some(capability), driver: Some(driver), ptx: Some(ptx), .. } = description
        else {
            return Ok(None);
        };
        let cases = hex(&Sha256::digest((KernelTest::registered()?.digests)()));
        Ok(Some(Self(format!("ptx {ptx}\ngpu {name}, sm_{capability}\ndriver {driver}\ncases {cases}\n"))))
    }

    fn file(&self) -> String {
        format!("{}.txt", &hex(&Sha256::digest(&self.0))[..NAME])
    }
}

/// The folder of the records.
#[derive(Clone, Debug)]
pub(super) struct Remembered {
    folder: PathBuf,
}

impl Remembered {
    /// Opens the user's records: `stepscope/kernels` in the system's cache folder
    /// (`XDG_CACHE_HOME`, or `.cache` in `HOME`). Returns none, with a warning, if there is no such
    /// folder.
    pub(super) fn of_user() -> Option<Self> {
        let cache = etcetera::choose_base_strategy().ok().map(|base| base.cache_dir());
        // A relative path would be different for each program.
        let Some(cache) = cache.filter(|cache| cache.is_absolute()) else {
            tracing::warn!("no cache folder to record tested kernels in: they are tested whenever a device is opened");
            return None;
        };
        Some(Self::at(cache.join("stepscope").join("kernels")))
    }

    pub(super) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the record that these kernels have passed, if there is one.
    pub(super) fn find(&self, key: &Key) -> Option<PathBuf> {
        let path = self.folder.join(key.file());
        match read(&path) {
            Ok(text) if text.starts_with(key.0.as_bytes()) => return Some(path),
            Ok(_) => {
                tracing::warn!(path = %path.display(), "this is not a record of tested kernels; they are tested again")
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "unreadable; the kernels are tested again"),
        }
        None
    }

    /// Records that these kernels have passed. Logs a warning if that fails.
    pub(super) fn remember(&self, key: &Key, tested: Tested) {
        let path = self.folder.join(key.file());
        let text = format!("{}stepscope {}: {tested}\n", key.0, env!("CARGO_PKG_VERSION"));
        let made = fs::create_dir_all(&self.folder).map_err(|reason| Error::file(&self.folder, reason));
        if let Err(error) = made.and_then(|()| replace_file(&path, text.as_bytes())) {
            tracing::warn!(%error, "the kernels passed their test, but this could not be recorded; they are tested again when the device is next opened");
        }
    }

    /// Removes the record of these kernels, because they have failed.
    pub(super) fn forget(&self, key: &Key) {
        let path = self.folder.join(key.file());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "this file wrongly records that the kernels passed their test: remove it");
            }
            _ => {}
        }
    }
}

/// Reads a small plain file.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = PlainFile::open(path)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}
