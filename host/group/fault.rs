//! What errors tell of a group: which rank is at fault, in which op, at which line; or why the ranks did not meet.
//!
//! Plain values that also travel between ranks, so that all of them name the same culprit. Invariant: nothing here touches a connection.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A rank that keeps the others of a group from going on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankFault {
    /// The culprit. With [`RankFaultKind::Stuck`], where nobody is behind, the rank that gave up.
    pub rank: usize,
    /// Ranks of the group.
    pub ranks: usize,
    /// What is wrong with it.
    pub kind: RankFaultKind,
    /// The rank that found it, and told the others.
    pub found_by: usize,
    /// The op in which it was found; empty before the first.
    pub op: String,
    /// That op's number, counted from 1.
    pub sequence: u64,
    /// The source line of that op: file, line and column.
    pub location: String,
    /// How long the rank that found it had waited.
    pub waited: Duration,
    /// What the rank that found it had last heard of the culprit.
    pub last: Option<LastHeard>,
}

/// What is wrong with a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RankFaultKind {
    /// It did not come within the deadline.
    Late,
    /// Its connection ended without a goodbye: the process was killed, or the network was cut.
    Gone {
        /// What the connection said.
        reason: String,
    },
    /// It has ended in good order, and is still needed.
    Left,
    /// It calls something else than the others do.
    Differs {
        /// What the others call.
        expected: String,
        /// What it calls.
        got: String,
    },
    /// It ended because of an error of its own.
    Failed {
        /// The error.
        reason: String,
    },
    /// All ranks are in the same op, and it does not end: a GPU or a link does not answer.
    Stuck,
}

/// What was last heard of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LastHeard {
    /// How long ago that was.
    pub ago: Duration,
    /// The last op that it had begun; empty before the first.
    pub op: String,
    /// That op's number, counted from 1.
    pub sequence: u64,
    /// That op's source line.
    pub location: String,
    /// How long ago, then, it had begun it.
    pub since: Duration,
    /// The rank for which it waited, if it did.
    pub waits_for: Option<usize>,
}

impl fmt::Display for RankFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, ranks, kind, found_by, waited, .. } = self;
        let op = Op { op: &self.op, sequence: self.sequence, location: &self.location };
        let waited = seconds(*waited);
        match kind {
            RankFaultKind::Late => {
                write!(f, "rank {rank} of {ranks} is late: rank {found_by} waited {waited} for it {op}")?
            }
            RankFaultKind::Gone { reason } => {
                write!(f, "rank {rank} of {ranks} is gone, without a goodbye: {reason}; rank {found_by} noticed {op}")?;
            }
            RankFaultKind::Left => {
                write!(f, "rank {rank} of {ranks} has left the group, and rank {found_by} needs it {op}")?;
            }
            RankFaultKind::Differs { expected, got } => write!(
                f,
                "rank {rank} of {ranks} calls something else than the others {op}: expected {expected}, got {got}"
            )?,
            RankFaultKind::Failed { reason } => write!(f, "rank {rank} of {ranks} has failed {op}: {reason}")?,
            RankFaultKind::Stuck => write!(
                f,
                "all {ranks} ranks are {op}, and it had not ended after {waited}: the GPU of one of them, or a link, does not \
                 answer; rank {rank} gave up"
            )?,
        }
        if let Some(last) = &self.last {
            write!(f, ". Last heard of rank {rank}: {last}")?;
        }
        f.write_str(match kind {
            RankFaultKind::Late => ". Look at what that rank does, or allow more time: `deadline`",
            RankFaultKind::Gone { .. } => {
                ". Look at that rank's own output; the others can go on from the last checkpoint"
            }
            RankFaultKind::Left => ". All ranks must make as many updates",
            RankFaultKind::Differs { .. } => ". All ranks must run the same program on shapes that are the same",
            RankFaultKind::Failed { .. } => "",
            RankFaultKind::Stuck => ". Look at the links between the GPUs, or allow more time: `deadline`",
        })
    }
}

impl fmt::Display for LastHeard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ago, op, sequence, location, since, waits_for } = self;
        write!(f, "{} ago it ", seconds(*ago))?;
        match sequence {
            0 => f.write_str("had begun no op")?,
            _ => write!(f, "was {}, begun {} before", Op { op, sequence: *sequence, location }, seconds(*since))?,
        }
        match waits_for {
            Some(rank) => write!(f, ", and waited for rank {rank}"),
            None => Ok(()),
        }
    }
}

/// Where something was found, as a message says it.
struct Op<'t> {
    op: &'t str,
    sequence: u64,
    location: &'t str,
}

impl fmt::Display for Op<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, sequence, location } = self;
        match sequence {
            0 => f.write_str("before the first op"),
            _ => write!(f, "in `{op}` (number {sequence}) at {location}"),
        }
    }
}

/// A time as a message shows it.
fn seconds(time: Duration) -> String {
    format!("{:.1} s", float_mode::in_default(|| time.as_secs_f64()))
}

/// Why the ranks of a group did not meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MeetingFault {
    /// The rank that found it, and told the others that it could reach.
    pub found_by: usize,
    /// Ranks that should have met.
    pub ranks: usize,
    /// Where: rank 0's address.
    pub address: String,
    /// How long that rank had waited.
    pub waited: Duration,
    /// What kept them from it.
    pub kind: MeetingFaultKind,
}

/// What kept ranks from meeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MeetingFaultKind {
    /// Ranks that did not come.
    Missing {
        /// Which.
        ranks: Vec<usize>,
        /// What was seen meanwhile that may be the reason: ranks that came and went, strangers.
        seen: Vec<String>,
    },
    /// Nothing can listen at the address.
    Taken {
        /// The system's words.
        reason: String,
    },
    /// A rank cannot be reached.
    Unreachable {
        /// Which.
        rank: usize,
        /// Where it was looked for.
        address: String,
        /// What the last attempt said.
        reason: String,
    },
    /// A rank has another secret than this one.
    Secret {
        /// The rank that answered.
        rank: usize,
    },
    /// A rank was told another number of ranks.
    Size {
        /// Which.
        rank: usize,
        /// What it was told.
        got: usize,
    },
    /// Two ranks of one number.
    Twice {
        /// The number.
        rank: usize,
        /// Where the one that came first is.
        first: String,
        /// Where the other one is.
        second: String,
    },
    /// A rank of another version of the library.
    Version {
        /// Which.
        rank: usize,
        /// Rank 0's version.
        expected: String,
        /// Its version.
        got: String,
    },
    /// A rank ended while the others met.
    Lost {
        /// Which.
        rank: usize,
        /// What its connection said.
        reason: String,
    },
}

impl fmt::Display for MeetingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found_by, ranks, address, waited, kind } = self;
        write!(f, "the {ranks} ranks of the group did not meet at {address}: ")?;
        match kind {
            MeetingFaultKind::Missing { ranks, seen } => {
                let (noun, verb) = if ranks.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
                let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
                write!(f, "{noun} {} {verb} not come within {}", names.join(", "), seconds(*waited))?;
                for seen in seen {
                    write!(f, "; {seen}")?;
                }
                f.write_str(". Look whether they were started, with this address")?;
            }
            MeetingFaultKind::Taken { reason } => write!(
                f,
                "rank 0 cannot listen there: {reason}. End what listens at this port (`ss -ltnp` shows it), or give all ranks another one"
            )?,
            MeetingFaultKind::Unreachable { rank, address, reason } => write!(
                f,
                "rank {rank} did not answer at {address} within {}: {reason}. Look whether it runs, and whether a firewall is between",
                seconds(*waited)
            )?,
            MeetingFaultKind::Secret { rank } => write!(
                f,
                "rank {rank} has another secret. Give all ranks the same: STEPSCOPE_GROUP_SECRET, or `GroupConfig::secret`"
            )?,
            MeetingFaultKind::Size { rank, got } => {
                write!(f, "rank {rank} was told that there are {got} ranks. Start all with the same number")?;
            }
            MeetingFaultKind::Twice { rank, first, second } => write!(
                f,
                "two processes say that they are rank {rank}, one at {first} and one at {second}. Give each a number of its own"
            )?,
            MeetingFaultKind::Version { rank, expected, got } => write!(
                f,
                "rank {rank} runs stepscope {got}, and rank 0 runs {expected}. Start the same program everywhere"
            )?,
            MeetingFaultKind::Lost { rank, reason } => {
                write!(f, "rank {rank} ended: {reason}. Look at its own output")?
            }
        }
        write!(f, " (found by rank {found_by})")
    }
}
