//! The state of the other ranks, and the messages waiting to be sent to them.
//!
//! Invariant: the first verdict stands. The culprit is determined only from this table.

#![forbid(unsafe_code)]

use super::wire::{Announcement, Beat, MOST_PIECE, Message};
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use stepscope_core::{LastHeard, RankFault, RankFaultKind};

/// The interval of heartbeats.
pub(super) const BEAT: Duration = Duration::from_millis(200);
/// The time of silence after which a rank's last message is out of date.
const SILENT: Duration = Duration::from_millis(700);
/// The bytes that may be queued for one rank's connection before the sender has to wait.
const MOST_UNSENT: usize = 4 * MOST_PIECE;

/// The last op that a rank has begun.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    pub(super) sequence: u64,
    pub(super) op: String,
    pub(super) location: String,
    pub(super) since: Instant,
    /// The rank it waits for.
    pub(super) waits_for: Option<usize>,
}

impl Activity {
    fn none() -> Self {
        Self { sequence: 0, op: String::new(), location: String::new(), since: Instant::now(), waits_for: None }
    }

    fn beat(&self) -> Beat {
        Beat {
            sequence: self.sequence,
            op: self.op.clone(),
            location: self.location.clone(),
            since_ms: self.since.elapsed().as_millis() as u64,
            waits_for: self.waits_for.map(|rank| rank as u32),
        }
    }
}

/// Data that a rank has sent.
#[derive(Debug)]
pub(super) enum Piece {
    /// The number of bytes that follow.
    Begin(u64),
    Bytes(Vec<u8>),
}

/// The state of another rank, and the data queued for it.
#[derive(Debug)]
pub(super) struct Peer {
    /// The calls that it has announced and this rank has not reached.
    pub(super) announced: VecDeque<Announcement>,
    /// The data that it has sent, the oldest first. It is unbounded, because two ranks that stop
    /// reading would keep each other from sending. It holds at most one round's data, because a
    /// rank begins a round only after it has received all data of the last round.
    pub(super) inbox: VecDeque<Piece>,
    /// The remaining bytes of the message that is arriving.
    pub(super) to_come: u64,
    /// True if it has sent a goodbye.
    pub(super) left: bool,
    last_received: Instant,
    last: Beat,
    /// Messages that are sent before any data.
    urgent: VecDeque<Vec<u8>>,
    bulk: VecDeque<Vec<u8>>,
    bulk_bytes: usize,
    /// True if a frame is being sent.
    pub(super) sending: bool,
    /// The number of its threads that are running: reader and writer.
    pub(super) threads: usize,
}

impl Peer {
    fn new() -> Self {
        Self {
            announced: VecDeque::new(),
            inbox: VecDeque::new(),
            to_come: 0,
            left: false,
            last_received: Instant::now(),
            last: Activity::none().beat(),
            urgent: VecDeque::new(),
            bulk: VecDeque::new(),
            bulk_bytes: 0,
            sending: false,
            threads: 0,
        }
    }

    pub(super) fn send(&mut self, message: &Message) {
        self.urgent.push_back(message.frame());
    }

    /// Queues data for it, if there is room.
    pub(super) fn queue(&mut self, frame: &mut Vec<u8>) -> bool {
        let room = self.bulk_bytes < MOST_UNSENT;
        if room {
            self.bulk_bytes += frame.len();
            self.bulk.push_back(std::mem::take(frame));
        }
        room
    }

    /// Returns the next frame for its connection.
    pub(super) fn next_frame(&mut self) -> Option<Vec<u8>> {
        self.urgent.pop_front().or_else(|| {
            let frame = self.bulk.pop_front()?;
            self.bulk_bytes -= frame.len();
            Some(frame)
        })
    }

    /// Returns true if all urgent messages have been sent.
    fn has_sent_urgent(&self) -> bool {
        self.urgent.is_empty() && !self.sending
    }

    fn is_silent(&self) -> bool {
        self.last_received.elapsed() > SILENT
    }

    fn waits_for(&self) -> Option<usize> {
        self.last.waits_for.map(|rank| rank as usize)
    }

    /// Records that a message of this peer has arrived. `beat` is the message if it is a heartbeat.
    pub(super) fn has_sent(&mut self, beat: Option<Beat>) {
        self.last_received = Instant::now();
        if let Some(beat) = beat {
            self.last = beat;
        }
    }

    pub(super) fn has_announced(&mut self, announcement: Announcement) {
        let Announcement { sequence, op, location, .. } = &announcement;
        self.last =
            Beat { sequence: *sequence, op: op.clone(), location: location.clone(), since_ms: 0, waits_for: None };
        self.announced.push_back(announcement);
    }

    fn last(&self) -> LastHeard {
        let Beat { sequence, op, location, since_ms, waits_for } = self.last.clone();
        LastHeard {
            ago: self.last_received.elapsed(),
            op,
            sequence,
            location,
            since: Duration::from_millis(since_ms),
            waits_for: waits_for.map(|rank| rank as usize),
        }
    }
}

/// The table that the module describes.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) rank: usize,
    pub(super) own: Activity,
    /// The other ranks by number. The entry of this rank is `None`.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) verdict: Option<RankFault>,
    /// The channel that receives a signal when there is a verdict.
    pub(super) at_fault: Option<Sender<()>>,
    /// True when this rank leaves.
    pub(super) closing: bool,
}

impl Table {
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        let peers = (0..ranks).map(|other| (other != rank).then(Peer::new)).collect();
        Self { rank, own: Activity::none(), peers, verdict: None, at_fault: None, closing: false }
    }

    /// Returns the other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    pub(super) fn others_mut(&mut self) -> impl Iterator<Item = (usize, &mut Peer)> {
        self.peers.iter_mut().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_mut()?)))
    }

    pub(super) fn beat(&self) -> Message {
        Message::Beat(self.own.beat())
    }

    /// Returns true if all urgent messages that can be sent have been.
    pub(super) fn has_sent_urgent(&self) -> bool {
        self.others().all(|(_, peer)| peer.threads < 2 || peer.has_sent_urgent())
    }

    /// Returns true if no thread works for this rank any more. For a late rank it suffices that it
    /// has been notified, because it may never answer.
    pub(super) fn is_quiet(&self) -> bool {
        let late =
            self.verdict.as_ref().filter(|verdict| verdict.kind == RankFaultKind::Late).map(|verdict| verdict.rank);
        self.others().all(|(rank, peer)| peer.threads == 0 || peer.threads == 1 && late == Some(rank))
    }

    /// Creates a fault of a rank, found in the current op of this rank.
    pub(super) fn fault(&self, rank: usize, kind: RankFaultKind, waited: Duration) -> RankFault {
        RankFault {
            rank,
            ranks: self.peers.len(),
            kind,
            found_by: self.rank,
            op: self.own.op.clone(),
            sequence: self.own.sequence,
            location: self.own.location.clone(),
            waited,
            last: self.peers[rank].as_ref().map(Peer::last),
        }
    }

    /// Makes a fault the verdict and sends it to all, unless there is a verdict already. Returns
    /// the verdict.
    pub(super) fn conclude(&mut self, fault: RankFault) -> RankFault {
        if let Some(verdict) = &self.verdict {
            return verdict.clone();
        }
        let message = Message::Fault(Box::new(fault.clone()));
        self.others_mut().for_each(|(_, peer)| peer.send(&message));
        self.verdict = Some(fault.clone());
        if let Some(at_fault) = self.at_fault.take() {
            // A receiver that has ended does not need the signal.
            let _ = at_fault.send(());
        }
        fault
    }

    /// Creates the fault of a rank that kept this one waiting: the culprit among `among`.
    pub(super) fn late(&self, waits_for: &[usize], members: &[usize], waited: Duration) -> RankFault {
        let last_waiter = waits_for.iter().map(|rank| self.last_waiter(*rank, members));
        // A silent rank is the first choice, and a rank that waits for others the last.
        let culprit = last_waiter.min_by_key(|&rank| {
            let waits = self.waits_for(rank);
            self.peers[rank].as_ref().map(|peer| (!peer.is_silent(), waits.is_some(), peer.last.sequence))
        });
        self.fault(culprit.unwrap_or(self.rank), RankFaultKind::Late, waited)
    }

    /// Returns the rank that a rank waits for, if that information is current.
    fn waits_for(&self, rank: usize) -> Option<usize> {
        self.peers[rank].as_ref().filter(|peer| !peer.is_silent())?.waits_for()
    }

    /// Returns the rank that a late rank is waiting for, following the chain of waits within
    /// `members`.
    fn last_waiter(&self, rank: usize, members: &[usize]) -> usize {
        let mut last_waiter = rank;
        for _ in 0..self.peers.len() {
            match self.waits_for(last_waiter) {
                Some(next) if members.contains(&next) => last_waiter = next,
                _ => return last_waiter,
            }
        }
        // They wait for each other in a circle.
        rank
    }

    /// Creates the fault of an operation outside of the connections that did not end in time. It
    /// names the rank that lags, or is [`RankFaultKind::Stuck`] if none does.
    pub(super) fn stuck(&self, waited: Duration) -> RankFault {
        let own = self.own.sequence;
        if let Some((rank, _)) = self.others().find(|(_, peer)| peer.left) {
            return self.fault(rank, RankFaultKind::Left, waited);
        }
        // A rank that has reached a later op is not blocked by this one.
        let late = self.others().filter(|(_, peer)| peer.last.sequence < own || peer.is_silent());
        if let Some((rank, _)) = late.min_by_key(|(_, peer)| (!peer.is_silent(), peer.last.sequence)) {
            return self.fault(rank, RankFaultKind::Late, waited);
        }
        let is_ahead = self.others().any(|(_, peer)| peer.last.sequence > own);
        self.fault(self.rank, if is_ahead { RankFaultKind::Late } else { RankFaultKind::Stuck }, waited)
    }
}
