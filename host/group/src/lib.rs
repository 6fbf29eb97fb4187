//! Groups: N ranks, with one device each, that train one model.
//!
//! A [`Group`] connects a rank to the others. A `Mesh` of connections announces and
//! compares every collective before it is queued. A link between the devices carries its data.
//!
//! Invariant: before a collective is queued, all ranks compare its sequence number, op, element
//! count and source line. Every wait for another rank has the group's deadline.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[doc(hidden)]
pub mod agreement;
mod buckets;
mod channel;
mod config;
mod environment;
mod link;
mod listener;
mod mesh;
mod peer;
mod rendezvous;
mod secret;
mod slices;
mod table;
#[cfg(test)]
mod testing;
mod wire;

pub use config::GroupConfig;
#[doc(hidden)]
pub use slices::Slices;
pub use stepscope_core::{DifferentSetting, Disagreement, ValueOnRanks};
pub use stepscope_core::{LastHeard, RankFault, RankFaultKind, RendezvousFault, RendezvousFaultKind};

use agreement::{Settings, expect_same};
use mesh::{Call, Mesh};
use serde::de::DeserializeOwned;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;
use stepscope_core::internals::{DeviceLink, Memory, OfRank, Wire, exchange};
use stepscope_core::{Device, Error, Result};
use wire::MOST_WORD;

/// The membership of a rank in a group whose ranks train one model, each on its own device. Clones
/// share it.
///
/// Pass it to `TrainState::in_group`. Nothing else in a program
/// changes. Ranks are processes, on one or several hosts, or threads of one process on the
/// emulator.
///
/// ```
/// use stepscope::group::{Group, GroupConfig};
/// use stepscope::prelude::*;
///
/// # fn main() -> Result<()> {
/// let ranks = GroupConfig::on_this_host(2)?.into_iter().map(|config| {
///     std::thread::spawn(move || -> Result<usize> {
///         let device = Device::open(DeviceKind::Emulated)?;
///         let group = Group::join(&device, &config)?;
///         Ok(group.rank())
///     })
/// });
/// let ranks: Vec<_> = ranks.collect();
/// let met: Vec<usize> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_>>()?;
/// assert_eq!(met, [0, 1]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Group(Arc<Member>);

#[derive(Debug)]
struct Member {
    mesh: Arc<Mesh>,
    /// The link to the other ranks' devices. A single rank has no link.
    link: Option<Arc<DeviceLink>>,
}

impl Drop for Member {
    /// The link also holds the mesh, and its last owner may be on another thread than the one that
    /// panics.
    fn drop(&mut self) {
        self.mesh.broadcast_panic();
    }
}

impl Wire for Mesh {
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        Self::send(self, to, bytes)
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        Self::receive(self, from, bytes)
    }
}

impl Group {
    /// Meets the other ranks, and links this rank's device with theirs. Waits until all ranks
    /// have arrived, at most until the configuration's deadline.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] that names a rank which has not arrived, does not belong to this
    /// group, or has another secret or version. [`Error::Disagreement`] for devices of different
    /// kinds. [`Error::Driver`] if NCCL cannot be used. [`Error::System`] if no thread can be
    /// started.
    #[track_caller]
    pub fn join(device: &Device, config: &GroupConfig) -> Result<Self> {
        let mesh = Mesh::join(config)?;
        let alone = Self(Arc::new(Member { mesh: Arc::clone(&mesh), link: None }));
        if mesh.ranks() == 1 {
            return Ok(alone);
        }
        let linked = alone.link_devices(device, Location::caller());
        let link = Arc::new(alone.broadcast_error(linked)?);
        let of_mesh = Arc::downgrade(&link);
        // Work on the device that waits for a lost rank would otherwise wait forever.
        mesh.at_fault(move || of_mesh.upgrade().iter().for_each(|link| link.give_up()))?;
        Ok(Self(Arc::new(Member { mesh, link: Some(link) })))
    }

    fn link_devices(&self, device: &Device, location: &'static Location<'static>) -> Result<DeviceLink> {
        let mesh = &self.0.mesh;
        let settings = Settings::of(&[("kind of device", device.description().kind.to_string())]);
        self.compare("link", &settings, location)?;
        let name = if self.rank() == 0 { DeviceLink::name(device)? } else { Vec::new() };
        let call = Call { op: "link", element: "u8", count: 0, location };
        let names = mesh.agree(call, &name)?;
        let name = names.into_iter().next().expect("rank 0's");
        DeviceLink::join(device, name, (self.rank(), self.ranks()), Arc::clone(mesh) as _, mesh.deadline())
    }

    /// Returns this rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.0.mesh.rank()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.mesh.ranks()
    }

    /// Returns the parts of a batch that each of this rank's `shards / ranks` shards owns, if the
    /// batch has `parts` parts. If it has fewer parts than shards, some shards get none. This rank
    /// reads the values only of these parts, so a loader need not make the others.
    ///
    /// # Panics
    /// Panics if there are fewer shards than ranks.
    pub fn own_parts(&self, shards: usize, parts: usize) -> Vec<Range<usize>> {
        let own = shards / self.ranks();
        assert!(own > 0, "{shards} shards of {} ranks", self.ranks());
        let start = |shard: usize| (shard as u128 * parts as u128 / shards as u128) as usize;
        (self.rank() * own..(self.rank() + 1) * own).map(|shard| start(shard)..start(shard + 1)).collect()
    }

    /// Sends `word` to all ranks, and returns all words by rank. `op` and `count` must be equal on
    /// all ranks.
    pub fn agree(
        &self,
        op: &'static str,
        count: usize,
        word: &[u8],
        location: &'static Location<'static>,
    ) -> Result<Vec<Vec<u8>>> {
        self.0.mesh.agree(Call { op, element: "f32", count: count as u64, location }, word)
    }

    /// Parses the JSON words of an agreement.
    ///
    /// # Errors
    /// [`Error::Rank`] on all ranks if a word cannot be read.
    #[doc(hidden)]
    pub fn parse<T: DeserializeOwned>(&self, words: &[Vec<u8>]) -> Result<Vec<T>> {
        self.0.mesh.parse(words)
    }

    /// Compares settings of the program on all ranks, each a name and a value. All ranks must call
    /// it before the first update. Pass everything that decides the numbers of a run and that the
    /// library cannot see. Examples are a digest of the data, the model's configuration, and the
    /// seed that shuffles the samples. The library compares its own settings itself (see
    /// `TrainState::in_group`).
    ///
    /// ```
    /// use stepscope::group::{Group, GroupConfig};
    /// use stepscope::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// # let digest = "9f86d08188";
    /// let ranks = GroupConfig::on_this_host(2)?.into_iter().map(|config| {
    ///     std::thread::spawn(move || -> Result<()> {
    ///         let device = Device::open(DeviceKind::Emulated)?;
    ///         let group = Group::join(&device, &config)?;
    ///         let seed = 7 + group.rank(); // a mistake
    ///         group.agree_on(&[("data", digest.to_owned()), ("seed", seed.to_string())])
    ///     })
    /// });
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     let error = rank.join().unwrap().unwrap_err().to_string();
    ///     assert!(error.contains("`seed`: `7` on rank 0, `8` on rank 1"), "{error}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Disagreement`] on all ranks, with every setting that differs. [`Error::Misuse`] for
    /// a duplicate name, and for more than 64 KiB. [`Error::Rank`] if a rank does not arrive within
    /// the deadline.
    #[track_caller]
    pub fn agree_on(&self, settings: &[(impl AsRef<str>, impl AsRef<str>)]) -> Result<()> {
        self.compare("agree_on", &Settings::of(settings), Location::caller())
    }

    /// Compares the library's own settings, as [`Group::agree_on`] compares a program's.
    #[doc(hidden)]
    pub fn compare(&self, op: &'static str, own: &Settings, location: &'static Location<'static>) -> Result<()> {
        let compared = own.check().and_then(|()| {
            let word = serde_json::to_vec(own).expect("texts have a JSON form");
            if word.len() > MOST_WORD {
                let expected = format!("settings of at most {MOST_WORD} bytes together");
                return Err(Error::misuse(op, expected, word.len().to_string()));
            }
            let words = self.agree(op, 0, &word, location)?;
            expect_same(&self.parse::<Settings>(&words)?)
        });
        self.broadcast_error(compared)
    }

    /// Queues copies: sends each of `sends` to its rank, and overwrites each of `receives` with its
    /// rank's data. All ranks must call it after an agreement.
    ///
    /// # Safety
    /// Nothing frees this memory before the device has done what is queued so far.
    #[doc(hidden)]
    pub unsafe fn exchange(&self, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
        // SAFETY: what is queued next follows, and the memory lives that long, as the caller
        // promises.
        unsafe { self.exchange_beside(sends, receives)? };
        self.follow()
    }

    /// Queues copies that run concurrently with later work, until [`Group::follow`]. Before that,
    /// nothing may write this memory or read received data.
    ///
    /// # Safety
    /// Until [`Group::follow`], nothing frees this memory, writes it, or reads what is received.
    #[doc(hidden)]
    pub unsafe fn exchange_beside(&self, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
        self.0.link.as_ref().map_or(Ok(()), |link| {
            // SAFETY: as the caller promises.
            unsafe { exchange(link, sends, receives) }
        })
    }

    /// Makes work that is queued next run after all exchanges so far.
    #[doc(hidden)]
    pub fn follow(&self) -> Result<()> {
        self.0.link.as_ref().map_or(Ok(()), |link| link.follow())
    }

    /// Queues copies of each rank's parts of a region to all others. `of` returns the parts of each
    /// rank.
    ///
    /// # Safety
    /// Nothing frees the region before the device has done what is queued so far.
    #[doc(hidden)]
    pub unsafe fn gather(&self, of: impl Fn(usize) -> Vec<Memory<f32>>) -> Result<()> {
        let parts = |to: usize, whose: usize| of(whose).into_iter().map(move |part| (to, part));
        let others = || (0..self.ranks()).filter(|&rank| rank != self.rank());
        let sends: Vec<OfRank> = others().flat_map(|rank| parts(rank, self.rank())).collect();
        let receives: Vec<OfRank> = others().flat_map(|rank| parts(rank, rank)).collect();
        // SAFETY: the parts are of the region, which lives that long, as the caller promises.
        unsafe { self.exchange(&sends, &receives) }
    }

    /// Returns `result` unchanged, after sending an error to all ranks, which end with it. For a
    /// timeout of a device, the error names the rank that is late. If there already is a fault of
    /// another rank, or one that another rank found in this rank, it returns that fault. The fault
    /// has ended the link, so this rank's own error is only a consequence.
    #[doc(hidden)]
    pub fn broadcast_error<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match (error, self.0.mesh.fault_of_others()) {
            // All ranks have found this error.
            (error @ Error::Disagreement(_), _) => error,
            (_, Some(fault)) => fault,
            (Error::Timeout { waited, .. }, _) if self.ranks() > 1 => self.0.mesh.late(waited),
            (error, _) => {
                self.0.mesh.fail(&error);
                error
            }
        })
    }

    /// Returns the longest time that a rank waits for the others.
    pub fn deadline(&self) -> Duration {
        self.0.mesh.deadline()
    }
}
