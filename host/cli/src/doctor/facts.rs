//! The facts about a machine: plain data, gathered once and not yet judged.
//!
//! Invariant: a fact that could not be read is none, and `unread` has the reason.

mod disk;
mod gpu;
mod host;
mod load;
mod network;
mod python;
mod training;

pub(crate) use disk::Disk;
pub(crate) use gpu::Gpu;
pub(crate) use host::Host;
pub(crate) use load::Load;
pub(crate) use network::Network;
pub(crate) use python::Python;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use stepscope::files::PlainFile;

/// The largest facts file.
const MAX_BYTES: u64 = 16 << 20;

/// Facts about one machine at one time. GB and Gb are powers of ten.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Facts {
    /// The origin of the facts: this program, or the person who wrote them and their sources.
    pub source: String,
    pub host: Host,
    pub gpu: Gpu,
    pub load: Load,
    pub network: Network,
    pub python: Python,
    pub disk: Disk,
    /// The reasons why parts are missing, by field name.
    pub unread: BTreeMap<String, String>,
}

impl Facts {
    /// Gathers the facts of this machine, in less than a minute.
    pub(crate) fn gather(checkpoints: &Path) -> Self {
        let mut unread = BTreeMap::new();
        let checkpoints = checkpoints.to_owned();
        let host = within(2, "host", &mut unread, || Ok(Host::gather()));
        let disk = within(2, "disk", &mut unread, move || Disk::gather(&checkpoints));
        let network = within(2, "network", &mut unread, Network::gather);
        let python = within(2, "python", &mut unread, || Ok(Python::gather()));
        let gpu = within(8, "gpu", &mut unread, Gpu::gather);
        let load = within(40, "load", &mut unread, Load::gather);
        Self { source: "stepscope doctor, this machine".into(), host, gpu, load, network, python, disk, unread }
    }

    /// Reads facts from a file.
    pub(crate) fn read(path: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        Ok(serde_json::from_slice(&PlainFile::read_whole(path, MAX_BYTES)?)?)
    }

    /// Returns the reason why a part is missing.
    pub(crate) fn why_unknown(&self, part: &str) -> &str {
        self.unread.get(part).map_or("not among the facts", String::as_str)
    }
}

/// Runs `read` with a deadline. If it fails, returns the default and records the reason.
fn within<T: Default + Send + 'static>(
    seconds: u64,
    name: &str,
    unread: &mut BTreeMap<String, String>,
    read: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let started = thread::Builder::new().name(name.into()).spawn(move || drop(sender.send(read())));
    let found = match started {
        Err(error) => Err(format!("cannot start a thread: {error}")),
        Ok(_) => match receiver.recv_timeout(Duration::from_secs(seconds)) {
            Ok(found) => found,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("no answer within {seconds} s")),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err("the reader panicked".into()),
        },
    };
    found.unwrap_or_else(|why| {
        unread.insert(name.into(), why);
        T::default()
    })
}
