//! A connection during the rendezvous. Every message has a deadline. A [`Connection`] carries only
//! the handshake, and becomes a [`Link`] when both ends have authenticated.

#![forbid(unsafe_code)]

use super::channel::{Channel, Handshake, Refusal};
use super::secret::Secret;
use super::wire::{self, Greeting, Message, Stage, WireError};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use stepscope_core::internals::after;

/// The time that the other end of a closing connection may take to receive the reason.
const LAST_MESSAGE: Duration = Duration::from_millis(200);

/// A connection whose other end has not authenticated.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// The address of the other end.
    address: SocketAddr,
}

/// A connection between two ranks that share the secret. Its messages are encrypted.
#[derive(Debug)]
pub(super) struct Link {
    channel: Channel,
    /// The address of the other end.
    pub(super) address: SocketAddr,
}

/// The reason why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HandshakeError {
    /// The other end, which should be or claims to be this rank, has a different secret.
    Secret(u32),
    /// The other end's message was invalid, or did not arrive.
    Wire(WireError),
    /// The system has no random numbers.
    NoRandom,
}

impl From<WireError> for HandshakeError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl HandshakeError {
    fn of_rank(rank: u32, refusal: Refusal) -> Self {
        match refusal {
            Refusal::Secret => Self::Secret(rank),
            Refusal::NoRandom => Self::NoRandom,
        }
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

impl Connection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let address = stream.peer_addr()?;
        Ok(Self { stream, address })
    }

    /// Returns a second handle of this connection, which another thread can use to end it.
    pub(super) fn handle(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    pub(super) fn send(&self, message: &Message, until: Instant) -> Result<(), WireError> {
        Ok(Timed { stream: &self.stream, until }.write_all(&message.frame())?)
    }

    pub(super) fn receive(&self, until: Instant) -> Result<Message, WireError> {
        wire::read(&mut Timed { stream: &self.stream, until }, Stage::Introduction)
    }

    /// Authenticates the end that connected, and proves to `rank` that this rank has the secret.
    /// `us` is this rank and the number of ranks. Returns the rank that answers.
    pub(super) fn call(
        self,
        rank: u32,
        secret: &Secret,
        us: (u32, u32),
        until: Instant,
    ) -> Result<(Link, u32), HandshakeError> {
        let refused = |refusal| HandshakeError::of_rank(rank, refusal);
        let greeting = Message::Greeting(Greeting::new(us.0, us.1));
        let (handshake, call) = Handshake::call(secret, &greeting.frame()).map_err(refused)?;
        let messages = [greeting.frame(), Message::Handshake(call).frame()].concat();
        Timed { stream: &self.stream, until }.write_all(&messages).map_err(WireError::from)?;
        match self.receive(until) {
            Ok(Message::Handshake(answer)) => {
                let (answers, keys) = handshake.read_answer(&answer).map_err(refused)?;
                Ok((Link { channel: Channel { stream: self.stream, keys }, address: self.address }, answers))
            }
            Ok(Message::Denied) => Err(HandshakeError::Secret(rank)),
            Ok(_) => Err(WireError::OutOfOrder.into()),
            // Versions before 4 close the connection.
            Err(error @ (WireError::Ended | WireError::Broken(_))) => {
                Err(WireError::Broken(format!("{error}; another version of stepscope may run there")).into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Authenticates the other end, which connected, and proves that this rank has the secret.
    /// Returns what the other end claims to be, which its next message proves: until then it may
    /// repeat the messages of another connection.
    pub(super) fn answer(self, secret: &Secret, rank: u32, until: Instant) -> Result<(Link, Greeting), HandshakeError> {
        let Message::Greeting(greeting) = self.receive(until)? else { return Err(WireError::OutOfOrder.into()) };
        let Message::Handshake(call) = self.receive(until)? else { return Err(WireError::OutOfOrder.into()) };
        let prologue = Message::Greeting(greeting).frame();
        match Handshake::answer(secret, &prologue, &call, rank) {
            Ok((answer, keys)) => {
                self.send(&Message::Handshake(answer), until)?;
                Ok((Link { channel: Channel { stream: self.stream, keys }, address: self.address }, greeting))
            }
            Err(refusal) => {
                if refusal == Refusal::Secret {
                    let until = after(LAST_MESSAGE);
                    if self.send(&Message::Denied, until).is_ok() && self.stream.shutdown(Shutdown::Write).is_ok() {
                        linger(&self.stream, until);
                    }
                }
                Err(HandshakeError::of_rank(greeting.rank, refusal))
            }
        }
    }
}

impl Link {
    /// Returns this end's address.
    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        self.channel.stream.local_addr()
    }

    pub(super) fn send(&mut self, message: &Message, until: Instant) -> Result<(), WireError> {
        let Channel { stream, keys } = &mut self.channel;
        Ok(Timed { stream, until }.write_all(&keys.sealer.seal(&message.frame()))?)
    }

    pub(super) fn receive(&mut self, until: Instant) -> Result<Message, WireError> {
        let Channel { stream, keys } = &mut self.channel;
        wire::read(&mut keys.opener.open(Timed { stream, until }), Stage::Rendezvous)
    }

    /// Receives a message if one has arrived. Waits for the rest of a partly received message.
    pub(super) fn poll(&mut self, timeout: Duration) -> Result<Option<Message>, WireError> {
        let Channel { stream, keys } = &self.channel;
        if !keys.opener.is_drained() {
            return self.receive(after(timeout)).map(Some);
        }
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        match seen {
            Ok(0) => Err(WireError::Ended),
            Ok(_) => self.receive(after(timeout)).map(Some),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the channel, without deadlines.
    pub(super) fn into_channel(self) -> io::Result<Channel> {
        self.channel.stream.set_read_timeout(None)?;
        self.channel.stream.set_write_timeout(None)?;
        Ok(self.channel)
    }
}

/// Sends a last message to some ranks, and waits briefly until they have received it.
pub(super) fn send_last<'l>(links: impl IntoIterator<Item = &'l mut Link>, message: &Message) {
    let until = after(LAST_MESSAGE);
    let send = |link: &'l mut Link| {
        let sent = link.send(message, until).is_ok() && link.channel.stream.shutdown(Shutdown::Write).is_ok();
        sent.then_some(link)
    };
    let sent: Vec<_> = links.into_iter().filter_map(send).collect();
    sent.iter().for_each(|link| linger(&link.channel.stream, until));
}

/// Waits until the other end has closed the connection. Closing a connection with unread data
/// resets it, and the last message may be lost.
fn linger(stream: &TcpStream, until: Instant) {
    let mut unread = [0; 512];
    while matches!((Timed { stream, until }).read(&mut unread), Ok(bytes) if bytes > 0) {}
}
