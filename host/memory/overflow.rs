//! Where a step's tensors go when the arena is full: a pool of the arena's own.
//!
//! Invariant: every block belongs to the step that took it and goes back, in stream order, when the step ends, also after
//! an error or a panic; between steps no block is out. The pool keeps what it is given back, so a step that overflows like
//! the one before reaches neither the system nor admission.

#![forbid(unsafe_code)]

use super::situation::situation;
use crate::admission::Refusal;
use crate::driver::{Device, Pool};
use crate::error::{Error, Result};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What an arena does when it is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// It refuses: [`Error::ArenaFull`].
    #[default]
    Refuse,
    /// It takes the tensor from a memory pool of its own.
    Pool {
        /// The most bytes that a step may take from the pool.
        cap_bytes: usize,
        /// Bytes that the pool takes from the system at the start, so that a first overflow need not.
        prime_bytes: usize,
        /// How long one request may take.
        deadline: Duration,
    },
}

impl Overflow {
    /// A pool of up to `cap_bytes`, primed with an eighth of them, with a deadline of a second.
    pub fn pool(cap_bytes: usize) -> Self {
        Self::Pool { cap_bytes, prime_bytes: cap_bytes / 8, deadline: Duration::from_secs(1) }
    }
}

/// An open pool and what a step has from it.
#[derive(Debug)]
pub(crate) struct OverflowPool {
    pub(crate) pool: Pool,
    pub(crate) cap_bytes: usize,
    prime_bytes: usize,
    pub(crate) deadline: Duration,
    reserve_bytes: Option<u64>,
    /// Bytes that the pool holds, in use or kept.
    held_bytes: usize,
    blocks: Vec<(u64, usize)>,
    used_bytes: usize,
}

/// Why the pool did not give.
#[derive(Debug)]
pub(crate) enum NotGiven {
    /// The step would have more than the cap.
    Cap,
    /// There is no memory to grow with.
    Refused(Box<Refusal>),
    /// The driver failed, or did not answer in time.
    Driver(Error),
}

impl OverflowPool {
    /// Creates a pool.
    pub(crate) fn open(
        device: &Device,
        cap_bytes: usize,
        prime_bytes: usize,
        deadline: Duration,
        reserve_bytes: Option<u64>,
    ) -> Result<Self> {
        if prime_bytes > cap_bytes {
            let got = format!("{prime_bytes} bytes of {cap_bytes}");
            return Err(Error::misuse("overflow", "to prime the pool with at most its cap", got));
        }
        let pool = device.create_pool()?;
        let (blocks, used_bytes, held_bytes) = (Vec::new(), 0, 0);
        Ok(Self { pool, cap_bytes, prime_bytes, deadline, reserve_bytes, held_bytes, blocks, used_bytes })
    }

    /// Makes the pool take its prime from the system, which may last as long as any call.
    pub(crate) fn prime(&mut self, device: &Device) -> Result<()> {
        if self.prime_bytes == 0 {
            return Ok(());
        }
        match self.take(device, self.prime_bytes, device.deadline()) {
            Ok(_) => self.give_back(device, 0..1).1,
            Err(NotGiven::Driver(error)) => Err(error),
            Err(NotGiven::Refused(refusal)) => Err(Error::Refused(refusal)),
            Err(NotGiven::Cap) => unreachable!("the prime is within the cap"),
        }
    }

    /// `bytes` for the step; `bytes` is a multiple of the alignment and not zero.
    pub(crate) fn take(&mut self, device: &Device, bytes: usize, deadline: Duration) -> Result<u64, NotGiven> {
        let start = Instant::now();
        let used = self.used_bytes.checked_add(bytes).filter(|&used| used <= self.cap_bytes).ok_or(NotGiven::Cap)?;
        if used > self.held_bytes {
            let growth = (used - self.held_bytes) as u64;
            let situation = situation(device, self.reserve_bytes, deadline).map_err(NotGiven::Driver)?;
            situation.admit(growth).map_err(|refusal| NotGiven::Refused(Box::new(refusal)))?;
        }
        let left = deadline.saturating_sub(start.elapsed());
        let given = device.pool_allocate(self.pool, bytes, left);
        let address = given.map_err(|error| NotGiven::Driver(error.waiting_since(start)))?;
        self.blocks.push((address, bytes));
        self.used_bytes = used;
        self.held_bytes = self.held_bytes.max(used);
        Ok(address)
    }

    /// Blocks that the step has: a mark for [`OverflowPool::give_back`].
    pub(crate) fn mark(&self) -> usize {
        self.blocks.len()
    }

    /// Address and bytes of each block between two marks.
    pub(crate) fn blocks(&self, between: Range<usize>) -> &[(u64, usize)] {
        &self.blocks[between]
    }

    /// Bytes that the step has.
    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Gives back every block between two marks. Returns how many did not go back, and the first reason.
    pub(crate) fn give_back(&mut self, device: &Device, between: Range<usize>) -> (usize, Result<()>) {
        let blocks: Vec<_> = self.blocks.drain(between).collect();
        self.used_bytes -= blocks.iter().map(|(_, bytes)| bytes).sum::<usize>();
        if blocks.is_empty() { (0, Ok(())) } else { device.pool_give_back(self.pool, blocks, self.deadline) }
    }

    /// Gives the system what the pool keeps beyond its prime.
    pub(crate) fn shrink_to_prime(&mut self, device: &Device) -> Result<()> {
        self.trim(device, self.prime_bytes)
    }

    /// Gives the system what the pool keeps beyond `keep_bytes`.
    pub(crate) fn trim(&mut self, device: &Device, keep_bytes: usize) -> Result<()> {
        device.trim_pool(self.pool, keep_bytes)?;
        self.held_bytes = self.held_bytes.min(keep_bytes).max(self.used_bytes);
        Ok(())
    }
}
