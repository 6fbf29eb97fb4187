//! A connection while ranks meet: every message has a deadline, and nothing is heard before both ends have proved themselves.

#![forbid(unsafe_code)]

use super::secret::{Role, Secret, random};
use super::wire::{self, Greeting, Message, Stage, WireError};
use crate::deadline::after;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long the other end of a connection that is being closed may take to hear why.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A connection of two ranks that know the same secret, or not yet.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// The other end.
    pub(super) address: SocketAddr,
}

/// Why a connection has not become one between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stranger {
    /// The other end, which says that it is this rank, finds our proof wrong, or its own is.
    Secret(u32),
    /// What it said, or that it said nothing.
    Wire(WireError),
    /// The system has no random numbers.
    NoRandom,
}

impl From<WireError> for Stranger {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// A stream whose reads and writes end in time.
struct Timed<'s> {
    stream: &'s TcpStream,
    until: Instant,
}

impl Timed<'_> {
    /// What is left, which is not zero: that would mean for ever.
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(place)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let address = stream.peer_addr()?;
        Ok(Self { stream, address })
    }

    /// This end's address.
    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// The other handle of this connection, by which it can be ended from elsewhere.
    pub(super) fn handle(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    pub(super) fn send(&self, message: &Message, until: Instant) -> Result<(), WireError> {
        Ok(Timed { stream: &self.stream, until }.write_all(&message.frame())?)
    }

    pub(super) fn receive(&self, stage: Stage, until: Instant) -> Result<Message, WireError> {
        wire::read(&mut Timed { stream: &self.stream, until }, stage)
    }

    /// A message of the meeting, if one has come. What has begun to come is waited for.
    pub(super) fn poll(&self, patience: Duration) -> Result<Option<Message>, WireError> {
        self.stream.set_nonblocking(true)?;
        let seen = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false)?;
        match seen {
            Ok(0) => Err(WireError::Ended),
            Ok(_) => self.receive(Stage::Meeting, after(patience)).map(Some),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Both ends prove that they know the secret, first the one that has called. `us` is a rank and the number of ranks; so is what the
    /// other end says of itself, and it is proved with the rest.
    pub(super) fn introduce(
        &self,
        role: Role,
        secret: &Secret,
        us: (u32, u32),
        until: Instant,
    ) -> Result<(u32, u32), Stranger> {
        let nonce = random().map_err(|_| Stranger::NoRandom)?;
        let own = Greeting { nonce, rank: us.0, ranks: us.1 };
        let other = match role {
            Role::Client => {
                self.send(&Message::Greeting(own), until)?;
                self.greeting(until)?
            }
            Role::Server => {
                let other = self.greeting(until)?;
                self.send(&Message::Greeting(own), until)?;
                other
            }
        };
        match role {
            Role::Client => {
                self.send(&Message::Proof(secret.proof(Role::Client, &own, &other)), until)?;
                match self.receive(Stage::Introduction, until)? {
                    Message::Proof(proof) if secret.proves(&proof, Role::Server, &own, &other) => {}
                    Message::Proof(_) | Message::Denied => return Err(Stranger::Secret(other.rank)),
                    _ => return Err(WireError::Unexpected(0).into()),
                }
            }
            Role::Server => {
                match self.receive(Stage::Introduction, until)? {
                    Message::Proof(proof) if secret.proves(&proof, Role::Client, &other, &own) => {}
                    Message::Proof(_) => {
                        part(&[self], &Message::Denied);
                        return Err(Stranger::Secret(other.rank));
                    }
                    _ => return Err(WireError::Unexpected(0).into()),
                }
                self.send(&Message::Proof(secret.proof(Role::Server, &other, &own)), until)?;
            }
        }
        Ok((other.rank, other.ranks))
    }

    fn greeting(&self, until: Instant) -> Result<Greeting, Stranger> {
        match self.receive(Stage::Introduction, until)? {
            Message::Greeting(greeting) => Ok(greeting),
            _ => Err(WireError::Unexpected(1).into()),
        }
    }

    /// The stream, without deadlines.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }
}

/// Says the last thing to some, and waits a moment until they have it: a connection that is closed with something unread is cut, and
/// what was said last may be lost.
pub(super) fn part(links: &[&Link], message: &Message) {
    let until = after(LAST_WORDS);
    let said = |link: &&&Link| link.send(message, until).is_ok() && link.stream.shutdown(Shutdown::Write).is_ok();
    let heard: Vec<_> = links.iter().filter(said).collect();
    for link in heard {
        let mut unread = [0; 512];
        while matches!((Timed { stream: &link.stream, until }).read(&mut unread), Ok(bytes) if bytes > 0) {}
    }
}
