//! What a rank knows of the others, and what it has for them.
//!
//! Invariant: the first verdict stands. Who is found at fault is found by what is in this table alone.

#![forbid(unsafe_code)]

use super::fault::{LastHeard, RankFault, RankFaultKind};
use super::wire::{Announcement, Beat, MOST_PIECE, Message};
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// How often a rank gives a sign of life.
pub(super) const BEAT: Duration = Duration::from_millis(200);
/// For how long a rank may be silent until what it said last is old.
const SILENT: Duration = Duration::from_millis(700);
/// Bytes that wait for one rank's connection, before who sends more has to wait.
const MOST_UNSENT: usize = 4 * MOST_PIECE;

/// The last op that a rank has begun.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    pub(super) sequence: u64,
    pub(super) op: String,
    pub(super) location: String,
    pub(super) since: Instant,
    /// For whom it waits.
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
    /// So many bytes follow.
    Begin(u64),
    Bytes(Vec<u8>),
}

/// What a rank knows of another, and has for it.
#[derive(Debug)]
pub(super) struct Peer {
    /// Calls that it has announced and this rank has not come to.
    pub(super) announced: VecDeque<Announcement>,
    /// Data that it has sent, the first first. No bound: a rank that does not read on would keep others from sending, and they it. What
    /// is there is what one rank sends between two rounds, as none begins a round before it has received what the last one was about.
    pub(super) inbox: VecDeque<Piece>,
    /// Bytes of the message that is coming.
    pub(super) to_come: u64,
    /// It has said goodbye.
    pub(super) left: bool,
    heard: Instant,
    last: Beat,
    /// What it is told before any data.
    urgent: VecDeque<Vec<u8>>,
    bulk: VecDeque<Vec<u8>>,
    bulk_bytes: usize,
    /// Whether something is on its way to the connection.
    pub(super) sending: bool,
    /// Whether its reader and its writer are at work.
    pub(super) threads: usize,
}

impl Peer {
    fn new() -> Self {
        Self {
            announced: VecDeque::new(),
            inbox: VecDeque::new(),
            to_come: 0,
            left: false,
            heard: Instant::now(),
            last: Activity::none().beat(),
            urgent: VecDeque::new(),
            bulk: VecDeque::new(),
            bulk_bytes: 0,
            sending: false,
            threads: 0,
        }
    }

    pub(super) fn tell(&mut self, message: &Message) {
        self.urgent.push_back(message.frame());
    }

    /// Takes data for it, if there is room.
    pub(super) fn queue(&mut self, frame: &mut Vec<u8>) -> bool {
        let room = self.bulk_bytes < MOST_UNSENT;
        if room {
            self.bulk_bytes += frame.len();
            self.bulk.push_back(std::mem::take(frame));
        }
        room
    }

    /// What goes to its connection next.
    pub(super) fn next_frame(&mut self) -> Option<Vec<u8>> {
        self.urgent.pop_front().or_else(|| {
            let frame = self.bulk.pop_front()?;
            self.bulk_bytes -= frame.len();
            Some(frame)
        })
    }

    /// Whether all that is urgent has gone to its connection.
    fn is_told(&self) -> bool {
        self.urgent.is_empty() && !self.sending
    }

    fn is_silent(&self) -> bool {
        self.heard.elapsed() > SILENT
    }

    fn waits_for(&self) -> Option<usize> {
        self.last.waits_for.map(|rank| rank as usize)
    }

    /// Something has come from it; a beat, if that is what it was.
    pub(super) fn has_spoken(&mut self, beat: Option<Beat>) {
        self.heard = Instant::now();
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
            ago: self.heard.elapsed(),
            op,
            sequence,
            location,
            since: Duration::from_millis(since_ms),
            waits_for: waits_for.map(|rank| rank as usize),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) rank: usize,
    pub(super) own: Activity,
    /// By rank; none for this one.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) verdict: Option<RankFault>,
    /// Who is told that there is a verdict.
    pub(super) at_fault: Option<Sender<()>>,
    /// This rank goes.
    pub(super) closing: bool,
}

impl Table {
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        let peers = (0..ranks).map(|other| (other != rank).then(Peer::new)).collect();
        Self { rank, own: Activity::none(), peers, verdict: None, at_fault: None, closing: false }
    }

    /// The other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    pub(super) fn others_mut(&mut self) -> impl Iterator<Item = (usize, &mut Peer)> {
        self.peers.iter_mut().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_mut()?)))
    }

    pub(super) fn beat(&self) -> Message {
        Message::Beat(self.own.beat())
    }

    /// Whether all that can be told has been.
    pub(super) fn is_told(&self) -> bool {
        self.others().all(|(_, peer)| peer.threads < 2 || peer.is_told())
    }

    /// Whether no thread works for this rank any more. Of one that is late it is enough that it has been told: it may never answer.
    pub(super) fn is_quiet(&self) -> bool {
        let late =
            self.verdict.as_ref().filter(|verdict| verdict.kind == RankFaultKind::Late).map(|verdict| verdict.rank);
        self.others().all(|(rank, peer)| peer.threads == 0 || peer.threads == 1 && late == Some(rank))
    }

    /// A fault of a rank, found in the op in which this rank is.
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

    /// Makes a fault the verdict, and tells everybody, unless there is one; gives the one that stands.
    pub(super) fn conclude(&mut self, fault: RankFault) -> RankFault {
        if let Some(verdict) = &self.verdict {
            return verdict.clone();
        }
        let message = Message::Fault(Box::new(fault.clone()));
        self.others_mut().for_each(|(_, peer)| peer.tell(&message));
        self.verdict = Some(fault.clone());
        if let Some(at_fault) = self.at_fault.take() {
            // Who has ended before needs not hear it.
            let _ = at_fault.send(());
        }
        fault
    }

    /// That these ranks have kept this one waiting: who is the reason, of those who may be.
    pub(super) fn late(&self, waits_for: &[usize], among: &[usize], waited: Duration) -> RankFault {
        let behind = waits_for.iter().map(|rank| self.behind(*rank, among));
        // One that is silent goes first; one that waits for others goes last.
        let culprit = behind.min_by_key(|&rank| {
            let waits = self.waits_for(rank);
            self.peers[rank].as_ref().map(|peer| (!peer.is_silent(), waits.is_some(), peer.last.sequence))
        });
        self.fault(culprit.unwrap_or(self.rank), RankFaultKind::Late, waited)
    }

    /// For whom a rank waits, if that is still true.
    fn waits_for(&self, rank: usize) -> Option<usize> {
        self.peers[rank].as_ref().filter(|peer| !peer.is_silent())?.waits_for()
    }

    /// Who is behind a rank that is late: for whom it waits, for whom that one waits, and so on.
    fn behind(&self, rank: usize, among: &[usize]) -> usize {
        let mut behind = rank;
        for _ in 0..self.peers.len() {
            match self.waits_for(behind) {
                Some(next) if among.contains(&next) => behind = next,
                _ => return behind,
            }
        }
        // They wait for each other in a circle.
        rank
    }

    /// That something outside of the connections has not ended in time: who is behind this rank, or that nobody is.
    pub(super) fn stuck(&self, waited: Duration) -> RankFault {
        let own = self.own.sequence;
        if let Some((rank, _)) = self.others().find(|(_, peer)| peer.left) {
            return self.fault(rank, RankFaultKind::Left, waited);
        }
        // A rank that has come to a later op is not held up by this one.
        let behind = self.others().filter(|(_, peer)| peer.last.sequence < own || peer.is_silent());
        if let Some((rank, _)) = behind.min_by_key(|(_, peer)| (!peer.is_silent(), peer.last.sequence)) {
            return self.fault(rank, RankFaultKind::Late, waited);
        }
        let is_ahead = self.others().any(|(_, peer)| peer.last.sequence > own);
        self.fault(self.rank, if is_ahead { RankFaultKind::Late } else { RankFaultKind::Stuck }, waited)
    }
}
