//! The secret of a group, and the key that the handshake derives from it.
//!
//! Invariant: nothing prints the secret.

#![forbid(unsafe_code)]

#[cfg(feature = "encrypted")]
use sha2::{Digest, Sha256};
use std::fmt;
use stepscope_core::{Error, Resource, Result};

/// The fewest bytes of a secret. A shorter one could be guessed from an intercepted handshake.
const LEAST: usize = 16;
/// The bytes of a key, and of a random secret.
const KEY: usize = 32;
/// The purpose of the key, so that it is valid for nothing else.
#[cfg(feature = "encrypted")]
const DOMAIN: &[u8] = b"stepscope group: key of the handshake\n";

/// The secret that only the ranks of a group share. None if only this host can connect.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secret(Option<Vec<u8>>);

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
        Ok(Self(Some(random::<KEY>()?.to_vec())))
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

    /// Returns the key that both ends of a handshake must have.
    #[cfg(feature = "encrypted")]
    pub(crate) fn key(&self) -> [u8; KEY] {
        let secret = self.0.as_deref().unwrap_or_default();
        Sha256::new().chain_update(DOMAIN).chain_update(secret).finalize().into()
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

    #[test]
    fn each_secret_has_its_key() {
        let keys =
            [&b"correct horse battery"[..], b"correct horse batterz", b"correct horse battery\0"].map(Secret::new);
        let keys = keys.map(|secret| secret.key());
        let none = Secret::default().key();
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys.iter().all(|key| *key != none));
        assert_eq!(keys[0], Secret::new(b"correct horse battery").key());
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
