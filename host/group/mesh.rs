//! The side channel of a group: every rank has a connection to every other, beside whatever carries the bulk of the data.
//!
//! Invariant: no call lasts longer than its deadline, whatever the others do; the first fault that a rank finds or hears of is what
//! every later call of it says, and everybody is told.

#![forbid(unsafe_code)]

use super::config::GroupConfig;
use super::fault::{RankFault, RankFaultKind};
use super::meeting;
use super::peer::{self, Shared};
use super::table::{Activity, Piece, Table};
use super::wire::{Announcement, MOST_PIECE, MOST_WORD, Message, clip};
use crate::deadline::{after, later};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::panic::Location;
use std::sync::{Arc, MutexGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How long the others may take to hear of a fault before it is returned, as the process may end then.
const TELLING: Duration = Duration::from_millis(250);
/// How long they may take to hear a goodbye.
const GOODBYE: Duration = Duration::from_millis(500);
/// How long calls that differ wait for the rest, to see what most ranks call.
const VOTE: Duration = Duration::from_millis(200);
/// Bytes of an error that are passed on.
const MOST_REASON: usize = 4096;

/// What all ranks are about to do together.
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
    /// [`Error::Misuse`] of what no group can be; [`Error::Meeting`] when the ranks do not meet within the deadline.
    pub(crate) fn join(config: &GroupConfig) -> Result<Arc<Self>> {
        let streams = meeting::meet(config)?;
        let GroupConfig { rank, ranks, deadline, .. } = *config;
        let mesh = Self { rank, ranks, deadline, shared: Arc::new(Shared::new(rank, ranks)), streams };
        for (other, stream) in mesh.streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            peer::start(&mesh.shared, other, stream)
                .map_err(|error| Error::misuse("group", "two threads for each other rank", format!("none: {error}")))?;
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

    /// A round of all ranks: tells everybody this call and `word`, waits for everybody's, and gives all words by rank.
    ///
    /// # Errors
    /// [`Error::Rank`] names the rank that calls something else, does not come, or is not there any more. [`Error::Misuse`] of a word
    /// that is too long.
    pub(crate) fn agree(&self, call: Call, word: &[u8]) -> Result<Vec<Vec<u8>>> {
        if word.len() > MOST_WORD {
            let (expected, got) = (format!("a word of at most {MOST_WORD} bytes"), word.len().to_string());
            return Err(Error::misuse(call.op, expected, got));
        }
        let start = Instant::now();
        let mut table = self.shared.lock();
        let own = table.begin(call, word);
        let message = Message::Announce(own.clone());
        table.others_mut().for_each(|(_, peer)| peer.tell(&message));
        self.shared.wake();
        // Until all have come; where two differ, a moment for the rest.
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
                (is_voting, until) = (true, until.min(after(VOTE)));
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

    /// Sends bytes to another rank. They are on their way when this returns.
    ///
    /// # Errors
    /// [`Error::Rank`] when that rank does not take them within the deadline, or is not there any more. [`Error::Misuse`] of a rank that
    /// is no other.
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

    /// Receives bytes that another rank has sent, in the order in which it did.
    ///
    /// # Errors
    /// [`Error::Rank`] when they do not come within the deadline, are not as many, or that rank is not there any more.
    /// [`Error::Misuse`] of a rank that is no other.
    pub(crate) fn receive(&self, from: usize, into: &mut [u8]) -> Result<()> {
        self.check_other("receive", from)?;
        let start = Instant::now();
        let wanted = into.len() as u64;
        let begun = self.wait_for(from, start, |table| match table.inbox(from)?.pop_front()? {
            Piece::Begin(bytes) => Some(Ok(bytes)),
            // What comes is checked when it is heard: a message begins where one has ended.
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
            let (place, behind) = rest.split_at_mut(piece.len());
            place.copy_from_slice(&piece);
            rest = behind;
        }
        Ok(())
    }

    /// Has this done, once, as soon as there is a fault: for waits elsewhere that would not end. A thread of its own waits for it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no thread.
    pub(crate) fn at_fault(&self, end: impl FnOnce() + Send + 'static) -> Result<()> {
        let (tell, told) = mpsc::channel();
        let wait = move || {
            // An error: this rank has gone without one.
            if told.recv().is_ok() {
                end();
            }
        };
        thread::Builder::new()
            .name("stepscope-at-fault".into())
            .spawn(wait)
            .map_err(|error| Error::misuse("group", "a thread that waits for faults", format!("none: {error}")))?;
        let mut table = self.shared.lock();
        match table.verdict {
            // It is there already.
            Some(_) => drop(tell.send(())),
            None => table.at_fault = Some(tell),
        }
        Ok(())
    }

    /// The fault that stands, unless this rank has found it with itself.
    pub(crate) fn fault_of_others(&self) -> Option<Error> {
        let is_own = |fault: &RankFault| (fault.rank, fault.found_by) == (self.rank, self.rank);
        self.shared.lock().verdict.clone().filter(|fault| !is_own(fault)).map(error)
    }

    /// That a wait outside of these connections has not ended in time, of a GPU, say: names who is behind, or says that nobody is. Tells
    /// the others.
    pub(crate) fn late(&self, waited: Duration) -> Error {
        let table = self.shared.lock();
        let fault = table.stuck(waited);
        self.conclude(table, fault)
    }

    /// Tells everybody that this rank ends, and why. Their calls fail at once, with this.
    pub(crate) fn fail(&self, reason: &Error) {
        let fault = |table: &Table| match reason {
            // It is another's, which is passed on.
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

    /// Tells everybody that this rank panics, if this thread does.
    pub(crate) fn tell_panic(&self) {
        if thread::panicking() {
            let table = self.shared.lock();
            let reason = "it panicked; its own output says where".into();
            let fault = table.fault(self.rank, RankFaultKind::Failed { reason }, Duration::ZERO);
            self.conclude(table, fault);
        }
    }

    fn check_other(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.ranks && rank != self.rank {
            return Ok(());
        }
        Err(Error::misuse(op, format!("another rank than {}, below {}", self.rank, self.ranks), rank.to_string()))
    }

    /// Waits until there is what is needed of a rank.
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

    /// The error of a fault, or of an earlier one. Waits a moment until the others have been told.
    fn conclude(&self, mut table: MutexGuard<'_, Table>, fault: RankFault) -> Error {
        let verdict = table.conclude(fault);
        self.shared.wake();
        let until = after(TELLING);
        while !table.is_told() && Instant::now() < until {
            table = self.shared.wait(table, until);
        }
        error(verdict)
    }
}

impl Drop for Mesh {
    /// Says goodbye, or that this rank has panicked, and waits a moment until the others have heard it.
    fn drop(&mut self) {
        self.tell_panic();
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
    /// A new round.
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

    /// That not all that have come call the same: who is not with the most of them, or not with the lowest rank where there are as many.
    fn outvoted(&self, own: &Announcement) -> RankFault {
        let calls: Vec<(usize, &Announcement)> = (0..self.peers.len())
            .filter_map(|rank| match &self.peers[rank] {
                None => Some((rank, own)),
                Some(peer) => Some((rank, peer.announced.front()?)),
            })
            .collect();
        let votes = |call: &Announcement| calls.iter().filter(|(_, other)| is_same(call, other)).count();
        // The last of several that are as many is taken: so from the highest rank to the lowest.
        let most = calls.iter().rev().max_by_key(|(_, call)| votes(call)).map_or(own, |(_, call)| *call);
        let (rank, other) = calls.iter().find(|(_, call)| !is_same(call, most)).copied().unwrap_or((self.rank, own));
        let [expected, got] = [most, other].map(|call| Told(call).to_string());
        self.fault(rank, RankFaultKind::Differs { expected, got }, self.own.since.elapsed())
    }
}

/// Whether two ranks call the same. The word is their own.
fn is_same(one: &Announcement, other: &Announcement) -> bool {
    let key = |call: &Announcement| (call.sequence, call.count);
    key(one) == key(other) && one.op == other.op && one.element == other.element && one.location == other.location
}

/// A call as an error shows it.
struct Told<'a>(&'a Announcement);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Announcement { op, element, count, location, .. } = self.0;
        write!(f, "`{op}` of {count} {element} at {location}")
    }
}

fn error(fault: RankFault) -> Error {
    Error::Rank(Box::new(fault))
}

#[cfg(test)]
mod processes;
#[cfg(test)]
mod tests;
