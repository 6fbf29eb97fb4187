//! The channel between two ranks that have met. Feature `encrypted` selects `noise`, which
//! authenticates and encrypts. Builds without it have only `plain`, for ranks of one host.
//!
//! Invariant: a group with a secret never uses a plain channel, because
//! [`GroupConfig`](crate::GroupConfig) refuses a secret in a build without the feature. Builds with
//! and without it refuse each other's greeting.

#![forbid(unsafe_code)]

#[cfg(feature = "encrypted")]
mod noise;
#[cfg(any(test, not(feature = "encrypted")))]
mod plain;

#[cfg(all(test, feature = "encrypted"))]
pub(super) use noise::{ANSWER, CALL};
#[cfg(feature = "encrypted")]
pub(super) use noise::{Handshake, Keys, Opener, Sealer};
#[cfg(not(feature = "encrypted"))]
pub(super) use plain::{Handshake, Keys, Opener, Sealer};

use std::net::TcpStream;

/// The reason why a handshake ended at this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The message does not come from an end that has the secret and takes part in this handshake.
    Secret,
    /// The system has no random numbers.
    #[cfg_attr(not(feature = "encrypted"), expect(dead_code, reason = "a plain channel draws none"))]
    NoRandom,
}

/// A connection between two ranks that have finished the handshake.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) stream: TcpStream,
    pub(super) keys: Keys,
}
