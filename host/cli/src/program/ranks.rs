//! The group ranks that this process runs: either one, named by a launcher's environment, or all,
//! as threads.
//!
//! Invariant: rank 0, if this process has it, runs on the calling thread. Only rank 0 prints and
//! writes files.

use std::thread;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use stepscope::device::{DeviceBuilder, MatrixInstruction};
use stepscope::group::{Group, GroupConfig};
use stepscope::optim::UpdateRule;
use stepscope::{Device, DeviceKind, Result, TrainState};

use super::settings::Settings;

/// The command line's ranks and shards.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct RankArgs {
    /// Run this many ranks as threads of this process, each on its own GPU or emulator [default:
    /// the launcher's, from torchrun, Slurm or Open MPI, else 1]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub ranks: Option<usize>,

    /// Cut each batch into this many shards, a power of two that is a multiple of the ranks. The
    /// weights depend on the shards but not on the ranks [default: the number of ranks]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub shards: Option<usize>,

    /// Deadline for a rank to wait for the others, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,
}

/// A rank of this process.
#[derive(Clone, Debug)]
pub struct Rank {
    /// The rendezvous of the group, if there is one.
    config: Option<GroupConfig>,
    shards: usize,
    /// The ranks of this process.
    in_process: usize,
}

impl RankArgs {
    /// Returns the ranks of this process.
    pub fn ranks(self) -> Result<Vec<Rank>> {
        let of_environment = if self.ranks.is_none() { GroupConfig::from_environment()? } else { None };
        let configs = match (of_environment, self.ranks.unwrap_or(1)) {
            (Some(config), _) => vec![config],
            (None, ranks) => GroupConfig::on_this_host(ranks)?,
        };
        let shards = self.shards.unwrap_or(configs[0].ranks());
        // A single rank without shards needs no group.
        let is_group = configs[0].ranks() > 1 || shards > 1;
        let config = |config: GroupConfig| match self.deadline {
            Some(seconds) => config.deadline(Duration::from_secs(seconds)),
            None => config,
        };
        let in_process = configs.len();
        let rank = |of_group| Rank { config: is_group.then(|| config(of_group)), shards, in_process };
        Ok(configs.into_iter().map(rank).collect())
    }
}

impl Rank {
    /// Returns true if this rank prints and writes files.
    pub fn leads(&self) -> bool {
        self.config.as_ref().is_none_or(|config| config.rank() == 0)
    }

    /// Returns the shards per batch.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Returns the ranks of the group.
    pub fn ranks(&self) -> usize {
        self.config.as_ref().map_or(1, GroupConfig::ranks)
    }

    /// Returns the ranks that this process runs.
    pub fn in_process(&self) -> usize {
        self.in_process
    }

    /// Opens the rank's device, with the device's own matrix instruction unless one is given.
    pub fn open(&self, kind: DeviceKind, instruction: Option<MatrixInstruction>) -> Result<Device> {
        let ordinal = self.config.as_ref().map_or(0, GroupConfig::local_rank);
        let builder = Device::builder(kind).ordinal(ordinal);
        instruction.into_iter().fold(builder, DeviceBuilder::matrix_instruction).open()
    }

    /// Joins the other ranks, which must have the same settings.
    pub fn join(&self, device: &Device, settings: &Settings) -> Result<Option<Group>> {
        let Some(config) = &self.config else { return Ok(None) };
        let group = Group::join(device, config)?;
        group.agree_on(settings)?;
        Ok(Some(group))
    }

    /// Makes the train state a member of the group.
    pub fn in_group<M, R: UpdateRule>(
        &self,
        group: Option<&Group>,
        state: TrainState<M, R>,
    ) -> Result<TrainState<M, R>> {
        match group {
            Some(group) => state.in_group(group, self.shards),
            None => Ok(state),
        }
    }
}

/// Runs each rank of this process: the first on this thread with `first`, the others on threads of
/// their own with `other`. Returns the result of the first rank, or the first error.
pub fn on_each<T, E: From<String>>(
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
            // Without this error, the other ranks would wait for it until their deadline.
            return Err(format!(
                "cannot start a thread for a rank: {error}; give fewer --ranks, or raise the thread limit"
            )
            .into());
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
