//! The messages between ranks, and their framing on a stream.
//!
//! A frame is a kind (one byte), a length (four bytes, little-endian) and a body. Invariant: the
//! length is checked against the bound of its kind before memory is allocated. Unauthenticated ends
//! may send only short messages. Any bytes decode to a message or an error, whoever sent them.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use stepscope_core::rank_fault::{RankFault, RendezvousFault};

/// The version of the protocol after [`Message::Hello`]. The messages up to and including it never
/// change.
pub(crate) const PROTOCOL: u32 = 2;
/// The start of a greeting.
const MAGIC: [u8; 16] = *b"stepscope group\n";
/// The bytes of a nonce, and of a proof.
pub(crate) const PROOF: usize = 32;
/// The bytes before a body.
const HEADER: usize = 5;
/// The most ranks of a group.
pub(crate) const MOST_RANKS: usize = 4096;
/// The most bytes of a text.
const MOST_TEXT: usize = 1024;
/// The most bytes of a word that ranks send in a round.
pub(crate) const MOST_WORD: usize = 64 << 10;
/// The most bytes of a piece of a collective's data.
pub(crate) const MOST_PIECE: usize = 1 << 20;
/// The most bytes of a fault: a few texts, and the numbers of all ranks.
const MOST_FAULT: usize = 64 << 10;
/// The value for no rank.
const NOBODY: u32 = u32::MAX;

/// The sender's claimed identity and its fresh random number. Nothing in it is authenticated yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) nonce: [u8; PROOF],
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

/// The message with which a rank introduces itself to rank 0, or to a rank from the roster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    pub(crate) version: String,
    /// The group's own number, zero until rank 0 has assigned one.
    pub(crate) group: [u8; 16],
    /// The port that it listens on, or 0 for none.
    pub(crate) port: u16,
}

/// A call that a rank is about to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub(crate) sequence: u64,
    pub(crate) op: String,
    pub(crate) element: String,
    pub(crate) count: u64,
    pub(crate) location: String,
    pub(crate) word: Vec<u8>,
}

/// A heartbeat: the last op that the rank has begun, how long ago, and the rank it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Beat {
    pub(crate) sequence: u64,
    pub(crate) op: String,
    pub(crate) location: String,
    pub(crate) since_ms: u64,
    pub(crate) waits_for: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Greeting(Greeting),
    /// The sender's proof that it has the secret.
    Proof([u8; PROOF]),
    /// The receiver's proof was wrong.
    Denied,
    Hello(Hello),
    /// The ranks that have not arrived yet.
    Missing(Vec<u32>),
    /// The group's number, and the address of each rank.
    Roster([u8; 16], Vec<SocketAddr>),
    /// The sender has all its connections.
    Ready,
    /// All ranks have theirs.
    Go,
    /// The rendezvous has failed.
    Refused(Box<RendezvousFault>),
    Announce(Announcement),
    Beat(Beat),
    /// The number of bytes of data that follow, in pieces.
    Begin(u64),
    Piece(Vec<u8>),
    /// The group has failed.
    Fault(Box<RankFault>),
    Bye,
}

/// The stage of a conversation. Messages of the next stage are refused before the current one ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Both ends prove that they have the secret.
    Introduction,
    /// The ranks find each other.
    Rendezvous,
    /// The ranks work.
    Group,
}

/// Returns the stage of a kind of message, and the most bytes of its body.
fn kind(number: u8) -> Option<(Stage, usize)> {
    let numbers = 4 + 4 * MOST_RANKS;
    let text = 2 + MOST_TEXT;
    Some(match number {
        0 => (Stage::Introduction, MAGIC.len() + PROOF + 8),
        1 => (Stage::Introduction, PROOF),
        2 => (Stage::Introduction, 0),
        16 => (Stage::Rendezvous, 4 + text + 16 + 2),
        17 => (Stage::Rendezvous, numbers),
        // An address is a text of at most 58 bytes.
        18 => (Stage::Rendezvous, 16 + 4 + 64 * MOST_RANKS),
        19 | 20 => (Stage::Rendezvous, 0),
        21 => (Stage::Rendezvous, MOST_FAULT),
        32 => (Stage::Group, 8 + text + text + 8 + text + 4 + MOST_WORD),
        33 => (Stage::Group, 8 + text + text + 8 + 4),
        34 => (Stage::Group, 8),
        35 => (Stage::Group, MOST_PIECE),
        36 => (Stage::Group, MOST_FAULT),
        37 => (Stage::Group, 0),
        _ => return None,
    })
}

/// The reason why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WireError {
    /// The stream ended between two messages.
    Ended,
    /// The stream ended within a message.
    Cut,
    /// The time-out of a read.
    Slow,
    /// The system's error message.
    Broken(String),
    /// A kind that does not exist, or not at this stage.
    Unexpected(u8),
    /// A length that this kind never has.
    Length { kind: u8, claimed: usize, most: usize },
    /// A body that this kind never has.
    Body { kind: u8, what: &'static str },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("the connection was closed"),
            Self::Cut => f.write_str("the connection was closed in the middle of a message"),
            Self::Slow => f.write_str("no answer came in time"),
            Self::Broken(reason) => write!(f, "the connection broke: {reason}"),
            Self::Unexpected(kind) => write!(f, "the data received is not from stepscope (a message of kind {kind})"),
            Self::Length { kind, claimed, most } => write!(
                f,
                "the data received is not from stepscope (a message of kind {kind} claims {claimed} bytes, but may have at most {most})"
            ),
            Self::Body { kind, what } => {
                write!(f, "the data received is not from stepscope (a message of kind {kind}: {what})")
            }
        }
    }
}

impl From<std::io::Error> for WireError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Self::Slow,
            ErrorKind::UnexpectedEof => Self::Cut,
            _ => Self::Broken(error.to_string()),
        }
    }
}

/// Cuts a text to the longest one that the wire carries.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MOST_TEXT)]
}

/// Reads the next message of a stream, if it belongs to the stage.
pub(crate) fn read(from: &mut impl Read, stage: Stage) -> Result<Message, WireError> {
    let mut header = [0; HEADER];
    let first = loop {
        match from.read(&mut header[..1]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if first == 0 {
        return Err(WireError::Ended);
    }
    // A stranger's message is refused by its first byte.
    let number = header[0];
    let most = match kind(number) {
        Some((of, most)) if of == stage => most,
        _ => return Err(WireError::Unexpected(number)),
    };
    from.read_exact(&mut header[1..])?;
    let claimed = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if claimed > most {
        return Err(WireError::Length { kind: number, claimed, most });
    }
    let mut body = vec![0; claimed];
    from.read_exact(&mut body)?;
    Message::decode(number, body)
}

impl Message {
    /// Returns the frame of the message.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut frame = vec![self.kind(), 0, 0, 0, 0];
        self.encode(&mut frame);
        let length = (frame.len() - HEADER) as u32;
        frame[1..HEADER].copy_from_slice(&length.to_le_bytes());
        frame
    }

    /// Returns the frame of a piece of data, which is copied once.
    pub(crate) fn piece(bytes: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(HEADER + bytes.len());
        frame.push(35);
        frame.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        frame.extend_from_slice(bytes);
        frame
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Greeting(_) => 0,
            Self::Proof(_) => 1,
            Self::Denied => 2,
            Self::Hello(_) => 16,
            Self::Missing(_) => 17,
            Self::Roster(..) => 18,
            Self::Ready => 19,
            Self::Go => 20,
            Self::Refused(_) => 21,
            Self::Announce(_) => 32,
            Self::Beat(_) => 33,
            Self::Begin(_) => 34,
            Self::Piece(_) => 35,
            Self::Fault(_) => 36,
            Self::Bye => 37,
        }
    }

    fn encode(&self, to: &mut Vec<u8>) {
        match self {
            Self::Denied | Self::Ready | Self::Go | Self::Bye => {}
            Self::Greeting(Greeting { nonce, rank, ranks }) => {
                to.extend_from_slice(&MAGIC);
                to.extend_from_slice(nonce);
                to.extend_from_slice(&rank.to_le_bytes());
                to.extend_from_slice(&ranks.to_le_bytes());
            }
            Self::Proof(proof) => to.extend_from_slice(proof),
            Self::Hello(Hello { protocol, version, group, port }) => {
                to.extend_from_slice(&protocol.to_le_bytes());
                put_text(to, version);
                to.extend_from_slice(group);
                to.extend_from_slice(&port.to_le_bytes());
            }
            Self::Missing(ranks) => {
                to.extend_from_slice(&(ranks.len() as u32).to_le_bytes());
                ranks.iter().for_each(|rank| to.extend_from_slice(&rank.to_le_bytes()));
            }
            Self::Roster(group, addresses) => {
                to.extend_from_slice(group);
                to.extend_from_slice(&(addresses.len() as u32).to_le_bytes());
                addresses.iter().for_each(|address| put_text(to, &address.to_string()));
            }
            // These are plain values of texts and numbers, so serializing them cannot fail.
            Self::Refused(fault) => to.extend(serde_json::to_vec(fault).unwrap_or_default()),
            Self::Fault(fault) => to.extend(serde_json::to_vec(fault).unwrap_or_default()),
            Self::Announce(Announcement { sequence, op, element, count, location, word }) => {
                to.extend_from_slice(&sequence.to_le_bytes());
                put_text(to, op);
                put_text(to, element);
                to.extend_from_slice(&count.to_le_bytes());
                put_text(to, location);
                to.extend_from_slice(&(word.len() as u32).to_le_bytes());
                to.extend_from_slice(word);
            }
            Self::Beat(Beat { sequence, op, location, since_ms, waits_for }) => {
                to.extend_from_slice(&sequence.to_le_bytes());
                put_text(to, op);
                put_text(to, location);
                to.extend_from_slice(&since_ms.to_le_bytes());
                to.extend_from_slice(&waits_for.unwrap_or(NOBODY).to_le_bytes());
            }
            Self::Begin(bytes) => to.extend_from_slice(&bytes.to_le_bytes()),
            Self::Piece(bytes) => to.extend_from_slice(bytes),
        }
    }

    fn decode(kind: u8, body: Vec<u8>) -> Result<Self, WireError> {
        if kind == 35 {
            return Ok(Self::Piece(body));
        }
        let mut body = Body { kind, left: &body };
        let message = match kind {
            0 => {
                if body.array::<{ MAGIC.len() }>()? != MAGIC {
                    return Err(body.error("another greeting"));
                }
                let (nonce, rank, ranks) = (body.array()?, body.u32()?, body.u32()?);
                if ranks as usize > MOST_RANKS || rank >= ranks {
                    return Err(body.error("an impossible rank"));
                }
                Self::Greeting(Greeting { nonce, rank, ranks })
            }
            1 => Self::Proof(body.array()?),
            2 => Self::Denied,
            16 => Self::Hello(Hello {
                protocol: body.u32()?,
                version: body.text()?,
                group: body.array()?,
                port: u16::from_le_bytes(body.array()?),
            }),
            17 => Self::Missing((0..body.ranks()?).map(|_| body.u32()).collect::<Result<_, _>>()?),
            18 => {
                let group = body.array()?;
                let addresses = (0..body.ranks()?).map(|_| {
                    let text = body.text()?;
                    text.parse().map_err(|_| body.error("a text that is not an address"))
                });
                Self::Roster(group, addresses.collect::<Result<_, _>>()?)
            }
            19 => Self::Ready,
            20 => Self::Go,
            21 => Self::Refused(body.json()?),
            32 => Self::Announce(Announcement {
                sequence: body.u64()?,
                op: body.text()?,
                element: body.text()?,
                count: body.u64()?,
                location: body.text()?,
                word: {
                    let bytes = body.u32()? as usize;
                    if bytes > MOST_WORD {
                        return Err(body.error("a word that is too long"));
                    }
                    body.take(bytes)?.to_vec()
                },
            }),
            33 => Self::Beat(Beat {
                sequence: body.u64()?,
                op: body.text()?,
                location: body.text()?,
                since_ms: body.u64()?,
                waits_for: Some(body.u32()?).filter(|rank| *rank != NOBODY),
            }),
            34 => Self::Begin(body.u64()?),
            36 => {
                let fault: Box<RankFault> = body.json()?;
                if fault.ranks > MOST_RANKS || fault.rank >= fault.ranks || fault.found_by >= fault.ranks {
                    return Err(body.error("an impossible rank"));
                }
                Self::Fault(fault)
            }
            37 => Self::Bye,
            _ => return Err(WireError::Unexpected(kind)),
        };
        if body.left.is_empty() { Ok(message) } else { Err(body.error("bytes after its end")) }
    }
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    let text = clip(text);
    to.extend_from_slice(&(text.len() as u16).to_le_bytes());
    to.extend_from_slice(text.as_bytes());
}

/// The rest of a body.
struct Body<'b> {
    kind: u8,
    left: &'b [u8],
}

impl<'b> Body<'b> {
    fn error(&self, what: &'static str) -> WireError {
        WireError::Body { kind: self.kind, what }
    }

    fn take(&mut self, bytes: usize) -> Result<&'b [u8], WireError> {
        let (taken, left) = self.left.split_at_checked(bytes).ok_or(self.error("too few bytes"))?;
        self.left = left;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a number of ranks.
    fn ranks(&mut self) -> Result<u32, WireError> {
        let ranks = self.u32()?;
        if ranks as usize <= MOST_RANKS { Ok(ranks) } else { Err(self.error("more ranks than a group has")) }
    }

    fn text(&mut self) -> Result<String, WireError> {
        let bytes = u16::from_le_bytes(self.array()?) as usize;
        if bytes > MOST_TEXT {
            return Err(self.error("a text that is too long"));
        }
        let text = std::str::from_utf8(self.take(bytes)?).map_err(|_| self.error("a text that is not UTF-8"))?;
        Ok(text.into())
    }

    /// Parses the rest as a fault.
    fn json<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, WireError> {
        let rest = std::mem::take(&mut self.left);
        serde_json::from_slice(rest).map_err(|_| self.error("a malformed fault"))
    }
}

#[cfg(test)]
mod tests;
