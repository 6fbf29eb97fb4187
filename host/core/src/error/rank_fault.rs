//! The faults of a group that errors report: the rank at fault, with its op and source line, or the
//! reason why the ranks did not meet.
//!
//! These plain values also travel between ranks, so that all of them name the same culprit.
//! Invariant: nothing here uses a connection.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A rank that keeps the others of a group from continuing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFault {
    /// The culprit. For [`RankFaultKind::Stuck`], where no rank is to blame, the rank that gave up.
    pub rank: usize,
    /// The number of ranks in the group.
    pub ranks: usize,
    /// The kind of the fault.
    pub kind: RankFaultKind,
    /// The rank that found the fault, and reported it to the others.
    pub found_by: usize,
    /// The op in which it was found. Empty before the first op.
    pub op: String,
    /// The op's number, counted from 1.
    pub sequence: u64,
    /// The source line of the op: file, line and column.
    pub location: String,
    /// The time that the rank that found it had waited.
    pub waited: Duration,
    /// The last message from the culprit that the finding rank received.
    pub last: Option<LastHeard>,
}

/// The kind of a rank's fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RankFaultKind {
    /// The rank did not arrive within the deadline.
    Late,
    /// Its connection ended without a goodbye: the process was killed, or the network was cut.
    Gone {
        /// The error of the connection.
        reason: String,
    },
    /// The rank has ended normally, and is still needed.
    Left,
    /// The rank makes a different call than the others.
    Differs {
        /// The call of the others.
        expected: String,
        /// Its own call.
        got: String,
    },
    /// The rank ended because of an error of its own.
    Failed {
        /// The error.
        reason: String,
    },
    /// All ranks are in the same op, and it does not end, because a GPU or a link does not respond.
    Stuck,
    /// The rank sent a message that another rank cannot read, because it runs another program.
    Unreadable {
        /// The error of the parser.
        reason: String,
    },
}

/// The last message from a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeard {
    /// The time since that message.
    pub ago: Duration,
    /// The last op that the rank had begun. Empty before the first op.
    pub op: String,
    /// The op's number, counted from 1.
    pub sequence: u64,
    /// The op's source line.
    pub location: String,
    /// The time since it had begun the op, at the time of the message.
    pub since: Duration,
    /// The rank that it waited for, if any.
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
                write!(
                    f,
                    "rank {rank} of {ranks} is gone, without leaving the group: {reason}; rank {found_by} noticed {op}"
                )?;
            }
            RankFaultKind::Left => {
                write!(f, "rank {rank} of {ranks} has left the group, and rank {found_by} needs it {op}")?;
            }
            RankFaultKind::Differs { expected, got } => write!(
                f,
                "rank {rank} of {ranks} makes a different call than the others {op}: expected {expected}, got {got}"
            )?,
            RankFaultKind::Failed { reason } => write!(f, "rank {rank} of {ranks} has failed {op}: {reason}")?,
            RankFaultKind::Unreadable { reason } => {
                write!(f, "rank {rank} of {ranks} sent a message {op} that rank {found_by} cannot read: {reason}")?
            }
            RankFaultKind::Stuck => write!(
                f,
                "all {ranks} ranks are {op}, and it had not ended after {waited}: the GPU of one of them, or a link, does not \
                 answer; rank {rank} gave up"
            )?,
        }
        if let Some(last) = &self.last {
            write!(f, ". Last message from rank {rank}: {last}")?;
        }
        f.write_str(match kind {
            RankFaultKind::Late => ". Check what that rank is doing, or allow more time with `deadline`",
            RankFaultKind::Gone { .. } => {
                ". Check that rank's own output; the others can resume from the last checkpoint"
            }
            RankFaultKind::Left => ". All ranks must make the same number of updates",
            RankFaultKind::Differs { .. } => ". All ranks must run the same program with the same shapes",
            RankFaultKind::Failed { .. } => "",
            RankFaultKind::Unreadable { .. } => ". Start the same program everywhere",
            RankFaultKind::Stuck => ". Check the links between the GPUs, or allow more time with `deadline`",
        })
    }
}

impl fmt::Display for LastHeard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ago, op, sequence, location, since, waits_for } = self;
        write!(f, "{} ago, it ", seconds(*ago))?;
        match sequence {
            0 => f.write_str("had begun no op")?,
            _ => write!(f, "was {}, begun {} earlier", Op { op, sequence: *sequence, location }, seconds(*since))?,
        }
        match waits_for {
            Some(rank) => write!(f, ", and was waiting for rank {rank}"),
            None => Ok(()),
        }
    }
}

/// The op in which something was found, formatted for a message.
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

/// Formats a time for a message.
fn seconds(time: Duration) -> String {
    format!("{:.1} s", float_mode::in_default(|| time.as_secs_f64()))
}

/// The reason why the ranks of a group did not meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousFault {
    /// The rank that found the fault, and reported it to the ranks that it could reach.
    pub found_by: usize,
    /// The number of ranks that should have met.
    pub ranks: usize,
    /// The address of rank 0, where they should have met.
    pub address: String,
    /// The time that the finding rank had waited.
    pub waited: Duration,
    /// The kind of the fault.
    pub kind: RendezvousFaultKind,
}

/// The fault that kept ranks from meeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RendezvousFaultKind {
    /// Some ranks did not arrive.
    Missing {
        /// Their numbers.
        ranks: Vec<usize>,
        /// Events that may be the reason: ranks that came and went, strangers.
        seen: Vec<String>,
    },
    /// No rank can listen at the address.
    Taken {
        /// The system's message.
        reason: String,
    },
    /// A rank cannot be reached.
    Unreachable {
        /// Its number.
        rank: usize,
        /// The address that was tried.
        address: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// A rank has a different secret.
    Secret {
        /// The rank that answered.
        rank: usize,
    },
    /// A rank was configured with a different number of ranks.
    Size {
        /// Its number.
        rank: usize,
        /// Its number of ranks.
        got: usize,
    },
    /// Two ranks have the same number.
    Twice {
        /// The number.
        rank: usize,
        /// The address of the rank that came first.
        first: String,
        /// The address of the other rank.
        second: String,
    },
    /// A rank runs another version of the library.
    Version {
        /// Its number.
        rank: usize,
        /// The version of rank 0.
        expected: String,
        /// Its version.
        got: String,
    },
    /// A rank ended during the rendezvous.
    Lost {
        /// Its number.
        rank: usize,
        /// The error of its connection.
        reason: String,
    },
    /// A rank's host finds no address for the host name of rank 0.
    Unresolved {
        /// The system's message.
        reason: String,
    },
}

impl fmt::Display for RendezvousFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found_by, ranks, address, waited, kind } = self;
        write!(f, "the {ranks} ranks of the group did not meet at {address}: ")?;
        match kind {
            RendezvousFaultKind::Missing { ranks, seen } => {
                let (noun, verb) = if ranks.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
                let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
                write!(f, "{noun} {} {verb} not arrived within {}", names.join(", "), seconds(*waited))?;
                for seen in seen {
                    write!(f, "; {seen}")?;
                }
                f.write_str(". Check that they were started with this address")?;
            }
            RendezvousFaultKind::Taken { reason } => write!(
                f,
                "rank 0 cannot listen there: {reason}. Stop the process that listens at this port (`ss -ltnp` shows it), or give all ranks another port"
            )?,
            RendezvousFaultKind::Unreachable { rank, address, reason } => write!(
                f,
                "rank {rank} did not answer at {address} within {}: {reason}. Check that it runs, and that no firewall blocks it",
                seconds(*waited)
            )?,
            RendezvousFaultKind::Secret { rank } => write!(
                f,
                "rank {rank} has a different secret. Give all ranks the same one in STEPSCOPE_GROUP_SECRET or with `GroupConfig::secret`"
            )?,
            RendezvousFaultKind::Size { rank, got } => {
                write!(
                    f,
                    "rank {rank} was configured with {got} ranks. Start all ranks with the same number of ranks"
                )?;
            }
            RendezvousFaultKind::Twice { rank, first, second } => write!(
                f,
                "two processes claim to be rank {rank}, one at {first} and one at {second}. Give each process its own rank"
            )?,
            RendezvousFaultKind::Version { rank, expected, got } => write!(
                f,
                "rank {rank} runs stepscope {got}, and rank 0 runs {expected}. Start the same program everywhere"
            )?,
            RendezvousFaultKind::Lost { rank, reason } => {
                write!(f, "rank {rank} ended: {reason}. Check its own output")?
            }
            RendezvousFaultKind::Unresolved { reason } => write!(
                f,
                "the host of rank {found_by} finds no address for this name: {reason}. Correct the name or the host's DNS, or give \
                 all ranks the number of the address"
            )?,
        }
        write!(f, " (found by rank {found_by})")
    }
}
