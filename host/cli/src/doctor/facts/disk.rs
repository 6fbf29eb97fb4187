//! The disk for checkpoints.

use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Disk {
    pub checkpoints: Option<String>,
    /// The bytes available to an unprivileged user.
    pub available_bytes: Option<u64>,
    pub writable: Option<bool>,
}

impl Disk {
    pub(crate) fn gather(folder: &Path) -> Result<Self, String> {
        let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
        let found = statvfs(there).map_err(|error| format!("{}: {error}", there.display()))?;
        Ok(Self {
            checkpoints: Some(there.display().to_string()),
            available_bytes: Some(found.f_bavail.saturating_mul(found.f_frsize)),
            writable: Some(tempfile::tempfile_in(there).is_ok()),
        })
    }
}
