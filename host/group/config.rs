//! Who a rank is, and how it finds the others.

#![forbid(unsafe_code)]

use super::secret::Secret;
use super::wire::MOST_RANKS;
use crate::driver::DEFAULT_DEADLINE;
use crate::error::{Error, Result};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Who a rank of a group is, and how it finds the others.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) local_rank: usize,
    /// Rank 0's, as `host:port`.
    pub(crate) address: String,
    pub(crate) secret: Secret,
    pub(crate) deadline: Duration,
    /// What rank 0 listens with, where it is bound already. The first that joins takes it.
    listener: Arc<Mutex<Option<TcpListener>>>,
}

impl GroupConfig {
    /// Rank `rank` of `ranks`, counted from 0. `address` is where rank 0 listens and the others call, as `host:port`; one rank alone
    /// needs none. Without a [secret](Self::secret) it must be on this host.
    pub fn new(rank: usize, ranks: usize, address: impl Into<String>) -> Self {
        Self {
            rank,
            ranks,
            local_rank: rank,
            address: address.into(),
            secret: Secret::default(),
            deadline: DEFAULT_DEADLINE,
            listener: Arc::default(),
        }
    }

    /// What all ranks know, and nobody else: 16 bytes or more. It keeps strangers out; it does not hide what the ranks say.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Secret::new(secret.as_ref());
        self
    }

    /// How long anything may take that needs the other ranks (default [`DEFAULT_DEADLINE`]). A wait for the rank's own device is no longer, as
    /// that may wait for theirs. A time that the clock cannot express, such as [`Duration::MAX`],
    /// is a year.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Which rank of its host it is, counted from 0 (default: its rank in the group).
    pub fn on_host(mut self, local_rank: usize) -> Self {
        self.local_rank = local_rank;
        self
    }

    /// Its number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Its number among those of its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// For ranks that are threads of this process: one of each, which meet at a port of this host that the system chose, with a secret
    /// that was made up.
    ///
    /// # Errors
    /// [`Error::Misuse`] of a number that no group has; the system has no port or no random numbers.
    pub fn on_this_host(ranks: usize) -> Result<Vec<Self>> {
        check_ranks(0, ranks)?;
        let no_port = |error: std::io::Error| Error::misuse("group", "a port of this host", format!("none: {error}"));
        let (mut address, mut listener) = (String::new(), None);
        if ranks > 1 {
            let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(no_port)?;
            address = bound.local_addr().map_err(no_port)?.to_string();
            listener = Some(bound);
        }
        let secret = Secret::random()?;
        let listener = Arc::new(Mutex::new(listener));
        let of_rank = |rank| {
            let config = Self { secret: secret.clone(), ..Self::new(rank, ranks, &address) };
            if rank == 0 { Self { listener: listener.clone(), ..config } } else { config }
        };
        Ok((0..ranks).map(of_rank).collect())
    }

    /// What is bound already.
    pub(super) fn take_listener(&self) -> Option<TcpListener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// # Errors
    /// [`Error::Misuse`] of numbers and secrets that no group has.
    pub(super) fn check(&self) -> Result<()> {
        check_ranks(self.rank, self.ranks)?;
        self.secret.check()
    }
}

fn check_ranks(rank: usize, ranks: usize) -> Result<()> {
    if !(1..=MOST_RANKS).contains(&ranks) {
        return Err(Error::misuse("group", format!("1 to {MOST_RANKS} ranks"), ranks.to_string()));
    }
    if rank >= ranks {
        return Err(Error::misuse("group", format!("a rank below {ranks}, the number of ranks"), rank.to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_group_has_are_refused() {
        for (rank, ranks, says) in [(0, 0, "1 to 4096 ranks"), (2, 2, "a rank below 2"), (0, 4097, "got 4097")] {
            let error = GroupConfig::new(rank, ranks, "127.0.0.1:1").check().expect_err("no such group").to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(GroupConfig::on_this_host(0).is_err());
        assert!(GroupConfig::new(0, 1, "").check().is_ok());
    }

    #[test]
    fn no_text_has_the_secret() {
        let config = GroupConfig::new(0, 2, "127.0.0.1:1").secret("correct horse battery");
        let text = format!("{config:?}");
        assert!(text.contains("secret: set") && !text.contains("horse") && !text.contains("99, 111"), "{text}");
    }
}
