//! The channel of a build without feature `encrypted`: bytes travel unchanged.
//!
//! Invariant: both ends are on one host and have no secret.

#![forbid(unsafe_code)]

use super::Refusal;
use crate::secret::Secret;
use std::io::Read;

/// A handshake, which only passes the number of the rank that answers.
#[derive(Debug)]
pub(crate) struct Handshake;

impl Handshake {
    /// Begins the handshake of the end that connected. Returns its message.
    pub(crate) fn call(_: &Secret, _prologue: &[u8]) -> Result<(Self, Vec<u8>), Refusal> {
        Ok((Self, Vec::new()))
    }

    /// Reads the answer to the call. Returns the rank that answers.
    pub(crate) fn read_answer(self, message: &[u8]) -> Result<(u32, Keys), Refusal> {
        let rank = message.try_into().map_err(|_| Refusal::Secret)?;
        Ok((u32::from_le_bytes(rank), KEYS))
    }

    /// Reads the call of the end that connected. Returns the answer of this rank.
    pub(crate) fn answer(_: &Secret, _prologue: &[u8], call: &[u8], rank: u32) -> Result<(Vec<u8>, Keys), Refusal> {
        if call.is_empty() { Ok((rank.to_le_bytes().to_vec(), KEYS)) } else { Err(Refusal::Secret) }
    }
}

/// The two directions of a channel.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

const KEYS: Keys = Keys { sealer: Sealer, opener: Opener };

/// The direction in which this end sends.
#[derive(Debug)]
pub(crate) struct Sealer;

impl Sealer {
    /// Returns the bytes to send.
    pub(crate) fn seal(&mut self, bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }
}

/// The direction in which this end receives.
#[derive(Debug)]
pub(crate) struct Opener;

impl Opener {
    /// Returns true, because this end keeps no received bytes.
    pub(crate) fn is_drained(&self) -> bool {
        true
    }

    /// Returns the stream of received bytes.
    pub(crate) fn open<R: Read>(&mut self, from: R) -> R {
        from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_handshakes_pass_the_rank() {
        let none = Secret::default();
        let (handshake, call) = Handshake::call(&none, b"rank 2 of 4").unwrap();
        let (answer, mut server) = Handshake::answer(&none, b"rank 2 of 4", &call, 3).unwrap();
        let (rank, mut client) = handshake.read_answer(&answer).unwrap();
        let mut received = Vec::new();
        client.opener.open(&server.sealer.seal(b"bytes")[..]).read_to_end(&mut received).unwrap();
        assert_eq!((rank, &received[..], client.opener.is_drained()), (3, &b"bytes"[..], true));
        assert_eq!(Handshake::answer(&none, b"", b"a call", 3).map(|(answer, _)| answer), Err(Refusal::Secret));
        assert_eq!(Handshake.read_answer(&[0; 5]).map(|(rank, _)| rank), Err(Refusal::Secret));
        server.sealer.seal(b"");
        client.sealer.seal(b"");
    }
}
