//! The socket on which a rank listens during the rendezvous.
//!
//! Invariant: a caller that has not authenticated delays no one. Each caller has a thread of its
//! own and a few seconds. If there are too many, the oldest is disconnected. After the listener is
//! dropped, nothing listens and no caller is left.

#![forbid(unsafe_code)]

use super::link::{Connection, HandshakeError, Link};
use super::secret::Secret;
use super::wire::{Greeting, Hello, Message, WireError};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use stepscope_core::internals::after;

/// The time that a caller, or an answering rank, may take to authenticate.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most callers that may be authenticating at a time.
const CALLERS: usize = 64;
/// The time to sleep while there is no caller.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The most failed callers that are recorded.
const MOST_SEEN: usize = 8;

/// A caller that has authenticated.
#[derive(Debug)]
pub(super) struct ConnectedPeer {
    pub(super) link: Link,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) hello: Hello,
}

/// An authenticated caller, or the address and error of one that failed.
type Caller = Result<ConnectedPeer, (SocketAddr, HandshakeError)>;

/// The callers that are authenticating, by number, the oldest first.
#[derive(Clone, Debug, Default)]
struct PendingHandshakes(Arc<Mutex<VecDeque<(u64, TcpStream)>>>);

impl PendingHandshakes {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, number: u64, stream: TcpStream) {
        let mut callers = self.lock();
        if callers.len() == CALLERS
            && let Some((_, oldest)) = callers.pop_front()
        {
            // It may have left by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        callers.push_back((number, stream));
    }

    /// Removes a caller. Returns true unless it had been disconnected already.
    fn leave(&self, number: u64) -> bool {
        let mut callers = self.lock();
        let before = callers.len();
        callers.retain(|(of, _)| *of != number);
        callers.len() < before
    }
}

/// A listener, and its callers.
#[derive(Debug)]
pub(super) struct Listener {
    listener: TcpListener,
    rank: u32,
    secret: Secret,
    pending: PendingHandshakes,
    numbers: u64,
    sender: Sender<Caller>,
    receiver: Receiver<Caller>,
    seen: Vec<String>,
}

impl Listener {
    pub(super) fn new(listener: TcpListener, rank: u32, secret: &Secret) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (sender, receiver) = mpsc::channel();
        let (pending, secret) = (PendingHandshakes::default(), secret.clone());
        Ok(Self { listener, rank, secret, pending, numbers: 0, sender, receiver, seen: Vec::new() })
    }

    pub(super) fn port(&self) -> io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Returns a description of each caller that failed, for the error that names missing ranks.
    pub(super) fn seen(&self) -> Vec<String> {
        self.seen.clone()
    }

    /// Accepts callers, and returns one that has authenticated, if any. Sleeps briefly if nothing
    /// happens.
    pub(super) fn next_peer(&mut self) -> Option<ConnectedPeer> {
        let mut idle = true;
        while let Ok((stream, address)) = self.listener.accept() {
            idle = false;
            self.open(stream, address);
        }
        loop {
            match self.receiver.try_recv() {
                Ok(Ok(peer)) => return Some(peer),
                Ok(Err((address, error))) => self.note(address, &error),
                Err(_) => break,
            }
        }
        if idle {
            thread::sleep(POLL_INTERVAL);
        }
        None
    }

    fn open(&mut self, stream: TcpStream, address: SocketAddr) {
        let Ok(connection) = Connection::new(stream) else { return };
        let Ok(handle) = connection.handle() else { return };
        self.numbers += 1;
        let number = self.numbers;
        self.pending.enter(number, handle);
        let (pending, sender, secret, rank) =
            (self.pending.clone(), self.sender.clone(), self.secret.clone(), self.rank);
        let authenticate = move || {
            let mut caller = authenticated(connection, &secret, rank);
            if !pending.leave(number) {
                caller = Err(WireError::Slow.into());
            }
            // After the rendezvous, nothing receives this any more.
            let _ = sender.send(caller.map_err(|error| (address, error)));
        };
        // Without a thread the caller is dropped, and calls again.
        if thread::Builder::new().name("stepscope-handshake".into()).spawn(authenticate).is_err() {
            self.pending.leave(number);
        }
    }

    fn note(&mut self, address: SocketAddr, error: &HandshakeError) {
        let seen = match error {
            HandshakeError::Secret(rank) => {
                format!("a caller at {address} that claims to be rank {rank} has a different secret")
            }
            HandshakeError::Wire(error) => format!("a caller from {} was not a rank: {error}", address.ip()),
            HandshakeError::NoRandom => "the system has no random numbers".into(),
        };
        if self.seen.len() < MOST_SEEN && !self.seen.contains(&seen) {
            self.seen.push(seen);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for (_, caller) in self.pending.lock().drain(..) {
            let _ = caller.shutdown(Shutdown::Both);
        }
    }
}

fn authenticated(connection: Connection, secret: &Secret, rank: u32) -> Result<ConnectedPeer, HandshakeError> {
    let until = after(HANDSHAKE_TIMEOUT);
    let (mut link, Greeting { rank, ranks, .. }) = connection.answer(secret, rank, until)?;
    match link.receive(until)? {
        Message::Hello(hello) => Ok(ConnectedPeer { link, rank: rank as usize, ranks: ranks as usize, hello }),
        _ => Err(WireError::OutOfOrder.into()),
    }
}

/// Returns the address to listen at, which is reachable only for those that need it. If the whole
/// group is on this host, that is an address of this host only. `local` is the address through
/// which this host reached the group.
pub(super) fn listening(local: IpAddr, is_this_host: bool) -> IpAddr {
    match local {
        // Many systems resolve their own name to an address that others cannot reach, so this
        // listens at all addresses.
        IpAddr::V4(ip) if ip.is_loopback() && !is_this_host => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(ip) if ip.is_loopback() && !is_this_host => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => local,
    }
}
