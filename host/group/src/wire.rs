//! The messages between ranks, and their framing on a stream.
//!
//! A frame is a kind (one byte), a length (four bytes, little-endian) and a body. The kind and the
//! body are postcard's encoding of a [`Message`], whose first byte is the number of the variant. A
//! piece of data is the body itself. After the handshake, frames travel in the encrypted records of
//! `channel.rs`. Invariant: the length is checked against the bound of its kind before memory is
//! allocated. Unauthenticated ends may send only short messages. Any bytes decode to a message or
//! an error, whoever sent them.

#![forbid(unsafe_code)]

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use stepscope_core::{RankFault, RendezvousFault};

/// The version of the protocol after [`Message::Hello`]. From version 4 on, the messages up to and
/// including it never change.
pub(crate) const PROTOCOL: u32 = 4;
/// The start of a greeting, which names the channel.
const MAGIC: [u8; 16] = if cfg!(feature = "encrypted") { *b"stepscope noise\n" } else { *b"stepscope plain\n" };
/// The start of a greeting before version 4, and the most bytes that followed it.
const OLD_MAGIC: [u8; 16] = *b"stepscope group\n";
const OLD_GREETING: usize = 32 + 2 * U32;
/// The most bytes of a message of the handshake.
const MOST_HANDSHAKE: usize = 52;
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

/// The claimed identity of the rank that connects. The handshake authenticates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Greeting {
    pub(crate) magic: [u8; MAGIC.len()],
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

impl Greeting {
    pub(crate) fn new(rank: u32, ranks: u32) -> Self {
        Self { magic: MAGIC, rank, ranks }
    }
}

/// The message with which a rank introduces itself to rank 0, or to a rank from the roster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    #[serde(with = "text")]
    pub(crate) version: String,
    /// The group's own number, zero until rank 0 has assigned one.
    pub(crate) group: [u8; 16],
    /// The port that it listens on, or 0 for none.
    pub(crate) port: u16,
}

/// A call that a rank is about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) sequence: u64,
    #[serde(with = "text")]
    pub(crate) op: String,
    #[serde(with = "text")]
    pub(crate) element: String,
    pub(crate) count: u64,
    #[serde(with = "text")]
    pub(crate) location: String,
    pub(crate) word: Vec<u8>,
}

/// A heartbeat: the last op that the rank has begun, how long ago, and the rank it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Beat {
    pub(crate) sequence: u64,
    #[serde(with = "text")]
    pub(crate) op: String,
    #[serde(with = "text")]
    pub(crate) location: String,
    pub(crate) since_ms: u64,
    pub(crate) waits_for: Option<u32>,
}

/// A message. The order of the variants is part of the protocol, and equals the order of [`KINDS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    Greeting(Greeting),
    /// A message of the handshake.
    Handshake(Vec<u8>),
    /// The sender could not authenticate the receiver.
    Denied,
    Hello(Hello),
    /// The ranks that have not arrived yet.
    Missing(Vec<u32>),
    /// The group's number, and the address of each rank.
    Roster([u8; 16], Vec<SocketAddr>),
    /// The sender is connected to all ranks.
    Ready,
    /// All ranks are connected to each other.
    Go,
    /// The rendezvous has failed.
    Refused(Box<RendezvousFault>),
    Announce(Announcement),
    Beat(Beat),
    /// The number of bytes of data that follow, in pieces.
    Begin(u64),
    /// The group has failed.
    Fault(Box<RankFault>),
    Bye,
    /// Data, sent as it is by [`Message::piece`]. The last variant, because serde does not number
    /// variants that it skips.
    #[serde(skip)]
    Piece(Vec<u8>),
}

/// The stage of a conversation. Messages of the next stage are refused before the current one ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Both ends prove that they have the secret. Only these messages are not encrypted.
    Introduction,
    /// The ranks find each other.
    Rendezvous,
    /// The ranks work.
    Group,
}

/// The most bytes of an encoded text, of numbers of 32 and 64 bits, and of an address.
const TEXT: usize = 2 + MOST_TEXT;
const U32: usize = 5;
const U64: usize = 10;
const ADDRESS: usize = 1 + 16 + 3;
/// The kinds of a greeting and of a piece of data.
const GREETING: u8 = 0;
const PIECE: u8 = 14;
/// The stage of each kind of message, and the most bytes of its body.
const KINDS: [(Stage, usize); PIECE as usize + 1] = [
    // An old greeting is longer, and is read to report its version.
    (Stage::Introduction, OLD_MAGIC.len() + OLD_GREETING),
    (Stage::Introduction, 1 + MOST_HANDSHAKE),
    (Stage::Introduction, 0),
    (Stage::Rendezvous, U32 + TEXT + 16 + 3),
    (Stage::Rendezvous, U32 + U32 * MOST_RANKS),
    (Stage::Rendezvous, 16 + U32 + ADDRESS * MOST_RANKS),
    (Stage::Rendezvous, 0),
    (Stage::Rendezvous, 0),
    (Stage::Rendezvous, MOST_FAULT),
    (Stage::Group, 2 * U64 + 3 * TEXT + U32 + MOST_WORD),
    (Stage::Group, 2 * U64 + 2 * TEXT + 1 + U32),
    (Stage::Group, U64),
    (Stage::Group, MOST_FAULT),
    (Stage::Group, 0),
    (Stage::Group, MOST_PIECE),
];

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
    /// A record that the other end has not sent, or not at this place.
    Altered,
    /// A greeting of a version before 4.
    OldProtocol,
    /// A kind that does not exist, or not at this stage.
    Unexpected(u8),
    /// A length that this kind never has.
    Length { kind: u8, claimed: usize, most: usize },
    /// A message of this stage that may not come next.
    OutOfOrder,
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
            Self::Altered => f.write_str("the data received was altered, repeated or left out on its way"),
            Self::OldProtocol => write!(
                f,
                "an older version of stepscope runs there (messages of version 3 or less, here {PROTOCOL}); start the same \
                 program on all ranks"
            ),
            Self::Unexpected(kind) => write!(f, "the data received is not from stepscope (a message of kind {kind})"),
            Self::Length { kind, claimed, most } => write!(
                f,
                "the data received is not from stepscope (a message of kind {kind} claims {claimed} bytes, but may have at most {most})"
            ),
            Self::OutOfOrder => f.write_str("the data received is not from stepscope (a message out of order)"),
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
            ErrorKind::InvalidData => Self::Altered,
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
    let most = match KINDS.get(usize::from(number)) {
        Some((of, most)) if *of == stage => *most,
        _ => return Err(WireError::Unexpected(number)),
    };
    from.read_exact(&mut header[1..])?;
    let claimed = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if claimed > most {
        return Err(WireError::Length { kind: number, claimed, most });
    }
    if number == PIECE {
        let mut piece = vec![0; claimed];
        from.read_exact(&mut piece)?;
        return Ok(Message::Piece(piece));
    }
    let mut encoded = vec![number; 1 + claimed];
    from.read_exact(&mut encoded[1..])?;
    if number == GREETING && encoded[1..].starts_with(&OLD_MAGIC) {
        return Err(WireError::OldProtocol);
    }
    let error = |what| WireError::Body { kind: number, what };
    let (message, rest) = postcard::take_from_bytes::<Message>(&encoded).map_err(|_| error("a malformed body"))?;
    if !rest.is_empty() {
        return Err(error("bytes after its end"));
    }
    message.check().map_err(error)?;
    Ok(message)
}

impl Message {
    /// Returns the frame of the message.
    pub(crate) fn frame(&self) -> Vec<u8> {
        if let Self::Piece(bytes) = self {
            return Self::piece(bytes);
        }
        // The kind is encoded after room for the length, and then changes places with it.
        let room = vec![0; HEADER - 1];
        let mut frame = postcard::to_extend(self, room).expect("memory takes any number of bytes");
        let length = (frame.len() - HEADER) as u32;
        frame[0] = frame[HEADER - 1];
        frame[1..HEADER].copy_from_slice(&length.to_le_bytes());
        frame
    }

    /// Returns the frame of a piece of data, which is copied once.
    pub(crate) fn piece(bytes: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(HEADER + bytes.len());
        frame.push(PIECE);
        frame.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        frame.extend_from_slice(bytes);
        frame
    }

    /// Returns the fault of values that have the right types.
    fn check(&self) -> Result<(), &'static str> {
        let (is_right, what) = match self {
            Self::Greeting(greeting) if greeting.magic != MAGIC => {
                (false, "another greeting; build all ranks with the same features")
            }
            Self::Greeting(Greeting { rank, ranks, .. }) => {
                (*ranks as usize <= MOST_RANKS && rank < ranks, "an impossible rank")
            }
            Self::Missing(ranks) => (ranks.len() <= MOST_RANKS, "more ranks than a group has"),
            Self::Roster(_, addresses) => (addresses.len() <= MOST_RANKS, "more ranks than a group has"),
            Self::Announce(announcement) => (announcement.word.len() <= MOST_WORD, "a word that is too long"),
            Self::Fault(fault) => (
                fault.ranks <= MOST_RANKS && fault.rank < fault.ranks && fault.found_by < fault.ranks,
                "an impossible rank",
            ),
            _ => (true, ""),
        };
        if is_right { Ok(()) } else { Err(what) }
    }
}

/// The encoding of a text, which is cut when it is sent, and refused if it arrives longer.
mod text {
    use super::{Deserialize, Deserializer, MOST_TEXT, Serialize, Serializer, clip};
    use serde::de::Error;

    pub(super) fn serialize<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        clip(text).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let text = <&str>::deserialize(from)?;
        if text.len() > MOST_TEXT { Err(D::Error::custom("a text that is too long")) } else { Ok(text.into()) }
    }
}

#[cfg(test)]
mod tests;
