//! The side channel of a group: every rank has a connection to every other, in addition to the
//! links that carry the bulk of the data.
//!
//! Invariant: no call lasts longer than its deadline, whatever the others do. Every later call of a
//! rank returns the first fault that it found or received, and all ranks are notified of it.

#![forbid(unsafe_code)]

use super::channel::Channel;
use super::config::GroupConfig;
use super::peer::{self, Shared};
use super::rendezvous;
use super::table::{Activity, Piece, Table};
use super::wire::{Announcement, MOST_PIECE, MOST_WORD, Message, clip};
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::panic::Location;
use std::sync::{Arc, MutexGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use stepscope_core::internals::{after, later};
use stepscope_core::{Error, RankFault, RankFaultKind, Resource, Result};

/// The time that the others may take to receive a fault before it is returned, because the process
/// may end then.
const BROADCAST_TIME: Duration = Duration::from_millis(250);
/// The time that the others may take to receive a goodbye.
const GOODBYE: Duration = Duration::from_millis(500);
/// The time to wait for the remaining ranks after two calls differ. The calls of most ranks then
/// show which rank is wrong.
const VOTE_TIMEOUT: Duration = Duration::from_millis(200);
/// The bytes of an error that are passed on.
const MOST_REASON: usize = 4096;

/// A call that all ranks are about to make together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) op: &'static str,
    pub(crate) element: &'static str,
    pub(crate) count: u64,
    pub(crate) location: &'static Location<'static>,
}

/// The connections of a rank to all others.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: usize,
    ranks: usize,
    deadline: Duration,
    shared: Arc<Shared>,
    streams: Vec<Option<TcpStream>>,
}

impl Mesh {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an invalid configuration. [`Error::Rendezvous`] if the ranks do not
    /// meet within the deadline.
    pub(crate) fn join(config: &GroupConfig) -> Result<Arc<Self>> {
        let channels = rendezvous::meet(config)?;
        let GroupConfig { rank, ranks, deadline, .. } = *config;
        let failed = |error| Error::system("group", Resource::Thread, error);
        let handle = |channel: &Option<Channel>| channel.as_ref().map(|channel| channel.stream.try_clone()).transpose();
        let streams = channels.iter().map(handle).collect::<io::Result<_>>().map_err(failed)?;
        let mesh = Self { rank, ranks, deadline, shared: Arc::new(Shared::new(rank, ranks)), streams };
        for (other, channel) in channels.into_iter().enumerate() {
            let Some(channel) = channel else { continue };
            peer::start(&mesh.shared, other, channel).map_err(failed)?;
        }
        Ok(Arc::new(mesh))
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Makes a round of all ranks: sends this call and `word` to all, waits for theirs, and returns
    /// all words by rank.
    ///
    /// # Errors
    /// [`Error::Rank`] names a rank that makes another call, does not arrive, or is gone.
    /// [`Error::Misuse`] for a word that is too long.
    pub(crate) fn agree(&self, call: Call, word: &[u8]) -> Result<Vec<Vec<u8>>> {
        if word.len() > MOST_WORD {
            let (expected, got) = (format!("a word of at most {MOST_WORD} bytes"), word.len().to_string());
            return Err(Error::misuse(call.op, expected, got));
        }
        let start = Instant::now();
        let mut table = self.shared.lock();
        let own = table.begin(call, word);
        let message = Message::Announce(own.clone());
        table.others_mut().for_each(|(_, peer)| peer.send(&message));
        self.shared.wake();
        // Waits until all have arrived. If two calls differ, waits only briefly for the rest.
        let mut until = after(self.deadline);
        let mut is_voting = false;
        loop {
            if let Some(verdict) = &table.verdict {
                return Err(error(verdict.clone()));
            }
            let missing: Vec<_> =
                table.others().filter(|(_, peer)| peer.announced.is_empty()).map(|(rank, _)| rank).collect();
            let differ =
                table.others().any(|(_, peer)| peer.announced.front().is_some_and(|other| !is_same(other, &own)));
            if differ && !is_voting {
                (is_voting, until) = (true, until.min(after(VOTE_TIMEOUT)));
            }
            let is_over = Instant::now() >= until;
            if differ && (missing.is_empty() || is_over) {
                let fault = table.outvoted(&own);
                return Err(self.conclude(table, fault));
            }
            if missing.is_empty() {
                break;
            }
            let left = missing.iter().find(|rank| table.peers[**rank].as_ref().is_some_and(|peer| peer.left));
            if let Some(rank) = left {
                let fault = table.fault(*rank, RankFaultKind::Left, start.elapsed());
                return Err(self.conclude(table, fault));
            }
            if is_over {
                let fault = table.late(&missing, &missing, start.elapsed());
                return Err(self.conclude(table, fault));
            }
            table.own.waits_for = missing.first().copied();
            table = self.shared.wait(table, until);
        }
        table.own.waits_for = None;
        let mut word_of = |peer: &mut Option<super::table::Peer>| match peer {
            Some(peer) => peer.announced.pop_front().map_or_else(Vec::new, |announced| announced.word),
            None => word.to_vec(),
        };
        Ok(table.peers.iter_mut().map(&mut word_of).collect())
    }

    /// Sends bytes to another rank. They are queued when this returns.
    ///
    /// # Errors
    /// [`Error::Rank`] if that rank does not accept them within the deadline, or is gone.
    /// [`Error::Misuse`] if `to` is not another rank.
    pub(crate) fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        self.check_other("send", to)?;
        let begin = Message::Begin(bytes.len() as u64).frame();
        let frames = std::iter::once(begin).chain(bytes.chunks(MOST_PIECE).map(Message::piece));
        let start = Instant::now();
        for mut frame in frames {
            let taken = |table: &mut Table| {
                let peer = table.peers[to].as_mut()?;
                peer.queue(&mut frame).then_some(Ok(()))
            };
            self.wait_for(to, start, taken)?;
            self.shared.outgoing[to].notify_one();
        }
        Ok(())
    }

    /// Receives bytes that another rank has sent, in the order in which it sent them.
    ///
    /// # Errors
    /// [`Error::Rank`] if they do not arrive within the deadline, have another number, or that rank
    /// is gone. [`Error::Misuse`] if `from` is not another rank.
    pub(crate) fn receive(&self, from: usize, into: &mut [u8]) -> Result<()> {
        self.check_other("receive", from)?;
        let start = Instant::now();
        let wanted = into.len() as u64;
        let begun = self.wait_for(from, start, |table| match table.inbox(from)?.pop_front()? {
            Piece::Begin(bytes) => Some(Ok(bytes)),
            // Messages are checked on arrival: each begins where the last one ended.
            Piece::Bytes(_) => None,
        })?;
        if begun != wanted {
            let table = self.shared.lock();
            let kind = RankFaultKind::Differs { expected: format!("{wanted} bytes"), got: format!("{begun}") };
            let fault = table.fault(from, kind, start.elapsed());
            return Err(self.conclude(table, fault));
        }
        let mut rest = into;
        while !rest.is_empty() {
            let piece = self.wait_for(from, start, |table| match table.inbox(from)?.pop_front()? {
                Piece::Bytes(bytes) => Some(Ok(bytes)),
                Piece::Begin(_) => None,
            })?;
            let (place, tail) = rest.split_at_mut(piece.len());
            place.copy_from_slice(&piece);
            rest = tail;
        }
        Ok(())
    }

    /// Runs `end` once, as soon as there is a fault, to end waits elsewhere that would otherwise
    /// never end. A separate thread waits for the fault.
    ///
    /// # Errors
    /// [`Error::Misuse`] if no thread can be started.
    pub(crate) fn at_fault(&self, end: impl FnOnce() + Send + 'static) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        let wait = move || {
            // An error means that this rank has left without a fault.
            if receiver.recv().is_ok() {
                end();
            }
        };
        thread::Builder::new()
            .name("stepscope-at-fault".into())
            .spawn(wait)
            .map_err(|error| Error::system("group", Resource::Thread, error))?;
        let mut table = self.shared.lock();
        match table.verdict {
            // The fault is already there.
            Some(_) => drop(sender.send(())),
            None => table.at_fault = Some(sender),
        }
        Ok(())
    }

    /// Returns the verdict, unless this rank reported it about itself.
    pub(crate) fn fault_of_others(&self) -> Option<Error> {
        let is_own = |fault: &RankFault| (fault.rank, fault.found_by) == (self.rank, self.rank);
        self.shared.lock().verdict.clone().filter(|fault| !is_own(fault)).map(error)
    }

    /// Reports that a wait outside of these connections, such as for a GPU, has not ended in time.
    /// It names the rank that lags, or states that none does. Notifies the others.
    pub(crate) fn late(&self, waited: Duration) -> Error {
        let table = self.shared.lock();
        let fault = table.stuck(waited);
        self.conclude(table, fault)
    }

    /// Parses the JSON words of all ranks. A word that cannot be read is its rank's fault, of which
    /// all ranks are notified.
    pub(crate) fn parse<T: DeserializeOwned>(&self, words: &[Vec<u8>]) -> Result<Vec<T>> {
        let parse = |(rank, word): (usize, &Vec<u8>)| {
            serde_json::from_slice(word).map_err(|error| {
                let table = self.shared.lock();
                let kind = RankFaultKind::Unreadable { reason: error.to_string() };
                let fault = table.fault(rank, kind, Duration::ZERO);
                self.conclude(table, fault)
            })
        };
        words.iter().enumerate().map(parse).collect()
    }

    /// Notifies all ranks that this rank ends, and why. Their calls then fail at once, with this
    /// reason.
    pub(crate) fn fail(&self, reason: &Error) {
        let fault = |table: &Table| match reason {
            // The fault of another rank, which is passed on.
            Error::Rank(fault) => (**fault).clone(),
            reason => {
                let mut reason = reason.to_string();
                reason.truncate(reason.floor_char_boundary(MOST_REASON));
                table.fault(self.rank, RankFaultKind::Failed { reason }, Duration::ZERO)
            }
        };
        let table = self.shared.lock();
        let fault = fault(&table);
        self.conclude(table, fault);
    }

    /// Notifies all ranks that this rank panics, if this thread does.
    pub(crate) fn broadcast_panic(&self) {
        if thread::panicking() {
            let table = self.shared.lock();
            let reason = "it panicked; its own output shows where".into();
            let fault = table.fault(self.rank, RankFaultKind::Failed { reason }, Duration::ZERO);
            self.conclude(table, fault);
        }
    }

    fn check_other(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.ranks && rank != self.rank {
            return Ok(());
        }
        Err(Error::misuse(op, format!("a rank other than {}, below {}", self.rank, self.ranks), rank.to_string()))
    }

    /// Waits until `ready` returns a value for the data that is needed from a rank.
    fn wait_for<T>(
        &self,
        rank: usize,
        start: Instant,
        mut ready: impl FnMut(&mut Table) -> Option<Result<T>>,
    ) -> Result<T> {
        let until = later(start, self.deadline);
        let mut table = self.shared.lock();
        loop {
            if let Some(verdict) = &table.verdict {
                return Err(error(verdict.clone()));
            }
            if let Some(done) = ready(&mut table) {
                table.own.waits_for = None;
                return done;
            }
            if table.peers[rank].as_ref().is_some_and(|peer| peer.left) {
                let fault = table.fault(rank, RankFaultKind::Left, start.elapsed());
                return Err(self.conclude(table, fault));
            }
            if Instant::now() >= until {
                let others: Vec<_> = table.others().map(|(rank, _)| rank).collect();
                let fault = table.late(&[rank], &others, start.elapsed());
                return Err(self.conclude(table, fault));
            }
            table.own.waits_for = Some(rank);
            table = self.shared.wait(table, until);
        }
    }

    /// Returns the error of a fault, or of an earlier one. Waits briefly until the others have been
    /// notified.
    fn conclude(&self, mut table: MutexGuard<'_, Table>, fault: RankFault) -> Error {
        let verdict = table.conclude(fault);
        self.shared.wake();
        let until = after(BROADCAST_TIME);
        while !table.has_sent_urgent() && Instant::now() < until {
            table = self.shared.wait(table, until);
        }
        error(verdict)
    }
}

impl Drop for Mesh {
    /// Sends a goodbye, or the news of a panic, and waits briefly until the others have received
    /// it.
    fn drop(&mut self) {
        self.broadcast_panic();
        let mut table = self.shared.lock();
        table.closing = true;
        self.shared.wake();
        let until = after(GOODBYE);
        while !table.is_quiet() && Instant::now() < until {
            table = self.shared.wait(table, until);
        }
        drop(table);
        for stream in self.streams.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Table {
    /// Begins a new round.
    fn begin(&mut self, call: Call, word: &[u8]) -> Announcement {
        let Call { op, element, count, location } = call;
        let sequence = self.own.sequence + 1;
        let location = clip(&location.to_string()).to_string();
        self.own = Activity {
            sequence,
            op: clip(op).into(),
            location: location.clone(),
            since: Instant::now(),
            waits_for: None,
        };
        Announcement {
            sequence,
            op: clip(op).into(),
            element: clip(element).into(),
            count,
            location,
            word: word.to_vec(),
        }
    }

    fn inbox(&mut self, from: usize) -> Option<&mut VecDeque<Piece>> {
        self.peers[from].as_mut().map(|peer| &mut peer.inbox)
    }

    /// Creates the fault for calls that differ. The culprit is a rank whose call differs from the
    /// call of the majority. In a tie, the lowest rank's call counts.
    fn outvoted(&self, own: &Announcement) -> RankFault {
        let calls: Vec<(usize, &Announcement)> = (0..self.peers.len())
            .filter_map(|rank| match &self.peers[rank] {
                None => Some((rank, own)),
                Some(peer) => Some((rank, peer.announced.front()?)),
            })
            .collect();
        let votes = |call: &Announcement| calls.iter().filter(|(_, other)| is_same(call, other)).count();
        // `max_by_key` returns the last of equal maxima, so this iterates from the highest rank to
        // the lowest.
        let most = calls.iter().rev().max_by_key(|(_, call)| votes(call)).map_or(own, |(_, call)| *call);
        let (rank, other) = calls.iter().find(|(_, call)| !is_same(call, most)).copied().unwrap_or((self.rank, own));
        let [expected, got] = [most, other].map(|call| ShownCall(call).to_string());
        self.fault(rank, RankFaultKind::Differs { expected, got }, self.own.since.elapsed())
    }
}

/// Returns true if two ranks make the same call. Their words may differ.
fn is_same(one: &Announcement, other: &Announcement) -> bool {
    let key = |call: &Announcement| (call.sequence, call.count);
    key(one) == key(other) && one.op == other.op && one.element == other.element && one.location == other.location
}

/// A call as an error shows it.
struct ShownCall<'a>(&'a Announcement);

impl fmt::Display for ShownCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Announcement { op, element, count, location, .. } = self.0;
        write!(f, "`{op}` of {count} {element} at {location}")
    }
}

fn error(fault: RankFault) -> Error {
    Error::Rank(Box::new(fault))
}

#[cfg(test)]
mod ends;
#[cfg(test)]
mod processes;
#[cfg(test)]
mod tests;
