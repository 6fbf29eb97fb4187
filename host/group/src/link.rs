//! A connection during the rendezvous. Every message has a deadline, and only handshake messages
//! are accepted before both ends have authenticated.

#![forbid(unsafe_code)]

use super::secret::{Role, Secret, random};
use super::wire::{self, Greeting, Message, Stage, WireError};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use stepscope_core::deadline::after;

/// The time that the other end of a closing connection may take to receive the reason.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A connection between two ranks, before and after both have proved that they share the secret.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// The address of the other end.
    pub(super) address: SocketAddr,
}

/// The reason why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HandshakeError {
    /// The other end, which claims to be this rank, rejected our proof, or its own proof is wrong.
    Secret(u32),
    /// Its message was invalid, or did not arrive.
    Wire(WireError),
    /// The system has no random numbers.
    NoRandom,
}

impl From<WireError> for HandshakeError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// A stream whose reads and writes have a deadline.
struct Timed<'s> {
    stream: &'s TcpStream,
    until: Instant,
}

impl Timed<'_> {
    /// Returns the remaining time, which is nonzero because zero would mean no limit.
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

    /// Returns this end's address.
    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Returns a second handle of this connection, which another thread can use to end it.
    pub(super) fn handle(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    pub(super) fn send(&self, message: &Message, until: Instant) -> Result<(), WireError> {
        Ok(Timed { stream: &self.stream, until }.write_all(&message.frame())?)
    }

    pub(super) fn receive(&self, stage: Stage, until: Instant) -> Result<Message, WireError> {
        wire::read(&mut Timed { stream: &self.stream, until }, stage)
    }

    /// Receives a rendezvous message if one has arrived. Waits for the rest of a partly received
    /// message.
    pub(super) fn poll(&self, patience: Duration) -> Result<Option<Message>, WireError> {
        self.stream.set_nonblocking(true)?;
        let seen = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false)?;
        match seen {
            Ok(0) => Err(WireError::Ended),
            Ok(_) => self.receive(Stage::Rendezvous, after(patience)).map(Some),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes both ends prove that they share the secret, first the one that connected. `us` is a
    /// rank and the number of ranks. The other end sends its own pair, which its proof covers.
    pub(super) fn introduce(
        &self,
        role: Role,
        secret: &Secret,
        us: (u32, u32),
        until: Instant,
    ) -> Result<(u32, u32), HandshakeError> {
        let nonce = random().map_err(|_| HandshakeError::NoRandom)?;
        let own = Greeting::new(nonce, us.0, us.1);
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
                    Message::Proof(_) | Message::Denied => return Err(HandshakeError::Secret(other.rank)),
                    _ => return Err(WireError::OutOfOrder.into()),
                }
            }
            Role::Server => {
                match self.receive(Stage::Introduction, until)? {
                    Message::Proof(proof) if secret.proves(&proof, Role::Client, &other, &own) => {}
                    Message::Proof(_) => {
                        part(&[self], &Message::Denied);
                        return Err(HandshakeError::Secret(other.rank));
                    }
                    _ => return Err(WireError::OutOfOrder.into()),
                }
                self.send(&Message::Proof(secret.proof(Role::Server, &other, &own)), until)?;
            }
        }
        Ok((other.rank, other.ranks))
    }

    fn greeting(&self, until: Instant) -> Result<Greeting, HandshakeError> {
        match self.receive(Stage::Introduction, until)? {
            Message::Greeting(greeting) => Ok(greeting),
            _ => Err(WireError::OutOfOrder.into()),
        }
    }

    /// Returns the stream, without deadlines.
    pub(super) fn into_stream(self) -> io::Result<TcpStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }
}

/// Sends a last message to some ranks, and waits briefly until they have received it. Closing a
/// connection with unread data resets it, and the last message may be lost.
pub(super) fn part(links: &[&Link], message: &Message) {
    let until = after(LAST_WORDS);
    let said = |link: &&&Link| link.send(message, until).is_ok() && link.stream.shutdown(Shutdown::Write).is_ok();
    let heard: Vec<_> = links.iter().filter(said).collect();
    for link in heard {
        let mut unread = [0; 512];
        while matches!((Timed { stream: &link.stream, until }).read(&mut unread), Ok(bytes) if bytes > 0) {}
    }
}
