//! Which kernels were seen to be right, remembered in the user's cache: a small text for each.
//!
//! Invariant: what stands there can only spare a test, never fail or delay an opening. A file counts if it begins with exactly the lines
//! of what is asked for; anything else is tested again, with a warning.

#![forbid(unsafe_code)]

use super::{Form, Tested, of_all};
use crate::digest::hex;
use crate::driver::{Description, Device};
use crate::error::Error;
use crate::files::{PlainFile, replace_file};
use etcetera::BaseStrategy;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// A file that is longer is none of ours.
const MOST_BYTES: u64 = 4096;
/// Digits of a file's name.
const NAME: usize = 32;

/// What decides whether kernels are right: what they were compiled from, by what, for what; and what they were asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key(String);

impl Key {
    /// None for a device without PTX.
    pub(super) fn of(description: &Description) -> Option<Self> {
        let Description { name, capability: Some(capability), driver: Some(driver), ptx: Some(ptx), .. } = description
        else {
            return None;
        };
        let cases = of_all(Form::Smallest.golden());
        Some(Self(format!("ptx {ptx}\ngpu {name}, sm_{capability}\ndriver {driver}\ncases {cases}\n")))
    }

    fn file(&self) -> String {
        format!("{}.txt", &hex(&Sha256::digest(&self.0))[..NAME])
    }
}

/// The folder in which it is remembered.
#[derive(Clone, Debug)]
pub(super) struct Remembered {
    folder: PathBuf,
}

impl Remembered {
    /// The user's: `stepscope/kernels` in what the system has for caches (`XDG_CACHE_HOME`, or `.cache` in `HOME`). None, and a warning,
    /// where there is no such place.
    pub(super) fn of_user() -> Option<Self> {
        let cache = etcetera::choose_base_strategy().ok().map(|base| base.cache_dir());
        // A relative path would be another one for each program.
        let Some(cache) = cache.filter(|cache| cache.is_absolute()) else {
            tracing::warn!("no home folder to remember tested kernels in: they are tested whenever a device is opened");
            return None;
        };
        Some(Self::at(cache.join("stepscope").join("kernels")))
    }

    pub(super) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The file that says that these kernels are right, if it does.
    pub(super) fn find(&self, key: &Key) -> Option<PathBuf> {
        let path = self.folder.join(key.file());
        match read(&path) {
            Ok(text) if text.starts_with(key.0.as_bytes()) => return Some(path),
            Ok(_) => {
                tracing::warn!(path = %path.display(), "this is no record of tested kernels; they are tested again")
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "unreadable; the kernels are tested again"),
        }
        None
    }

    /// Writes that these kernels are right; a warning where that fails.
    pub(super) fn remember(&self, key: &Key, tested: Tested) {
        let path = self.folder.join(key.file());
        let text = format!("{}stepscope {}: {tested}\n", key.0, env!("CARGO_PKG_VERSION"));
        let made = fs::create_dir_all(&self.folder).map_err(|reason| Error::file(&self.folder, reason));
        if let Err(error) = made.and_then(|()| replace_file(&path, text.as_bytes())) {
            tracing::warn!(%error, "it is not remembered that the kernels are right; they are tested again when the device is opened");
        }
    }

    /// Removes what says that these kernels are right: they are not.
    pub(super) fn forget(&self, key: &Key) {
        let path = self.folder.join(key.file());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "this says that wrong kernels are right: remove it");
            }
            _ => {}
        }
    }
}

/// A small plain file.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = PlainFile::open(path)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The file that remembers that this device's kernels were seen to be right; none where they were not, or are no PTX.
pub fn remembered(device: &Device) -> Option<PathBuf> {
    let key = Key::of(device.description())?;
    Remembered::of_user()?.find(&key)
}
