//! The configuration of a rank: its number, and how it finds the others.

#![forbid(unsafe_code)]

use super::secret::Secret;
use super::wire::MOST_RANKS;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stepscope_core::{DEFAULT_DEADLINE, Error, Resource, Result};

/// The number of a rank in its group, and the way it finds the others.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) local_rank: usize,
    /// The address of rank 0, as `host:port`.
    pub(crate) address: String,
    pub(crate) secret: Secret,
    pub(crate) deadline: Duration,
    /// The listener of rank 0, if it is already bound. The first rank that joins takes it.
    listener: Arc<Mutex<Option<TcpListener>>>,
}

impl GroupConfig {
    /// Configures rank `rank` of `ranks`, counted from 0. Rank 0 listens at `address`, and the
    /// others connect to it, as `host:port`. A single rank needs no address. Without a
    /// [secret](Self::secret) the address must be on this host.
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

    /// Sets the secret that only the ranks share: 16 bytes or more. It keeps strangers out and
    /// encrypts the connections between ranks, but not those of NCCL between their GPUs. A group
    /// with a secret needs feature `encrypted`.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Secret::new(secret.as_ref());
        self
    }

    /// Sets the longest time that any operation with other ranks may take (default
    /// [`DEFAULT_DEADLINE`]). It also bounds waits for the rank's own device, which may be waiting
    /// for other ranks. A time that the clock cannot express, such as [`Duration::MAX`], becomes
    /// one year.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the rank's number on its host, counted from 0 (default: its rank in the group).
    pub fn on_host(mut self, local_rank: usize) -> Self {
        self.local_rank = local_rank;
        self
    }

    /// Returns the rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the rank's number among those of its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Creates configurations for ranks that are threads of this process, one per rank. They meet
    /// at a port of this host that the system selects, with a random secret. Several ranks
    /// therefore need feature `encrypted`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an invalid number of ranks. [`Error::System`] if the system has no
    /// free port or no random numbers.
    pub fn on_this_host(ranks: usize) -> Result<Vec<Self>> {
        check_ranks(0, ranks)?;
        let no_port = |error| Error::system("group", Resource::Port, error);
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

    /// Takes the listener if it is already bound.
    pub(super) fn take_listener(&self) -> Option<TcpListener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// # Errors
    /// [`Error::Misuse`] for invalid numbers and secrets, and for a secret that this build cannot
    /// use.
    pub(super) fn check(&self) -> Result<()> {
        check_ranks(self.rank, self.ranks)?;
        // A single rank has no connection.
        if self.ranks > 1 && self.secret.is_set() && !cfg!(feature = "encrypted") {
            let expected = "a build of stepscope with feature `encrypted`, because the group has a secret";
            return Err(Error::misuse("group", expected, "a build without it"));
        }
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
    fn invalid_group_sizes_are_refused() {
        for (rank, ranks, says) in [(0, 0, "1 to 4096 ranks"), (2, 2, "a rank below 2"), (0, 4097, "got 4097")] {
            let error = GroupConfig::new(rank, ranks, "127.0.0.1:1")
                .check()
                .expect_err("such a group must be refused")
                .to_string();
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
