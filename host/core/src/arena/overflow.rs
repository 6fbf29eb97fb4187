//! A full arena: the memory pool that serves the tensors which do not fit, and the error with cause
//! and advice if there is none.
//!
//! Invariant: every block belongs to the step that took it. It is freed, in stream order, when that
//! step ends, even after an error or a panic. No block is in use between steps. The pool keeps
//! freed memory, so a step that overflows like the previous one calls neither the system nor
//! admission. A refused request changes only the counts.

#![forbid(unsafe_code)]

use super::layout::padded;
use super::region::ArenaInner;
use crate::device::{Device, Pool};
use crate::error::{Error, Result};
use crate::host_memory::AdmissionError;
use crate::report::{Cause, size};
use std::ops::Range;
use std::panic::Location;
use std::time::{Duration, Instant};

/// The behavior of an arena when it is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// Returns [`Error::ArenaFull`].
    #[default]
    Refuse,
    /// Takes the tensor from a memory pool of its own.
    Pool {
        /// The most bytes that a step may take from the pool.
        cap_bytes: usize,
        /// The bytes that the pool takes from the system at the start, so that a first overflow
        /// need not.
        prime_bytes: usize,
        /// The longest time that one request may take.
        deadline: Duration,
    },
}

impl Overflow {
    /// Returns a pool of up to `cap_bytes`, primed with an eighth of them, with a deadline of one
    /// second.
    pub fn pool(cap_bytes: usize) -> Self {
        Self::Pool { cap_bytes, prime_bytes: cap_bytes / 8, deadline: Duration::from_secs(1) }
    }
}

/// An open pool and the blocks that a step has taken from it.
#[derive(Debug)]
pub(super) struct OverflowPool {
    pub(crate) pool: Pool,
    pub(crate) cap_bytes: usize,
    prime_bytes: usize,
    pub(crate) deadline: Duration,
    reserve_bytes: Option<u64>,
    /// The bytes that the pool holds, in use or kept.
    held_bytes: usize,
    blocks: Vec<(u64, usize)>,
    used_bytes: usize,
}

/// The reason why the pool returned no memory.
#[derive(Debug)]
enum NotGiven {
    /// The step would exceed the cap.
    Cap,
    /// There is no memory to grow with.
    Refused(Box<AdmissionError>),
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
            return Err(Error::misuse("overflow", "a prime of at most the pool's cap", got));
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

    /// Takes `bytes` for the step. `bytes` is a nonzero multiple of the alignment.
    fn take(&mut self, device: &Device, bytes: usize, deadline: Duration) -> Result<u64, NotGiven> {
        let start = Instant::now();
        let used = self.used_bytes.checked_add(bytes).filter(|&used| used <= self.cap_bytes).ok_or(NotGiven::Cap)?;
        if used > self.held_bytes {
            let growth = (used - self.held_bytes) as u64;
            let budget = device.budget(self.reserve_bytes, deadline).map_err(NotGiven::Driver)?;
            budget.admit(growth).map_err(|refusal| NotGiven::Refused(Box::new(refusal)))?;
        }
        let left = deadline.saturating_sub(start.elapsed());
        let given = device.pool_allocate(self.pool, bytes, left);
        let address = given.map_err(|error| NotGiven::Driver(error.waiting_since(start)))?;
        self.blocks.push((address, bytes));
        self.used_bytes = used;
        self.held_bytes = self.held_bytes.max(used);
        Ok(address)
    }

    /// Returns the number of blocks that the step has, as a mark for [`OverflowPool::give_back`].
    pub(crate) fn mark(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the address and bytes of each block between two marks.
    pub(crate) fn blocks(&self, between: Range<usize>) -> &[(u64, usize)] {
        &self.blocks[between]
    }

    /// Returns the bytes that the step has taken.
    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Frees every block between two marks. Returns how many failed, and the first error.
    pub(crate) fn give_back(&mut self, device: &Device, between: Range<usize>) -> (usize, Result<()>) {
        let blocks: Vec<_> = self.blocks.drain(between).collect();
        self.used_bytes -= blocks.iter().map(|(_, bytes)| bytes).sum::<usize>();
        if blocks.is_empty() { (0, Ok(())) } else { device.pool_give_back(self.pool, blocks, self.deadline) }
    }

    /// Returns memory beyond the pool's prime to the system.
    pub(crate) fn shrink_to_prime(&mut self, device: &Device) -> Result<()> {
        self.trim(device, self.prime_bytes)
    }

    /// Returns memory that the pool keeps beyond `keep_bytes` to the system.
    pub(crate) fn trim(&mut self, device: &Device, keep_bytes: usize) -> Result<()> {
        device.trim_pool(self.pool, keep_bytes)?;
        self.held_bytes = self.held_bytes.min(keep_bytes).max(self.used_bytes);
        Ok(())
    }
}

impl ArenaInner {
    /// Takes memory from the pool when the arena is full, or returns an error with the cause.
    #[cold]
    pub(super) fn take_beyond(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        let padded = padded(bytes).unwrap_or(usize::MAX);
        self.device.check("allocate")?;
        let capacity = self.capacity.get();
        let cause = self.counters.borrow().cause(padded, capacity);
        let needed = self.bump.get().taken().saturating_add(self.overflowed.get()).saturating_add(padded);
        self.needed.set(self.needed.get().max(needed));
        if self.is_lent() {
            return Err(Error::CaptureNeeds { bytes: needed, available: capacity, overflow_bytes: 0 });
        }
        let Some(overflow) = &self.overflow else { return Err(self.full(padded, cause, site, None)) };
        let mut overflow = overflow.borrow_mut();
        if !self.warned.replace(true) {
            tracing::warn!(
                %cause,
                requested_bytes = padded,
                %site,
                capacity_bytes = capacity,
                advice = advice(cause, capacity, padded),
                "the arena is full: this step overflows into its pool"
            );
        }
        let start = Instant::now();
        let deadline = overflow.deadline.min(self.time_left());
        let given = overflow.take(&self.device, padded, deadline);
        let used = overflow.used_bytes();
        let cap_bytes = overflow.cap_bytes;
        drop(overflow);
        let mut counters = self.counters.borrow_mut();
        counters.waited += start.elapsed();
        match given {
            Ok(address) => {
                counters.allocated(site, padded);
                counters.overflow.allocations += 1;
                counters.overflow.bytes += padded as u64;
                counters.overflow.peak_bytes = counters.overflow.peak_bytes.max(used as u64);
                counters.overflow.live_blocks += 1;
                self.overflowed.set(used);
                self.peak.step_has(self.bump.get().taken() + used);
                Ok(address)
            }
            Err(NotGiven::Cap) => {
                counters.overflow.refusals += 1;
                drop(counters);
                Err(self.full(
                    padded,
                    cause,
                    site,
                    Some(format!("the overflow pool's cap is {cap_bytes} bytes, {used} of them in use")),
                ))
            }
            Err(NotGiven::Refused(refusal)) => {
                counters.overflow.refusals += 1;
                drop(counters);
                Err(self.full(padded, cause, site, Some(refusal.to_string())))
            }
            Err(NotGiven::Driver(error)) => {
                counters.overflow.timeouts += u64::from(matches!(error, Error::Timeout { .. }));
                drop(counters);
                Err(self.with_report(error))
            }
        }
    }

    fn full(
        &self,
        requested_bytes: usize,
        cause: Cause,
        site: &'static Location<'static>,
        overflow: Option<String>,
    ) -> Error {
        let report = self.report();
        Error::ArenaFull {
            requested_bytes,
            used_bytes: report.offset_bytes,
            capacity_bytes: self.capacity.get(),
            allocations: self.counters.borrow().step_allocations,
            site: site.to_string(),
            cause,
            advice: overflow.map_or_else(
                || advice(cause, self.capacity.get(), requested_bytes),
                |overflow| format!("{overflow}; {}", advice(cause, self.capacity.get(), requested_bytes)),
            ),
            report: Box::new(report),
        }
    }
}

/// Returns advice for a full arena of this capacity.
fn advice(cause: Cause, capacity: usize, requested: usize) -> String {
    match cause {
        Cause::RequestLargerThanArena => format!(
            "raise the capacity above {} (now {}), or split the tensor",
            size(requested),
            size(capacity)
        ),
        Cause::NeverReset { .. } => {
            "end the step after each backward pass (one `arena.step` for each micro-batch): the step's end frees its memory".into()
        }
        Cause::WorkingSetLargerThanArena => format!(
            "size the arena from `Arena::measure` or let it grow (`Growth::AtBoundary`), shorten the step (a smaller \
             micro-batch), or free temporaries early with `step.scratch`; the capacity is {}",
            size(capacity)
        ),
    }
}
