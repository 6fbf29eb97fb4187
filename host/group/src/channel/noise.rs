//! The authenticated and encrypted channel between two ranks: the Noise protocol of crate `snow`.
//!
//! A [`Handshake`] of two messages proves to each end that the other has the group's secret, and
//! agrees on keys that only this connection uses. Afterwards a [`Sealer`] cuts the bytes to send
//! into records, and an [`Opened`] stream returns the bytes of the records that arrive. A record is
//! a length of two bytes (little-endian) and a Noise message of at most 65,535 bytes. Invariant: an
//! opened stream returns what the other end has sealed on this connection, in that order, or an
//! error. A record that was altered, repeated, left out or moved is an error.

#![forbid(unsafe_code)]

use super::Refusal;
use crate::secret::Secret;
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::sync::Arc;

/// The pattern: two ephemeral keys, and the secret from the first message on. The responder answers
/// only an initiator that has the secret.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// The bytes of an ephemeral key, and of an authentication tag.
const KEY: usize = 32;
const TAG: usize = 16;
/// The bytes of the two messages of a handshake: the initiator's, and the responder's.
pub(crate) const CALL: usize = KEY + TAG;
pub(crate) const ANSWER: usize = KEY + size_of::<u32>() + TAG;
/// The bytes of a record's length.
const LENGTH: usize = 2;
/// The most bytes of a record's Noise message, and of its content.
const MOST_SEALED: usize = u16::MAX as usize;
const MOST_OPENED: usize = MOST_SEALED - TAG;

impl From<snow::Error> for Refusal {
    fn from(error: snow::Error) -> Self {
        match error {
            snow::Error::Rng => Self::NoRandom,
            _ => Self::Secret,
        }
    }
}

/// A handshake. Both ends must also have the same prologue, which is sent in the clear before.
#[derive(Debug)]
pub(crate) struct Handshake(Box<HandshakeState>);

impl Handshake {
    /// Begins the handshake of the end that connected. Returns its message.
    pub(crate) fn call(secret: &Secret, prologue: &[u8]) -> Result<(Self, Vec<u8>), Refusal> {
        let mut state = begin(secret, prologue, |builder| builder.build_initiator());
        let mut message = vec![0; CALL];
        let bytes = state.write_message(&[], &mut message)?;
        message.truncate(bytes);
        Ok((Self(Box::new(state)), message))
    }

    /// Reads the answer to the call. Returns the rank that answers, and the keys.
    pub(crate) fn read_answer(mut self, message: &[u8]) -> Result<(u32, Keys), Refusal> {
        let mut rank = [0; ANSWER];
        let bytes = self.0.read_message(message, &mut rank)?;
        let rank = <[u8; 4]>::try_from(&rank[..bytes]).map_err(|_| Refusal::Secret)?;
        Ok((u32::from_le_bytes(rank), self.finish()))
    }

    /// Reads the call of the end that connected. Returns the answer of this rank, and the keys.
    pub(crate) fn answer(secret: &Secret, prologue: &[u8], call: &[u8], rank: u32) -> Result<(Vec<u8>, Keys), Refusal> {
        let mut state = begin(secret, prologue, |builder| builder.build_responder());
        state.read_message(call, &mut [0; CALL])?;
        let mut message = vec![0; ANSWER];
        let bytes = state.write_message(&rank.to_le_bytes(), &mut message)?;
        message.truncate(bytes);
        Ok((message, Self(Box::new(state)).finish()))
    }

    fn finish(self) -> Keys {
        let keys = Arc::new(self.0.into_stateless_transport_mode().expect("both messages were exchanged"));
        Keys {
            sealer: Sealer { keys: keys.clone(), next: 0 },
            opener: Opener { keys, next: 0, sealed: Vec::new(), opened: Vec::new(), at: 0 },
        }
    }
}

fn begin(
    secret: &Secret,
    prologue: &[u8],
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> HandshakeState {
    let key = secret.key();
    let pattern = PATTERN.parse().expect("snow supports the pattern");
    let builder = Builder::new(pattern).psk(0, &key).and_then(|builder| builder.prologue(prologue));
    builder.and_then(build).expect("the pattern needs no other keys")
}

/// The two directions of a channel.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

/// The direction in which this end sends. It numbers its records.
#[derive(Debug)]
pub(crate) struct Sealer {
    keys: Arc<StatelessTransportState>,
    next: u64,
}

impl Sealer {
    /// Returns the records of these bytes.
    pub(crate) fn seal(&mut self, bytes: &[u8]) -> Vec<u8> {
        let records = bytes.len().div_ceil(MOST_OPENED);
        let mut sealed = vec![0; bytes.len() + records * (LENGTH + TAG)];
        let mut rest = &mut sealed[..];
        for content in bytes.chunks(MOST_OPENED) {
            let (record, after) = rest.split_at_mut(LENGTH + content.len() + TAG);
            let (length, message) = record.split_at_mut(LENGTH);
            length.copy_from_slice(&(message.len() as u16).to_le_bytes());
            let written = self.keys.write_message(self.next, content, message);
            assert_eq!(written, Ok(content.len() + TAG), "fewer than 2^64 records are sealed, and the buffer has room");
            self.next += 1;
            rest = after;
        }
        sealed
    }
}

/// The direction in which this end receives, with the bytes that were opened and not read yet.
pub(crate) struct Opener {
    keys: Arc<StatelessTransportState>,
    /// The number of the next record.
    next: u64,
    sealed: Vec<u8>,
    opened: Vec<u8>,
    /// The opened bytes that have been read.
    at: usize,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Opener {
    /// Returns true if no opened bytes are left to read.
    pub(crate) fn is_drained(&self) -> bool {
        self.at == self.opened.len()
    }

    /// Returns a stream of the contents of the records in `from`.
    pub(crate) fn open<R: Read>(&mut self, from: R) -> Opened<'_, R> {
        Opened { opener: self, from }
    }

    /// Opens the next record. Returns false if the stream ends before it.
    fn next_record(&mut self, from: &mut impl Read) -> io::Result<bool> {
        let mut length = [0; LENGTH];
        let first = loop {
            match from.read(&mut length[..1]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if first == 0 {
            return Ok(false);
        }
        from.read_exact(&mut length[1..])?;
        self.sealed.resize(u16::from_le_bytes(length).into(), 0);
        from.read_exact(&mut self.sealed)?;
        self.opened.resize(self.sealed.len().saturating_sub(TAG), 0);
        // Nothing of a record that is refused can be read.
        self.at = self.opened.len();
        let read = self.keys.read_message(self.next, &self.sealed, &mut self.opened);
        read.map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
        self.next += 1;
        self.at = 0;
        Ok(true)
    }
}

/// A stream of the content of another stream's records. An altered record is an error of kind
/// [`ErrorKind::InvalidData`].
#[derive(Debug)]
pub(crate) struct Opened<'o, R> {
    opener: &'o mut Opener,
    from: R,
}

impl<R: Read> Read for Opened<'_, R> {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        while self.opener.is_drained() {
            if !self.opener.next_record(&mut self.from)? {
                return Ok(0);
            }
        }
        let Opener { opened, at, .. } = &mut *self.opener;
        let bytes = place.len().min(opened.len() - *at);
        place[..bytes].copy_from_slice(&opened[*at..*at + bytes]);
        *at += bytes;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
