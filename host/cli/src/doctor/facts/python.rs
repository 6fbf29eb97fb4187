//! Python packages whose wheels are for another processor.

use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;
use stepscope::files::PlainFile;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Python {
    pub folders: Option<u64>,
    /// Entries `package: tag` of wheels that are neither for this processor nor for any.
    pub foreign_wheels: Vec<String>,
}

impl Python {
    /// Searches the active environment, and the user's and the system's folders.
    pub(crate) fn gather() -> Self {
        let homes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
        let user = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
        let roots = homes.chain(user).chain(["/usr/local".into(), "/usr".into()]);
        let list = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let versions =
            roots.flat_map(|root| list(root.join("lib"))).filter(|path| path.to_string_lossy().contains("python3"));
        let folders: Vec<_> = versions
            .flat_map(|path| [path.join("site-packages"), path.join("dist-packages")])
            .filter(|path| path.is_dir())
            .collect();
        let mut found = Self { folders: Some(folders.len() as u64), ..Self::default() };
        for path in folders.into_iter().flat_map(list) {
            let Ok(wheel) = PlainFile::read_whole(path.join("WHEEL"), 1 << 16) else { continue };
            let wheel = String::from_utf8_lossy(&wheel);
            let tags: Vec<_> = wheel.lines().filter_map(|line| line.strip_prefix("Tag:")).map(str::trim).collect();
            let runs = |tag: &&str| tag.ends_with("-any") || tag.contains(std::env::consts::ARCH);
            if let Some(tag) = tags.first()
                && !tags.iter().any(runs)
            {
                let name = path.file_stem().unwrap_or_default().to_string_lossy();
                found.foreign_wheels.push(format!("{name}: {tag}"));
            }
        }
        found.foreign_wheels.sort();
        found
    }
}
