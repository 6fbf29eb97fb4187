//! The ranks of a group that this process has: one, which a launcher's environment names, or all of them, as threads.
//!
//! Invariant: rank 0 runs on the thread that asks, if it is here, and alone says something and writes files.

use std::thread;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use stepscope::{Device, DeviceKind, Group, GroupConfig, Learner, Model, Result};

use super::settings::Settings;

/// Ranks, and the shards of a batch.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct RankArgs {
    /// Ranks that are threads of this process, each on a GPU of its own or an emulator [default: those of torchrun, Slurm or Open MPI, else 1]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub(crate) ranks: Option<usize>,

    /// Shards that each batch is cut into, a power of two that the ranks divide; the weights depend on it, and not on the ranks
    /// [default: as many as ranks]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub(crate) shards: Option<usize>,

    /// How long a rank waits for the others, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) deadline: Option<u64>,
}

/// A rank of this process.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    /// How it finds the others, if there is a group.
    config: Option<GroupConfig>,
    shards: usize,
}

impl RankArgs {
    /// The ranks of this process.
    pub(crate) fn ranks(self) -> Result<Vec<Rank>> {
        let of_environment = if self.ranks.is_none() { GroupConfig::from_environment()? } else { None };
        let configs = match (of_environment, self.ranks.unwrap_or(1)) {
            (Some(config), _) => vec![config],
            (None, ranks) => GroupConfig::on_this_host(ranks)?,
        };
        let shards = self.shards.unwrap_or(configs[0].ranks());
        // Without others and shards there is nothing to agree on.
        let is_group = configs[0].ranks() > 1 || shards > 1;
        let config = |config: GroupConfig| match self.deadline {
            Some(seconds) => config.deadline(Duration::from_secs(seconds)),
            None => config,
        };
        let rank = |of_group| Rank { config: is_group.then(|| config(of_group)), shards };
        Ok(configs.into_iter().map(rank).collect())
    }
}

impl Rank {
    /// Whether it is the one that says something and writes files.
    pub(crate) fn leads(&self) -> bool {
        self.config.as_ref().is_none_or(|config| config.rank() == 0)
    }

    /// Shards of a batch.
    pub(crate) fn shards(&self) -> usize {
        self.shards
    }

    /// The rank's device.
    pub(crate) fn open(&self, kind: DeviceKind) -> Result<Device> {
        let ordinal = self.config.as_ref().map_or(0, GroupConfig::local_rank);
        Device::builder(kind).ordinal(ordinal).open()
    }

    /// Meets the others, which must have the same settings.
    pub(crate) fn join(&self, device: &Device, settings: &Settings) -> Result<Option<Group>> {
        let Some(config) = &self.config else { return Ok(None) };
        let group = Group::join(device, config)?;
        group.agree_on(settings)?;
        Ok(Some(group))
    }

    /// The learner, as one of the group's.
    pub(crate) fn in_group<M: Model>(&self, group: Option<&Group>, learner: Learner<M>) -> Result<Learner<M>> {
        match group {
            Some(group) => learner.in_group(group, self.shards),
            None => Ok(learner),
        }
    }
}

/// Runs each rank of this process: the first on this thread, by `first`, the others by `other`. What the first returns, or the first error.
pub(crate) fn on_each<T, E: From<String>>(
    ranks: Vec<Rank>,
    first: impl FnOnce(&Rank) -> Result<T, E>,
    other: impl Fn(&Rank) -> Result<(), String> + Sync,
) -> Result<T, E> {
    let (leader, others) = ranks.split_first().expect("at least one rank");
    thread::scope(|scope| {
        let other = &other;
        let start = |rank| thread::Builder::new().name("rank".into()).spawn_scoped(scope, move || other(rank));
        let started: Vec<_> = others.iter().map(start).collect();
        if let Some(error) = started.iter().find_map(|rank| rank.as_ref().err()) {
            // The others would wait for it until their deadline.
            return Err(
                format!("no thread for a rank: {error}; give fewer --ranks, or a higher limit of threads").into()
            );
        }
        let led = first(leader);
        let others: Result<Vec<()>, String> = started
            .into_iter()
            .flatten()
            .map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into())))
            .collect();
        let led = led?;
        others?;
        Ok(led)
    })
}
