//! Groups: N ranks, one device a rank, that train one model.
//!
//! A [`Group`] is a rank's way to the others: a [`Mesh`](mesh::Mesh) of connections, on which every collective is announced and compared
//! before it is queued, and a link between the devices, which carries its bytes. Invariant: no collective is queued that not all ranks
//! have agreed on, by number, op, elements and line, and no wait for another rank is without the group's deadline.

#![forbid(unsafe_code)]

pub(crate) mod agreement;
mod buckets;
mod config;
pub(crate) mod disagreement;
mod door;
mod environment;
pub(crate) mod fault;
mod link;
mod meeting;
mod mesh;
mod peer;
mod secret;
mod slices;
mod table;
#[cfg(test)]
mod testing;
mod wire;

pub use config::GroupConfig;
pub use disagreement::{DifferentSetting, Disagreement, ValueOnRanks};
pub use fault::{LastHeard, MeetingFault, MeetingFaultKind, RankFault, RankFaultKind};
pub(crate) use slices::Slices;

use crate::copies::{self, OfRank};
use crate::driver::{Device, DeviceLink, Wire};
use crate::error::{Error, Result};
use crate::tensor::Memory;
use agreement::{Settings, expect_same, understood};
use mesh::{Call, Mesh};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;
use wire::MOST_WORD;

/// A rank's place in a group of ranks that train one model, each on a device of its own. Clones share it.
///
/// [`Learner::in_group`](crate::Learner::in_group) takes it; nothing else of a program changes. Ranks are processes, on one host or on
/// several, or threads of one process on the emulator.
///
/// ```
/// use stepscope::*;
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
    /// None where there is one rank.
    link: Option<Arc<DeviceLink>>,
}

impl Drop for Member {
    /// The link has the mesh too, and its last owner may be another thread than the one that panics.
    fn drop(&mut self) {
        self.mesh.tell_panic();
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
    /// Meets the other ranks, and links this rank's device with theirs. Waits until all have come, not longer than the configuration's
    /// deadline.
    ///
    /// # Errors
    /// [`Error::Meeting`] that says which rank has not come, is not of this group, or has another
    /// secret or version; [`Error::Disagreement`] for devices of different kinds; [`Error::Driver`]
    /// when NCCL cannot be used.
    #[track_caller]
    pub fn join(device: &Device, config: &GroupConfig) -> Result<Self> {
        let mesh = Mesh::join(config)?;
        let alone = Self(Arc::new(Member { mesh: Arc::clone(&mesh), link: None }));
        if mesh.ranks() == 1 {
            return Ok(alone);
        }
        let linked = alone.link_devices(device, Location::caller());
        let link = Arc::new(alone.told(linked)?);
        let of_mesh = Arc::downgrade(&link);
        // What waits on the device for a rank that is gone would wait for ever.
        mesh.at_fault(move || of_mesh.upgrade().iter().for_each(|link| link.give_up()))?;
        Ok(Self(Arc::new(Member { mesh, link: Some(link) })))
    }

    fn link_devices(&self, device: &Device, location: &'static Location<'static>) -> Result<DeviceLink> {
        let mesh = &self.0.mesh;
        let mut settings = Settings::default();
        settings.add("kind of device", device.description().kind.to_string());
        self.compare("link", &settings, location)?;
        let name = if self.rank() == 0 { DeviceLink::name(device)? } else { Vec::new() };
        let call = Call { op: "link", element: "u8", count: 0, location };
        let names = mesh.agree(call, &name)?;
        let name = names.into_iter().next().expect("rank 0's");
        DeviceLink::join(device, name, (self.rank(), self.ranks()), Arc::clone(mesh) as _, mesh.deadline())
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.0.mesh.rank()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.0.mesh.ranks()
    }

    /// The parts that each of this rank's `shards / ranks` shards has of a batch in so many parts. A batch of fewer parts than shards leaves
    /// some without. No other part of the batch is asked for its values here, so a loader need not make them.
    ///
    /// # Panics
    /// When there are fewer shards than ranks.
    pub fn own_parts(&self, shards: usize, parts: usize) -> Vec<Range<usize>> {
        let own = shards / self.ranks();
        assert!(own > 0, "{shards} shards of {} ranks", self.ranks());
        let start = |shard: usize| (shard as u128 * parts as u128 / shards as u128) as usize;
        (self.rank() * own..(self.rank() + 1) * own).map(|shard| start(shard)..start(shard + 1)).collect()
    }

    /// Tells all ranks a word, and returns all words by rank. `op` and `count` must be the same on all.
    pub(crate) fn agree(
        &self,
        op: &'static str,
        count: usize,
        word: &[u8],
        location: &'static Location<'static>,
    ) -> Result<Vec<Vec<u8>>> {
        self.0.mesh.agree(Call { op, element: "f32", count: count as u64, location }, word)
    }

    /// Compares settings of the program on all ranks, each a name and a value. All ranks call it,
    /// before the first update, with everything that decides the numbers of a run and that the
    /// library cannot see: a digest of the data, the model's configuration, the seed by which
    /// samples are shuffled. What the library knows it compares by itself (see
    /// [`Learner::in_group`](crate::Learner::in_group)).
    ///
    /// ```
    /// use stepscope::*;
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
    /// [`Error::Disagreement`] on all ranks, with every setting that differs; [`Error::Misuse`] for
    /// a name that is given twice, and for more than 64 KiB; [`Error::Rank`] when a rank does not
    /// come within the deadline.
    #[track_caller]
    pub fn agree_on(&self, settings: &[(impl AsRef<str>, impl AsRef<str>)]) -> Result<()> {
        let mut own = Settings::default();
        settings.iter().for_each(|(name, value)| own.add(name.as_ref(), value));
        self.compare("agree_on", &own, Location::caller())
    }

    /// Compares settings that the library knows, likewise.
    pub(crate) fn compare(&self, op: &'static str, own: &Settings, location: &'static Location<'static>) -> Result<()> {
        let compared = own.check().and_then(|()| {
            let word = serde_json::to_vec(own).expect("texts have a JSON form");
            if word.len() > MOST_WORD {
                let expected = format!("settings of at most {MOST_WORD} bytes together");
                return Err(Error::misuse(op, expected, word.len().to_string()));
            }
            let words = self.agree(op, 0, &word, location)?;
            let all = words.iter().map(|word| understood(op, word)).collect::<Result<Vec<_>>>()?;
            expect_same(&all)
        });
        self.told(compared)
    }

    /// Queues copies: each of `sends` to its rank, over each of `receives` what its rank sends. All ranks call it, behind an agreement.
    pub(crate) fn exchange(&self, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
        self.exchange_beside(sends, receives)?;
        self.follow()
    }

    /// The same beside what is queued next, until [`Group::follow`]: before that, nothing writes this memory or reads what is received.
    pub(crate) fn exchange_beside(&self, sends: &[OfRank], receives: &[OfRank]) -> Result<()> {
        self.0.link.as_ref().map_or(Ok(()), |link| copies::exchange(link, sends, receives))
    }

    /// What is queued next runs behind all exchanges so far.
    pub(crate) fn follow(&self) -> Result<()> {
        self.0.link.as_ref().map_or(Ok(()), |link| link.follow())
    }

    /// Queues copies of what each rank has of a region, the elements that `of` gives for it, to all others.
    pub(crate) fn gather(&self, region: Memory<f32>, of: impl Fn(usize) -> Vec<Range<usize>>) -> Result<()> {
        let parts = |to: usize, whose: usize| {
            let part = |range: Range<usize>| (to, region.part(range.start, range.len()));
            of(whose).into_iter().map(part).collect::<Vec<OfRank>>()
        };
        let others = || (0..self.ranks()).filter(|&rank| rank != self.rank());
        let sends: Vec<OfRank> = others().flat_map(|rank| parts(rank, self.rank())).collect();
        let receives: Vec<OfRank> = others().flat_map(|rank| parts(rank, rank)).collect();
        self.exchange(&sends, &receives)
    }

    /// The same result. An error is told to all ranks, which end with it; one that a device's wait ended with says who is late. Behind a
    /// fault that others have, or have found with this rank, it is that fault: the link has ended with it, and what came of that is no reason.
    pub(crate) fn told<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match (error, self.0.mesh.fault_of_others()) {
            // All ranks have found it.
            (error @ Error::Disagreement(_), _) => error,
            (_, Some(fault)) => fault,
            (Error::Timeout { waited, .. }, _) if self.ranks() > 1 => self.0.mesh.late(waited),
            (error, _) => {
                self.0.mesh.fail(&error);
                error
            }
        })
    }

    /// How long a rank waits for the others.
    pub fn deadline(&self) -> Duration {
        self.0.mesh.deadline()
    }
}
