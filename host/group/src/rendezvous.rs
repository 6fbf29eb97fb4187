//! The rendezvous: rank 0 listens and the others connect to it. Then each rank connects to every
//! rank of a lower number.
//!
//! Invariant: a rendezvous ends within its deadline. Its result is a connection to every rank, or a
//! reason that is the same on all ranks that could be notified. Nothing listens afterwards.

#![forbid(unsafe_code)]

use super::channel::Channel;
use super::config::GroupConfig;
use super::link::{Connection, HandshakeError, Link, send_last};
use super::listener::{ConnectedPeer, HANDSHAKE_TIMEOUT, Listener, listening};
use super::secret::random;
use super::wire::{Hello, Message, PROTOCOL, WireError};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use stepscope_core::internals::after;
use stepscope_core::{Error, RendezvousFault, RendezvousFaultKind, Resource, Result};

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

/// The channel to each other rank, by its number. None for this rank.
pub(super) type Channels = Vec<Option<Channel>>;

/// Meets the other ranks.
///
/// # Errors
/// [`Error::Misuse`] for an invalid configuration. [`Error::Rendezvous`] if the ranks do not meet.
pub(super) fn meet(config: &GroupConfig) -> Result<Channels> {
    config.check()?;
    if config.ranks == 1 {
        return Ok(vec![None]);
    }
    let start = Instant::now();
    let mut rendezvous =
        Rendezvous { config, start, until: after(config.deadline), addresses: Vec::new(), is_this_host: true };
    rendezvous.resolve()?;
    let links = if config.rank == 0 { rendezvous.host() } else { rendezvous.join() };
    let streams = links.map_err(|kind| match kind {
        Ended::Here(kind) => rendezvous.fault(kind),
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
        let found = match address.parse() {
            Ok(literal) => vec![literal],
            Err(_) => {
                let (sender, receiver) = mpsc::channel();
                let name = address.clone();
                let search = move || sender.send(name.to_socket_addrs().map(|found| found.collect::<Vec<_>>()));
                let started = thread::Builder::new().spawn(search);
                started.map_err(|error| Error::system("group", Resource::Thread, error))?;
                let reason = match receiver.recv_timeout(self.config.deadline) {
                    Ok(Ok(found)) if !found.is_empty() => Ok(found),
                    Ok(Ok(_)) => Err("the lookup returned no address".into()),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(_) => Err(format!("the lookup had not ended after {:?}", self.config.deadline)),
                };
                reason.map_err(|reason| {
                    Error::Rendezvous(Box::new(self.fault(RendezvousFaultKind::Unresolved { reason })))
                })?
            }
        };
        self.addresses = found;
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
    fn host(&self) -> Result<Channels, Ended> {
        let mut peers: Vec<Option<ConnectedPeer>> = (0..self.config.ranks).map(|_| None).collect();
        let mut refused = None;
        let broken = |error: std::io::Error| RendezvousFaultKind::Taken { reason: error.to_string() };
        let mut listener = Listener::new(self.listener()?, self.us().0, &self.config.secret).map_err(broken)?;
        let met = match self.admit(&mut listener, &mut peers, &mut refused) {
            Ok(()) => {
                drop(listener);
                self.start(&mut peers).map_err(|ended| (ended, None))
            }
            Err(ended) => Err((ended, Some(listener))),
        };
        if let Err((ended, listener)) = met {
            let fault = match ended {
                Ended::Here(kind) => Box::new(self.fault(kind)),
                Ended::There(fault) => fault,
            };
            let refusal = Message::Refused(fault.clone());
            send_last(peers.iter_mut().flatten().chain(&mut refused).map(|peer| &mut peer.link), &refusal);
            if let Some(mut listener) = listener {
                // Some may have called already.
                let closing = after(LAST_CONNECTS);
                while Instant::now() < closing {
                    if let Some(mut peer) = listener.next_peer() {
                        send_last([&mut peer.link], &refusal);
                    }
                }
            }
            return Err(Ended::There(fault));
        }
        peers.into_iter().map(|peer| peer.map(|peer| channel(peer.rank, peer.link)).transpose()).collect()
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
    fn admit(
        &self,
        listener: &mut Listener,
        peers: &mut [Option<ConnectedPeer>],
        refused: &mut Option<ConnectedPeer>,
    ) -> Result<(), Ended> {
        let mut went: Vec<String> = Vec::new();
        let mut last_progress = Instant::now();
        loop {
            if let Some(peer) = listener.next_peer() {
                match self.examine(&peer, peers) {
                    Ok(()) => {
                        let place = peer.rank;
                        peers[place] = Some(peer);
                    }
                    Err(kind) => {
                        *refused = Some(peer);
                        return Err(kind.into());
                    }
                }
            }
            let missing: Vec<usize> = (1..peers.len()).filter(|rank| peers[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.is_over() {
                let seen = [listener.seen(), went].concat();
                return Err(RendezvousFaultKind::Missing { ranks: missing, seen }.into());
            }
            let is_due = last_progress.elapsed() >= PROGRESS_INTERVAL;
            let missing_ranks = Message::Missing(missing.iter().map(|rank| *rank as u32).collect());
            for (rank, place) in peers.iter_mut().enumerate() {
                let Some(peer) = place else { continue };
                let received = peer.link.poll(PEER_TIMEOUT).and_then(|message| {
                    if is_due {
                        peer.link.send(&missing_ranks, self.within(PEER_TIMEOUT))?;
                    }
                    Ok(message)
                });
                match received {
                    Ok(None) => {}
                    Ok(Some(Message::Refused(mut fault))) => {
                        // The rank that gave up first lacks these possible reasons.
                        if let RendezvousFaultKind::Missing { seen, .. } = &mut fault.kind {
                            seen.extend([listener.seen(), went].concat());
                        }
                        return Err(Ended::There(fault));
                    }
                    // A rank that has ended may come again.
                    other => {
                        let reason = other.err().unwrap_or(WireError::Unexpected(0));
                        let seen = format!("rank {rank} connected from {} and left: {reason}", peer.link.address);
                        if !went.contains(&seen) && went.len() < self.config.ranks {
                            went.push(seen);
                        }
                        *place = None;
                    }
                }
            }
            if is_due {
                last_progress = Instant::now();
            }
        }
    }

    /// Checks whether a rank may have its place.
    fn examine(&self, peer: &ConnectedPeer, peers: &mut [Option<ConnectedPeer>]) -> Result<(), RendezvousFaultKind> {
        let (rank, ours) = (peer.rank, version());
        if peer.hello.protocol != PROTOCOL || peer.hello.version != ours {
            let [expected, got] = [(ours, PROTOCOL), (&*peer.hello.version, peer.hello.protocol)]
                .map(|(version, protocol)| format!("{version} (messages of version {protocol})"));
            return Err(RendezvousFaultKind::Version { rank, expected, got });
        }
        if peer.ranks != self.config.ranks {
            return Err(RendezvousFaultKind::Size { rank, got: peer.ranks });
        }
        // A rank that has gone makes room for another.
        let stays = |first: &mut ConnectedPeer| first.link.poll(PEER_TIMEOUT).is_ok().then_some(first.link.address);
        let first = match peers[rank].as_mut().and_then(stays) {
            _ if rank == 0 => self.config.address.clone(),
            Some(address) => address.to_string(),
            None => return Ok(()),
        };
        Err(RendezvousFaultKind::Twice { rank, first, second: peer.link.address.to_string() })
    }

    /// Sends everyone's address to all, and waits until each has its connections.
    fn start(&self, peers: &mut [Option<ConnectedPeer>]) -> Result<(), Ended> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let listens = |peer: &ConnectedPeer| SocketAddr::new(peer.link.address.ip(), peer.hello.port);
        let roster = peers.iter().map(|peer| peer.as_ref().map_or(nowhere, listens)).collect();
        let group = random().map_err(|error| lost(0, error))?;
        let roster = Message::Roster(group, roster);
        for peer in peers.iter_mut().flatten() {
            peer.link.send(&roster, self.within(PEER_TIMEOUT)).map_err(|error| lost(peer.rank, error))?;
        }
        let mut waits_for: Vec<&mut ConnectedPeer> = peers.iter_mut().flatten().collect();
        while !waits_for.is_empty() {
            if self.is_over() {
                let ranks = waits_for.iter().map(|peer| peer.rank).collect();
                return Err(RendezvousFaultKind::Missing {
                    ranks,
                    seen: vec!["all ranks arrived, but not all could connect to each other".into()],
                }
                .into());
            }
            let mut still = Vec::new();
            for peer in waits_for {
                match peer.link.poll(PEER_TIMEOUT) {
                    Ok(None) => still.push(peer),
                    Ok(Some(Message::Ready)) => {}
                    Ok(Some(Message::Refused(fault))) => return Err(Ended::There(fault)),
                    Ok(Some(_)) => return Err(lost(peer.rank, WireError::Unexpected(0)).into()),
                    Err(error) => return Err(lost(peer.rank, error).into()),
                }
            }
            waits_for = still;
            thread::sleep(Duration::from_millis(1));
        }
        for peer in peers.iter_mut().flatten() {
            peer.link.send(&Message::Go, self.within(PEER_TIMEOUT)).map_err(|error| lost(peer.rank, error))?;
        }
        Ok(())
    }

    /// Runs any other rank's part.
    fn join(&self) -> Result<Channels, Ended> {
        let mut head = self.call(0, &self.addresses, None)?;
        match self.join_with(&mut head) {
            Ok(mut channels) => {
                channels[0] = Some(channel(0, head)?);
                Ok(channels)
            }
            Err(Ended::Here(kind)) => {
                let fault = Box::new(self.fault(kind));
                send_last([&mut head], &Message::Refused(fault.clone()));
                Err(Ended::There(fault))
            }
            there => there,
        }
    }

    fn join_with(&self, head: &mut Link) -> Result<Channels, Ended> {
        let (rank, ranks) = (self.config.rank, self.config.ranks);
        let broken = |error: std::io::Error| lost(rank, error);
        let mut listener = None;
        if rank + 1 < ranks {
            let ip = listening(head.local().map_err(broken)?.ip(), self.is_this_host);
            let socket = TcpListener::bind((ip, 0)).map_err(broken)?;
            listener = Some(Listener::new(socket, self.us().0, &self.config.secret).map_err(broken)?);
        }
        let port = listener.as_ref().map_or(Ok(0), Listener::port).map_err(broken)?;
        self.send_hello(head, [0; 16], port).map_err(|error| lost(0, error))?;
        let (group, roster) = self.roster(head)?;
        let mut links: Vec<Option<Link>> = (0..ranks).map(|_| None).collect();
        for other in 1..rank {
            let mut address = roster[other];
            if address.ip().is_loopback() {
                // That rank is on rank 0's host, so it has the address under which this rank
                // reaches rank 0.
                address.set_ip(head.address.ip());
            }
            let mut link = self.call(other, &[address], Some(head))?;
            self.send_hello(&mut link, group, 0).map_err(|error| lost(other, error))?;
            links[other] = Some(link);
        }
        if let Some(mut listener) = listener {
            self.receive_calls(&mut listener, group, head, &mut links)?;
        }
        head.send(&Message::Ready, self.until).map_err(|error| lost(0, error))?;
        match head.receive(self.until) {
            Ok(Message::Go) => {}
            Ok(Message::Refused(fault)) => return Err(Ended::There(fault)),
            Ok(_) => return Err(lost(0, WireError::Unexpected(0)).into()),
            Err(error) => return Err(lost(0, error).into()),
        }
        links.into_iter().enumerate().map(|(rank, link)| link.map(|link| channel(rank, link)).transpose()).collect()
    }

    /// Waits until rank 0 sends everyone's address.
    fn roster(&self, head: &mut Link) -> Result<([u8; 16], Vec<SocketAddr>), Ended> {
        let mut missing: Vec<usize> = Vec::new();
        loop {
            match head.receive(self.until) {
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
        listener: &mut Listener,
        group: [u8; 16],
        head: &mut Link,
        links: &mut [Option<Link>],
    ) -> Result<(), Ended> {
        loop {
            let own = self.config.rank;
            let missing: Vec<usize> = (own + 1..links.len()).filter(|rank| links[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.is_over() {
                let seen = [vec![format!("they did not connect to rank {own}")], listener.seen()].concat();
                return Err(RendezvousFaultKind::Missing { ranks: missing, seen }.into());
            }
            if let Some(ConnectedPeer { link, rank, hello, .. }) = listener.next_peer()
                && missing.contains(&rank)
                && hello.group == group
            {
                links[rank] = Some(link);
            }
            self.check_head(head)?;
        }
    }

    /// Checks whether rank 0 reports that the rendezvous has failed.
    fn check_head(&self, head: &mut Link) -> Result<(), Ended> {
        match head.poll(PEER_TIMEOUT) {
            // The list of missing ranks is outdated by now.
            Ok(None | Some(Message::Missing(_))) => Ok(()),
            Ok(Some(Message::Refused(fault))) => Err(Ended::There(fault)),
            Ok(Some(_)) => Err(lost(0, WireError::Unexpected(0)).into()),
            Err(error) => Err(lost(0, error).into()),
        }
    }

    fn send_hello(&self, link: &mut Link, group: [u8; 16], port: u16) -> Result<(), WireError> {
        let hello = Hello { protocol: PROTOCOL, version: version().into(), group, port };
        link.send(&Message::Hello(hello), self.within(PEER_TIMEOUT))
    }

    /// Connects to a rank repeatedly until it answers.
    fn call(&self, rank: usize, addresses: &[SocketAddr], mut head: Option<&mut Link>) -> Result<Link, Ended> {
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
            if let Some(head) = head.as_deref_mut() {
                self.check_head(head)?;
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
        let connection = Connection::new(stream).map_err(broken)?;
        let until = self.within(HANDSHAKE_TIMEOUT);
        match connection.call(rank as u32, &self.config.secret, self.us(), until)? {
            (link, answers) if answers as usize == rank => Ok(link),
            (_, answers) => Err(HandshakeError::Wire(WireError::Broken(format!("rank {answers} answers there")))),
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

fn channel(rank: usize, link: Link) -> Result<Channel, Ended> {
    Ok(link.into_channel().map_err(|error| lost(rank, error))?)
}

#[cfg(test)]
mod handshakes;
#[cfg(test)]
mod tests;
