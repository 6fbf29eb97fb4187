//! The rendezvous: rank 0 listens and the others connect to it, and then each rank connects to
//! those of lower numbers.
//!
//! Invariant: a rendezvous ends within its deadline. Its result is a connection to every rank, or a
//! reason that is the same on all ranks that could be notified. Nothing listens afterwards.

#![forbid(unsafe_code)]

use super::config::GroupConfig;
use super::link::{HandshakeError, Link, part};
use super::listener::{ConnectedPeer, INTRODUCTION, Listener, listening};
use super::secret::{Role, random};
use super::wire::{Hello, Message, PROTOCOL, Stage, WireError};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use stepscope_core::deadline::after;
use stepscope_core::error::{Error, Resource, Result};
use stepscope_core::rank_fault::{RendezvousFault, RendezvousFaultKind};

/// The interval at which waiting ranks are notified of missing ones.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// The time that an authenticated rank may take to finish a message, and to receive one.
const PEER_TIMEOUT: Duration = Duration::from_millis(500);
/// The time that one attempt to connect to a rank may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause before the next attempt.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// The time for which rank 0 still answers after a failed rendezvous, to send the reason.
const LAST_CONNECTS: Duration = Duration::from_millis(400);

/// The connection to each other rank, by its number. None for this rank.
pub(super) type Connections = Vec<Option<TcpStream>>;

/// Meets the other ranks.
///
/// # Errors
/// [`Error::Misuse`] for an invalid configuration. [`Error::Rendezvous`] if the ranks do not meet.
pub(super) fn meet(config: &GroupConfig) -> Result<Connections> {
    config.check()?;
    if config.ranks == 1 {
        return Ok(vec![None]);
    }
    let start = Instant::now();
    let mut meeting =
        Rendezvous { config, start, until: after(config.deadline), addresses: Vec::new(), is_this_host: true };
    meeting.resolve()?;
    let links = if config.rank == 0 { meeting.host() } else { meeting.attend() };
    let streams = links.map_err(|kind| match kind {
        Ended::Here(kind) => meeting.fault(kind),
        Ended::There(fault) => *fault,
    });
    streams.map_err(|fault| Error::Rendezvous(Box::new(fault)))
}

struct Rendezvous<'c> {
    config: &'c GroupConfig,
    start: Instant,
    until: Instant,
    /// The addresses of rank 0.
    addresses: Vec<SocketAddr>,
    /// True if all ranks are on this host.
    is_this_host: bool,
}

/// The reason why a rendezvous failed, and the rank that found it.
enum Ended {
    Here(RendezvousFaultKind),
    There(Box<RendezvousFault>),
}

impl From<RendezvousFaultKind> for Ended {
    fn from(kind: RendezvousFaultKind) -> Self {
        Self::Here(kind)
    }
}

impl Rendezvous<'_> {
    fn fault(&self, kind: RendezvousFaultKind) -> RendezvousFault {
        let GroupConfig { rank, ranks, address, .. } = self.config;
        RendezvousFault { found_by: *rank, ranks: *ranks, address: address.clone(), waited: self.start.elapsed(), kind }
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Returns the time `time` from now, or the deadline if that is earlier.
    fn within(&self, time: Duration) -> Instant {
        after(time).min(self.until)
    }

    fn us(&self) -> (u32, u32) {
        (self.config.rank as u32, self.config.ranks as u32)
    }

    /// Resolves rank 0's address. If the system's lookup takes longer than the deadline, it is
    /// abandoned.
    fn resolve(&mut self) -> Result<()> {
        let address = &self.config.address;
        let wanted = |got: String| Error::misuse("group", "rank 0's address as host:port", got);
        let (host, port) = address.rsplit_once(':').ok_or_else(|| wanted(format!("`{address}`")))?;
        if host.is_empty() || !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(wanted(format!("`{address}`")));
        }
        self.addresses = match address.parse() {
            Ok(literal) => vec![literal],
            Err(_) => {
                let (sender, receiver) = mpsc::channel();
                let name = address.clone();
                let search = move || sender.send(name.to_socket_addrs().map(|found| found.collect::<Vec<_>>()));
                let started = thread::Builder::new().spawn(search);
                started.map_err(|error| Error::system("group", Resource::Thread, error))?;
                match receiver.recv_timeout(self.config.deadline) {
                    Ok(Ok(found)) => found,
                    Ok(Err(error)) => return Err(wanted(format!("`{address}`, which is not found: {error}"))),
                    Err(_) => return Err(wanted(format!("`{address}`, which was not found in time"))),
                }
            }
        };
        let elsewhere = self.addresses.iter().find(|at| !at.ip().is_loopback());
        if let (false, Some(at)) = (self.config.secret.is_set(), elsewhere) {
            return Err(Error::misuse(
                "group",
                "a secret, because other hosts can reach that address: set STEPSCOPE_GROUP_SECRET to the same 16 bytes or more for all \
                 ranks (`openssl rand -hex 32`), or meet at 127.0.0.1",
                format!("no secret, and the address {at}"),
            ));
        }
        let is_loopback = host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        self.is_this_host = is_loopback || host == "localhost" || !self.config.secret.is_set();
        Ok(())
    }

    /// Runs rank 0's part.
    fn host(&self) -> Result<Connections, Ended> {
        let mut guests: Vec<Option<ConnectedPeer>> = (0..self.config.ranks).map(|_| None).collect();
        let mut refused = None;
        let broken = |error: std::io::Error| RendezvousFaultKind::Taken { reason: error.to_string() };
        let mut door = Listener::new(self.listener()?, self.us(), &self.config.secret).map_err(broken)?;
        let met = match self.seat(&mut door, &mut guests, &mut refused) {
            Ok(()) => {
                drop(door);
                self.start(&guests).map_err(|ended| (ended, None))
            }
            Err(ended) => Err((ended, Some(door))),
        };
        if let Err((ended, door)) = met {
            let fault = match ended {
                Ended::Here(kind) => Box::new(self.fault(kind)),
                Ended::There(fault) => fault,
            };
            let links: Vec<_> = guests.iter().flatten().chain(&refused).map(|guest| &guest.link).collect();
            let refusal = Message::Refused(fault.clone());
            part(&links, &refusal);
            if let Some(mut door) = door {
                // Some may have called already.
                let closing = after(LAST_CONNECTS);
                while Instant::now() < closing {
                    if let Some(guest) = door.guest() {
                        part(&[&guest.link], &refusal);
                    }
                }
            }
            return Err(Ended::There(fault));
        }
        guests.into_iter().map(|guest| guest.map(|guest| stream(guest.rank, guest.link)).transpose()).collect()
    }

    fn listener(&self) -> Result<TcpListener, RendezvousFaultKind> {
        if let Some(listener) = self.config.take_listener() {
            return Ok(listener);
        }
        let mut reason = "the name has no address".to_string();
        for address in &self.addresses {
            match TcpListener::bind((listening(address.ip(), self.is_this_host), address.port())) {
                Ok(listener) => return Ok(listener),
                Err(error) => reason = error.to_string(),
            }
        }
        Err(RendezvousFaultKind::Taken { reason })
    }

    /// Waits until each rank has its place. A refused rank is notified together with the others.
    fn seat(
        &self,
        door: &mut Listener,
        guests: &mut [Option<ConnectedPeer>],
        refused: &mut Option<ConnectedPeer>,
    ) -> Result<(), Ended> {
        let mut went: Vec<String> = Vec::new();
        let mut told = Instant::now();
        loop {
            if let Some(guest) = door.guest() {
                match self.examine(&guest, guests) {
                    Ok(()) => {
                        let place = guest.rank;
                        guests[place] = Some(guest);
                    }
                    Err(kind) => {
                        *refused = Some(guest);
                        return Err(kind.into());
                    }
                }
            }
            let missing: Vec<usize> = (1..guests.len()).filter(|rank| guests[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.is_over() {
                let seen = [door.seen(), went].concat();
                return Err(RendezvousFaultKind::Missing { ranks: missing, seen }.into());
            }
            let tell = told.elapsed() >= PROGRESS_INTERVAL;
            let news = Message::Missing(missing.iter().map(|rank| *rank as u32).collect());
            for (rank, place) in guests.iter_mut().enumerate() {
                let Some(guest) = place else { continue };
                let heard = guest.link.poll(PEER_TIMEOUT).and_then(|said| {
                    if tell {
                        guest.link.send(&news, self.within(PEER_TIMEOUT))?;
                    }
                    Ok(said)
                });
                match heard {
                    Ok(None) => {}
                    Ok(Some(Message::Refused(mut fault))) => {
                        // The rank that gave up first lacks these possible reasons.
                        if let RendezvousFaultKind::Missing { seen, .. } = &mut fault.kind {
                            seen.extend([door.seen(), went].concat());
                        }
                        return Err(Ended::There(fault));
                    }
                    // A rank that has ended may come again.
                    other => {
                        let reason = other.err().unwrap_or(WireError::Unexpected(0));
                        let seen = format!("rank {rank} connected from {} and left: {reason}", guest.link.address);
                        if !went.contains(&seen) && went.len() < self.config.ranks {
                            went.push(seen);
                        }
                        *place = None;
                    }
                }
            }
            if tell {
                told = Instant::now();
            }
        }
    }

    /// Checks whether a rank may have its place.
    fn examine(&self, guest: &ConnectedPeer, guests: &[Option<ConnectedPeer>]) -> Result<(), RendezvousFaultKind> {
        let (rank, ours) = (guest.rank, version());
        if guest.hello.protocol != PROTOCOL || guest.hello.version != ours {
            let [expected, got] = [(ours, PROTOCOL), (&*guest.hello.version, guest.hello.protocol)]
                .map(|(version, protocol)| format!("{version} (messages of version {protocol})"));
            return Err(RendezvousFaultKind::Version { rank, expected, got });
        }
        if guest.ranks != self.config.ranks {
            return Err(RendezvousFaultKind::Size { rank, got: guest.ranks });
        }
        let first = match &guests[rank] {
            _ if rank == 0 => self.config.address.clone(),
            // A rank that has gone makes room for another.
            Some(first) if first.link.poll(PEER_TIMEOUT).is_ok() => first.link.address.to_string(),
            _ => return Ok(()),
        };
        Err(RendezvousFaultKind::Twice { rank, first, second: guest.link.address.to_string() })
    }

    /// Sends everyone's address to all, and waits until each has its connections.
    fn start(&self, guests: &[Option<ConnectedPeer>]) -> Result<(), Ended> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let listens = |guest: &ConnectedPeer| SocketAddr::new(guest.link.address.ip(), guest.hello.port);
        let roster = guests.iter().map(|guest| guest.as_ref().map_or(nowhere, listens)).collect();
        let group = random().map_err(|error| lost(0, error))?;
        let roster = Message::Roster(group, roster);
        let all = || guests.iter().flatten();
        for guest in all() {
            guest.link.send(&roster, self.within(PEER_TIMEOUT)).map_err(|error| lost(guest.rank, error))?;
        }
        let mut waits_for: Vec<&ConnectedPeer> = all().collect();
        while !waits_for.is_empty() {
            if self.is_over() {
                let ranks = waits_for.iter().map(|guest| guest.rank).collect();
                return Err(RendezvousFaultKind::Missing {
                    ranks,
                    seen: vec!["all ranks arrived, but not all could connect to each other".into()],
                }
                .into());
            }
            let mut still = Vec::new();
            for guest in waits_for {
                match guest.link.poll(PEER_TIMEOUT) {
                    Ok(None) => still.push(guest),
                    Ok(Some(Message::Ready)) => {}
                    Ok(Some(Message::Refused(fault))) => return Err(Ended::There(fault)),
                    Ok(Some(_)) => return Err(lost(guest.rank, WireError::Unexpected(0)).into()),
                    Err(error) => return Err(lost(guest.rank, error).into()),
                }
            }
            waits_for = still;
            thread::sleep(Duration::from_millis(1));
        }
        for guest in all() {
            guest.link.send(&Message::Go, self.within(PEER_TIMEOUT)).map_err(|error| lost(guest.rank, error))?;
        }
        Ok(())
    }

    /// Runs any other rank's part.
    fn attend(&self) -> Result<Connections, Ended> {
        let head = self.call(0, &self.addresses, None)?;
        let met = self.attend_with(&head);
        match met {
            Ok(mut links) => {
                links[0] = Some(stream(0, head)?);
                Ok(links)
            }
            Err(Ended::Here(kind)) => {
                let fault = Box::new(self.fault(kind));
                part(&[&head], &Message::Refused(fault.clone()));
                Err(Ended::There(fault))
            }
            there => there,
        }
    }

    fn attend_with(&self, head: &Link) -> Result<Connections, Ended> {
        let (rank, ranks) = (self.config.rank, self.config.ranks);
        let broken = |error: std::io::Error| lost(rank, error);
        let mut door = None;
        if rank + 1 < ranks {
            let ip = listening(head.local().map_err(broken)?.ip(), self.is_this_host);
            let listener = TcpListener::bind((ip, 0)).map_err(broken)?;
            door = Some(Listener::new(listener, self.us(), &self.config.secret).map_err(broken)?);
        }
        let port = door.as_ref().map_or(Ok(0), Listener::port).map_err(broken)?;
        self.say_hello(head, [0; 16], port).map_err(|error| lost(0, error))?;
        let (group, roster) = self.roster(head)?;
        let mut links: Vec<Option<Link>> = (0..ranks).map(|_| None).collect();
        for other in 1..rank {
            let mut address = roster[other];
            if address.ip().is_loopback() {
                // That rank is on rank 0's host, so it has the address under which this rank
                // reaches rank 0.
                address.set_ip(head.address.ip());
            }
            let link = self.call(other, &[address], Some(head))?;
            self.say_hello(&link, group, 0).map_err(|error| lost(other, error))?;
            links[other] = Some(link);
        }
        if let Some(mut door) = door {
            self.receive_calls(&mut door, group, head, &mut links)?;
        }
        head.send(&Message::Ready, self.until).map_err(|error| lost(0, error))?;
        match head.receive(Stage::Rendezvous, self.until) {
            Ok(Message::Go) => {}
            Ok(Message::Refused(fault)) => return Err(Ended::There(fault)),
            Ok(_) => return Err(lost(0, WireError::Unexpected(0)).into()),
            Err(error) => return Err(lost(0, error).into()),
        }
        links.into_iter().enumerate().map(|(rank, link)| link.map(|link| stream(rank, link)).transpose()).collect()
    }

    /// Waits until rank 0 sends everyone's address.
    fn roster(&self, head: &Link) -> Result<([u8; 16], Vec<SocketAddr>), Ended> {
        let mut missing: Vec<usize> = Vec::new();
        loop {
            match head.receive(Stage::Rendezvous, self.until) {
                Ok(Message::Missing(ranks)) => missing = ranks.into_iter().map(|rank| rank as usize).collect(),
                Ok(Message::Roster(group, roster)) if roster.len() == self.config.ranks => return Ok((group, roster)),
                Ok(Message::Refused(fault)) => return Err(Ended::There(fault)),
                Ok(_) => return Err(lost(0, WireError::Unexpected(0)).into()),
                Err(WireError::Slow) if !missing.is_empty() => {
                    return Err(RendezvousFaultKind::Missing { ranks: missing, seen: Vec::new() }.into());
                }
                Err(error) => return Err(lost(0, error).into()),
            }
        }
    }

    /// Waits for the ranks of higher numbers.
    fn receive_calls(
        &self,
        door: &mut Listener,
        group: [u8; 16],
        head: &Link,
        links: &mut [Option<Link>],
    ) -> Result<(), Ended> {
        loop {
            let own = self.config.rank;
            let missing: Vec<usize> = (own + 1..links.len()).filter(|rank| links[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.is_over() {
                let seen = [vec![format!("they did not connect to rank {own}")], door.seen()].concat();
                return Err(RendezvousFaultKind::Missing { ranks: missing, seen }.into());
            }
            if let Some(ConnectedPeer { link, rank, hello, .. }) = door.guest()
                && missing.contains(&rank)
                && hello.group == group
            {
                links[rank] = Some(link);
            }
            self.hear(head)?;
        }
    }

    /// Checks whether rank 0 reports that the rendezvous has failed.
    fn hear(&self, head: &Link) -> Result<(), Ended> {
        match head.poll(PEER_TIMEOUT) {
            // The list of missing ranks is outdated by now.
            Ok(None | Some(Message::Missing(_))) => Ok(()),
            Ok(Some(Message::Refused(fault))) => Err(Ended::There(fault)),
            Ok(Some(_)) => Err(lost(0, WireError::Unexpected(0)).into()),
            Err(error) => Err(lost(0, error).into()),
        }
    }

    fn say_hello(&self, link: &Link, group: [u8; 16], port: u16) -> Result<(), WireError> {
        let hello = Hello { protocol: PROTOCOL, version: version().into(), group, port };
        link.send(&Message::Hello(hello), self.within(PEER_TIMEOUT))
    }

    /// Connects to a rank repeatedly until it answers.
    fn call(&self, rank: usize, addresses: &[SocketAddr], head: Option<&Link>) -> Result<Link, Ended> {
        let mut reason = String::new();
        loop {
            for address in addresses {
                match self.attempt(rank, *address) {
                    Ok(link) => return Ok(link),
                    Err(HandshakeError::Secret(_)) => return Err(RendezvousFaultKind::Secret { rank }.into()),
                    // The deadline may have cut the last attempt short, so the earlier reason is
                    // more precise.
                    Err(HandshakeError::Wire(WireError::Slow)) if self.is_over() && !reason.is_empty() => {}
                    Err(HandshakeError::Wire(error)) => reason = error.to_string(),
                    Err(HandshakeError::NoRandom) => reason = "the system has no random numbers".into(),
                }
            }
            if self.is_over() {
                let address = match addresses {
                    [address, ..] => address.to_string(),
                    [] => self.config.address.clone(),
                };
                return Err(RendezvousFaultKind::Unreachable { rank, address, reason }.into());
            }
            if let Some(head) = head {
                self.hear(head)?;
            }
            thread::sleep(RETRY_DELAY.min(self.until.saturating_duration_since(Instant::now())));
        }
    }

    fn attempt(&self, rank: usize, address: SocketAddr) -> Result<Link, HandshakeError> {
        let broken = |error: std::io::Error| HandshakeError::Wire(WireError::Broken(error.to_string()));
        let left = self.within(CONNECT_TIMEOUT).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(WireError::Slow.into());
        }
        let stream = TcpStream::connect_timeout(&address, left).map_err(broken)?;
        if stream.local_addr().map_err(broken)? == address {
            // If nothing listens, the system may connect a port with itself.
            return Err(HandshakeError::Wire(WireError::Broken("nothing listens there".into())));
        }
        let link = Link::new(stream).map_err(broken)?;
        match link.introduce(Role::Client, &self.config.secret, self.us(), self.within(INTRODUCTION))? {
            (answers, _) if answers as usize == rank => Ok(link),
            (answers, _) => Err(HandshakeError::Wire(WireError::Broken(format!("rank {answers} answers there")))),
        }
    }
}

/// Returns the library's version, which must be the same everywhere, because other versions may
/// compute other bits.
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

fn lost(rank: usize, reason: impl ToString) -> RendezvousFaultKind {
    RendezvousFaultKind::Lost { rank, reason: reason.to_string() }
}

fn stream(rank: usize, link: Link) -> Result<TcpStream, Ended> {
    Ok(link.into_stream().map_err(|error| lost(rank, error))?)
}

#[cfg(test)]
mod tests;
