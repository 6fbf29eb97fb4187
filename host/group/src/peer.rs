//! The two threads that serve each other rank: a reader and a writer.
//!
//! Invariant: callers never wait for a connection, only for the table. The reader accepts whatever
//! arrives, so two ranks never wait for each other to read. Unreadable data ends the connection to
//! the other rank.
//!
//! A rank may end because of a fault, and its goodbye may overtake the report on another
//! connection. It would then be blamed. Each rank therefore forwards a fault before anything else.

#![forbid(unsafe_code)]

use super::channel::{Channel, Keys, Opener, Sealer};
use super::table::{BEAT, Piece, Table};
use super::wire::{self, Message, Stage, WireError};
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;
use stepscope_core::RankFaultKind;

/// The state that callers and threads share.
#[derive(Debug)]
pub(super) struct Shared {
    table: Mutex<Table>,
    /// Signals that something has arrived or ended.
    pub(super) changed: Condvar,
    /// Signals, for each rank, that there is something to send.
    pub(super) outgoing: Vec<Condvar>,
}

impl Shared {
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        let outgoing = (0..ranks).map(|_| Condvar::new()).collect();
        Self { table: Mutex::new(Table::new(rank, ranks)), changed: Condvar::new(), outgoing }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a signal until `until`.
    pub(super) fn wait<'t>(&self, table: MutexGuard<'t, Table>, until: Instant) -> MutexGuard<'t, Table> {
        wait(&self.changed, table, until)
    }

    /// Wakes all threads that wait for the table.
    pub(super) fn wake(&self) {
        self.changed.notify_all();
        self.outgoing.iter().for_each(Condvar::notify_all);
    }
}

fn wait<'t>(what: &Condvar, table: MutexGuard<'t, Table>, until: Instant) -> MutexGuard<'t, Table> {
    let left = until.saturating_duration_since(Instant::now());
    what.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0
}

/// Starts the reader and the writer of a rank.
///
/// # Errors
/// The system's error: no handle, or no thread.
pub(super) fn start(shared: &Arc<Shared>, rank: usize, channel: Channel) -> io::Result<()> {
    let Channel { stream: to_write, keys: Keys { sealer, opener } } = channel;
    let to_read = to_write.try_clone()?;
    let work = |name: &str, work: Box<dyn FnOnce(&Shared) + Send>| {
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name(format!("stepscope-{name}-{rank}"));
        // It is counted before it runs, because it may end at once.
        count(shared, rank, |threads| threads + 1);
        let spawned = thread.spawn(move || {
            work(&of_thread);
            count(&of_thread, rank, |threads| threads - 1);
        });
        spawned.map(drop).inspect_err(|_| count(shared, rank, |threads| threads - 1))
    };
    work("reader", Box::new(move |shared| read_all(shared, rank, to_read, opener)))?;
    work("writer", Box::new(move |shared| write_all(shared, rank, to_write, sealer)))
}

fn count(shared: &Shared, rank: usize, change: impl Fn(usize) -> usize) {
    if let Some(peer) = &mut shared.lock().peers[rank] {
        peer.threads = change(peer.threads);
    }
    shared.wake();
}

fn read_all(shared: &Shared, rank: usize, stream: TcpStream, mut opener: Opener) {
    let mut stream = BufReader::with_capacity(64 << 10, stream);
    let end = loop {
        let received = wire::read(&mut opener.open(&mut stream), Stage::Group);
        match received.and_then(|message| note(&mut shared.lock(), rank, message)) {
            Ok(false) => shared.changed.notify_all(),
            Ok(true) => shared.wake(),
            Err(error) => break error,
        }
    };
    let mut table = shared.lock();
    let said_goodbye = table.peers[rank].as_ref().is_some_and(|peer| peer.left);
    if !said_goodbye && !table.closing {
        let waited = table.own.since.elapsed();
        let fault = table.fault(rank, RankFaultKind::Gone { reason: end.to_string() }, waited);
        table.conclude(fault);
    }
    drop(table);
    // This also ends the writer, even if it is stuck.
    let _ = stream.get_ref().shutdown(Shutdown::Both);
    shared.wake();
}

/// Puts a rank's message into the table. Returns true if the writers need to be woken too.
fn note(table: &mut Table, rank: usize, message: Message) -> Result<bool, WireError> {
    let ranks = table.peers.len();
    let Some(peer) = &mut table.peers[rank] else { return Ok(false) };
    let is_for_all = matches!(message, Message::Fault(_) | Message::Bye);
    let unexpected = Err(WireError::OutOfOrder);
    let mut beat = None;
    match message {
        Message::Beat(received) => beat = Some(received),
        Message::Announce(announcement) => peer.has_announced(announcement),
        Message::Begin(_) if peer.to_come > 0 => return unexpected,
        Message::Begin(bytes) => {
            peer.to_come = bytes;
            peer.inbox.push_back(Piece::Begin(bytes));
        }
        Message::Piece(bytes) => {
            let Some(to_come) = peer.to_come.checked_sub(bytes.len() as u64) else { return unexpected };
            peer.to_come = to_come;
            peer.inbox.push_back(Piece::Bytes(bytes));
        }
        Message::Fault(fault) if fault.ranks != ranks => return unexpected,
        // The fault is passed on, because it may end this rank before the finding rank has reached
        // the others.
        Message::Fault(fault) => drop(table.conclude(*fault)),
        Message::Bye => peer.left = true,
        _ => return unexpected,
    }
    if let Some(peer) = &mut table.peers[rank] {
        peer.has_sent(beat);
    }
    Ok(is_for_all)
}

fn write_all(shared: &Shared, rank: usize, mut stream: TcpStream, mut sealer: Sealer) {
    let mut beat = Instant::now();
    while let Some(frame) = next(shared, rank, &mut beat) {
        if stream.write_all(&sealer.seal(&frame)).is_err() {
            // Earlier messages of the other rank are still read, and contain the reason.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = stream.write_all(&sealer.seal(&Message::Bye.frame()));
    let _ = stream.shutdown(Shutdown::Write);
}

/// Returns the next frame to send, or none if the connection is over. `beat` is the time of the
/// next heartbeat.
fn next(shared: &Shared, rank: usize, beat: &mut Instant) -> Option<Vec<u8>> {
    let mut table = shared.lock();
    if let Some(peer) = &mut table.peers[rank]
        && peer.sending
    {
        peer.sending = false;
        shared.changed.notify_all();
    }
    loop {
        let closing = table.closing;
        let peer = table.peers[rank].as_mut()?;
        // A rank that has left, or is gone, receives nothing more.
        if peer.left || peer.threads < 2 {
            return None;
        }
        if let Some(frame) = peer.next_frame() {
            peer.sending = true;
            return Some(frame);
        }
        if closing {
            return None;
        }
        if Instant::now() >= *beat {
            *beat = Instant::now() + BEAT;
            return Some(table.beat().frame());
        }
        table = wait(&shared.outgoing[rank], table, *beat);
    }
}
