//! What a machine is found to be: plain data, gathered once, without judgement.
//!
//! Invariant: what could not be read is none, and `unread` says why.

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
use stepscope::PlainFile;

/// The largest file of facts.
const MAX_BYTES: u64 = 16 << 20;

/// Of one machine, at one time. Bytes are of 8 bits, GB and Gb are powers of ten.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Facts {
    /// Where they are from: this program, or who wrote them and from what.
    pub source: String,
    pub host: Host,
    pub gpu: Gpu,
    pub load: Load,
    pub network: Network,
    pub python: Python,
    pub disk: Disk,
    /// Why a part is not known, by its name here.
    pub unread: BTreeMap<String, String>,
}

impl Facts {
    /// Of this machine, in less than a minute.
    pub(crate) fn gather(checkpoints: &Path) -> Self {
        let mut unread = BTreeMap::new();
        let checkpoints = checkpoints.to_owned();
        let host = within(2, "host", &mut unread, || Ok(Host::gather()));
        let disk = within(2, "disk", &mut unread, move || Disk::gather(&checkpoints));
        let network = within(2, "network", &mut unread, Network::gather);
        let python = within(2, "python", &mut unread, || Ok(Python::gather()));
        let gpu = within(8, "gpu", &mut unread, Gpu::gather);
        let load = within(40, "load", &mut unread, Load::gather);
        Self { source: "examples/doctor, this machine".into(), host, gpu, load, network, python, disk, unread }
    }

    /// Those of a file.
    pub(crate) fn read(path: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        Ok(serde_json::from_slice(&PlainFile::read_whole(path, MAX_BYTES)?)?)
    }

    /// Why a part is not known.
    pub(crate) fn why_unknown(&self, part: &str) -> &str {
        self.unread.get(part).map_or("not among the facts", String::as_str)
    }
}

/// What `read` gives within the seconds; otherwise nothing, and why.
fn within<T: Default + Send + 'static>(
    seconds: u64,
    name: &str,
    unread: &mut BTreeMap<String, String>,
    read: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let started = thread::Builder::new().name(name.into()).spawn(move || drop(sender.send(read())));
    let found = match started {
        Err(error) => Err(format!("no thread could be started: {error}")),
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
