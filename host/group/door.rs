//! Where a rank listens while the ranks meet.
//!
//! Invariant: who has not proved that it knows the secret keeps nobody waiting. Each caller has a thread and a few seconds; of too many
//! the oldest is shown out. When the door is dropped, nothing listens and no caller is left.

#![forbid(unsafe_code)]

use super::link::{Link, Stranger};
use super::secret::{Role, Secret};
use super::wire::{Hello, Message, Stage, WireError};
use crate::deadline::after;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long who calls, or answers, may take to prove itself.
pub(super) const INTRODUCTION: Duration = Duration::from_secs(5);
/// Callers that may be proving themselves at a time.
const CALLERS: usize = 64;
/// How long to sleep when nobody calls.
const NAP: Duration = Duration::from_millis(2);
/// Strangers that are remembered.
const MOST_SEEN: usize = 8;

/// Somebody who knows the secret.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) link: Link,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) hello: Hello,
}

/// Somebody who does, or somebody who does not and where from.
type Caller = Result<Guest, (SocketAddr, Stranger)>;

/// Those who are proving themselves: by number, the oldest first.
#[derive(Clone, Debug, Default)]
struct Hall(Arc<Mutex<VecDeque<(u64, TcpStream)>>>);

impl Hall {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, number: u64, stream: TcpStream) {
        let mut callers = self.lock();
        if callers.len() == CALLERS
            && let Some((_, oldest)) = callers.pop_front()
        {
            // It may have gone by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        callers.push_back((number, stream));
    }

    /// Whether it had not been shown out.
    fn leave(&self, number: u64) -> bool {
        let mut callers = self.lock();
        let before = callers.len();
        callers.retain(|(of, _)| *of != number);
        callers.len() < before
    }
}

/// A listener, and those who call.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    us: (u32, u32),
    secret: Secret,
    hall: Hall,
    numbers: u64,
    sender: Sender<Caller>,
    receiver: Receiver<Caller>,
    seen: Vec<String>,
}

impl Door {
    pub(super) fn new(listener: TcpListener, us: (u32, u32), secret: &Secret) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (sender, receiver) = mpsc::channel();
        let (hall, secret) = (Hall::default(), secret.clone());
        Ok(Self { listener, us, secret, hall, numbers: 0, sender, receiver, seen: Vec::new() })
    }

    pub(super) fn port(&self) -> io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Strangers, and what they did: for an error that says who is missing.
    pub(super) fn seen(&self) -> Vec<String> {
        self.seen.clone()
    }

    /// Opens to those who call, and gives one who has proved itself, if there is one. Waits a moment where nothing happens.
    pub(super) fn guest(&mut self) -> Option<Guest> {
        let mut idle = true;
        while let Ok((stream, address)) = self.listener.accept() {
            idle = false;
            self.open(stream, address);
        }
        loop {
            match self.receiver.try_recv() {
                Ok(Ok(guest)) => return Some(guest),
                Ok(Err((address, stranger))) => self.note(address, &stranger),
                Err(_) => break,
            }
        }
        if idle {
            thread::sleep(NAP);
        }
        None
    }

    fn open(&mut self, stream: TcpStream, address: SocketAddr) {
        let Ok(link) = Link::new(stream) else { return };
        let Ok(handle) = link.handle() else { return };
        self.numbers += 1;
        let number = self.numbers;
        self.hall.enter(number, handle);
        let (hall, sender, secret, us) = (self.hall.clone(), self.sender.clone(), self.secret.clone(), self.us);
        let introduce = move || {
            let mut caller = introduced(link, &secret, us);
            if !hall.leave(number) {
                caller = Err(WireError::Slow.into());
            }
            // Nobody waits for it any more when the meeting is over.
            let _ = sender.send(caller.map_err(|stranger| (address, stranger)));
        };
        // Without a thread the caller is not heard, and calls again.
        if thread::Builder::new().name("stepscope-door".into()).spawn(introduce).is_err() {
            self.hall.leave(number);
        }
    }

    fn note(&mut self, address: SocketAddr, stranger: &Stranger) {
        let seen = match stranger {
            Stranger::Secret(rank) => format!("a caller at {address} that says it is rank {rank} has another secret"),
            Stranger::Wire(error) => format!("a caller from {} was no rank: {error}", address.ip()),
            Stranger::NoRandom => "the system has no random numbers".into(),
        };
        if self.seen.len() < MOST_SEEN && !self.seen.contains(&seen) {
            self.seen.push(seen);
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        for (_, caller) in self.hall.lock().drain(..) {
            let _ = caller.shutdown(Shutdown::Both);
        }
    }
}

fn introduced(link: Link, secret: &Secret, us: (u32, u32)) -> Result<Guest, Stranger> {
    let until = after(INTRODUCTION);
    let (rank, ranks) = link.introduce(Role::Server, secret, us, until)?;
    match link.receive(Stage::Meeting, until)? {
        Message::Hello(hello) => Ok(Guest { link, rank: rank as usize, ranks: ranks as usize, hello }),
        _ => Err(WireError::Unexpected(0).into()),
    }
}

/// The address to listen at, so that who should can call and nobody else: this host alone where the group is of this host. `local` is
/// where this host met the group.
pub(super) fn listening(local: IpAddr, is_this_host: bool) -> IpAddr {
    match local {
        // Many systems know their own name by an address that others cannot reach: so the others may call at any.
        IpAddr::V4(ip) if ip.is_loopback() && !is_this_host => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(ip) if ip.is_loopback() && !is_this_host => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => local,
    }
}
