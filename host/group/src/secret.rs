//! The secret of a group, and proofs of knowing it.
//!
//! Both ends of a connection draw a random number. Each proves that it has the secret by a keyed
//! digest (HMAC-SHA256) of both numbers, both ranks, both group sizes and its own role. Invariant:
//! a proof is valid for one connection and one role, so repeating it or sending it back is useless.
//! Nothing prints the secret.

#![forbid(unsafe_code)]

use super::wire::{Greeting, PROOF};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;
use stepscope_core::error::{Error, Resource, Result};

/// The fewest bytes of a secret. A shorter one could be guessed from an intercepted proof.
const LEAST: usize = 16;
/// The purpose of a proof, so that it is valid for nothing else.
const DOMAIN: &[u8] = b"stepscope group: I know the secret\n";

/// The secret that only the ranks of a group share. None if only this host can connect.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secret(Option<Vec<u8>>);

/// The role of an end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The end that was called.
    Server,
    /// The end that called.
    Client,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "set" } else { "none" })
    }
}

impl Secret {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(Some(bytes.to_vec()))
    }

    /// Creates a random secret.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn random() -> Result<Self> {
        Ok(Self(Some(random::<PROOF>()?.to_vec())))
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// # Errors
    /// [`Error::Misuse`] if it is too short.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.0 {
            Some(bytes) if bytes.len() < LEAST => Err(Error::misuse(
                "group",
                format!("a secret of {LEAST} bytes or more (make one with `openssl rand -hex 32`)"),
                format!("one of {}", bytes.len()),
            )),
            _ => Ok(()),
        }
    }

    /// Returns the proof that an end with this role sends.
    pub(crate) fn proof(&self, role: Role, client: &Greeting, server: &Greeting) -> [u8; PROOF] {
        self.digest(role, client, server).finalize().into_bytes().into()
    }

    /// Returns true if the proof is that of this role. Takes the same time for any proof.
    pub(crate) fn proves(&self, proof: &[u8; PROOF], role: Role, client: &Greeting, server: &Greeting) -> bool {
        self.digest(role, client, server).verify_slice(proof).is_ok()
    }

    fn digest(&self, role: Role, client: &Greeting, server: &Greeting) -> Hmac<Sha256> {
        let key = self.0.as_deref().unwrap_or_default();
        let mut digest = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        digest.update(DOMAIN);
        digest.update(match role {
            Role::Server => b"server",
            Role::Client => b"client",
        });
        for Greeting { nonce, rank, ranks } in [client, server] {
            digest.update(nonce);
            digest.update(&rank.to_le_bytes());
            digest.update(&ranks.to_le_bytes());
        }
        digest
    }
}

/// Returns unpredictable bytes.
///
/// # Errors
/// The system has no random numbers.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    filled_by(getrandom::fill)
}

fn filled_by<const N: usize>(fill: impl FnOnce(&mut [u8]) -> Result<(), getrandom::Error>) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill(&mut bytes).map_err(|error| Error::system("group", Resource::RandomNumbers, error))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(nonce: u8, rank: u32) -> Greeting {
        Greeting { nonce: [nonce; PROOF], rank, ranks: 4 }
    }

    #[test]
    fn proofs_are_bound_to_their_handshake() {
        let (secret, client, server) = (Secret::new(&[7; 32]), greeting(1, 2), greeting(9, 0));
        let proof = secret.proof(Role::Client, &client, &server);
        assert!(secret.proves(&proof, Role::Client, &client, &server));
        // Proofs that are sent back, by another role, to another rank or repeated have different
        // digests.
        assert!(!secret.proves(&proof, Role::Server, &client, &server));
        assert!(!secret.proves(&proof, Role::Client, &server, &client));
        assert!(!secret.proves(&proof, Role::Client, &client, &greeting(8, 0)));
        assert!(!secret.proves(&proof, Role::Client, &greeting(2, 2), &server));
        assert!(!secret.proves(&proof, Role::Client, &greeting(1, 3), &server));
        assert!(!secret.proves(&proof, Role::Client, &Greeting { ranks: 5, ..client }, &server));
        assert!(!Secret::new(&[6; 32]).proves(&proof, Role::Client, &client, &server));
        assert!(!Secret::default().proves(&proof, Role::Client, &client, &server));
        for bit in 0..8 * PROOF {
            let mut other = proof;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!secret.proves(&other, Role::Client, &client, &server));
        }
    }

    #[test]
    fn no_text_has_the_secret() {
        let secret = Secret::new(b"correct horse battery staple");
        assert_eq!((format!("{secret:?}"), format!("{:?}", Secret::default())), ("set".into(), "none".into()));
    }

    #[test]
    fn a_short_secret_is_refused() {
        assert!(Secret::new(&[1; LEAST]).check().is_ok() && Secret::default().check().is_ok());
        let error = Secret::new(&[1; LEAST - 1]).check().expect_err("too short").to_string();
        assert!(error.contains("16 bytes or more") && error.contains("one of 15"), "{error}");
        assert!(Secret::new(&[]).check().is_err());
    }

    #[test]
    fn missing_random_numbers_are_named() {
        let error = filled_by::<8>(|_| Err(getrandom::Error::UNSUPPORTED)).unwrap_err();
        assert!(matches!(error, Error::System { op: "group", resource: Resource::RandomNumbers, .. }), "{error}");
        assert!(std::error::Error::source(&error).is_some());
    }
}
