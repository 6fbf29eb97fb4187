//! The arena: one region of device memory that each step fills from the start.
//!
//! What it does not do: it never frees a single tensor, keeps no free list, never grows within a step and never hands
//! the same byte out twice between two resets. A reset is one store. Invariant: a reset happens only when the step
//! value is gone, which the borrow checker ties to every tensor of the step.

use super::admission::{ARENA_VARIABLE, Situation, arena_bytes_from_env, default_reserve_bytes};
use super::checked::{Checks, GUARD_BYTES, poison};
use super::diagnostics::{ArenaReport, Counters, Phase, SystemMemory, mib};
use super::layout::{Bump, padded};
use super::overflow::{NotGiven, Overflow, OverflowPool};
use crate::driver::{Description, Device};
use crate::error::{Error, Result};
use crate::launch::Memory;
use crate::step::Eager;
use crate::tensor::{Element, Shape};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// The environment variable that turns checked mode on (`1`) or off (`0`).
const CHECKED_VARIABLE: &str = "STEPSCOPE_CHECKED";
/// A grown arena's capacity is a multiple of this: what large pages come in.
const GROWTH_BYTES: usize = 2 << 20;

/// How large an arena is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Capacity {
    /// So many bytes.
    Bytes(usize),
    /// A share, above 0 and up to 1, of the memory that can be had when the arena is built.
    FractionOfAvailable(f64),
    /// Exactly what a step was measured to need.
    Measured(Measured),
}

impl Capacity {
    /// So many times 2^20 bytes.
    pub const fn mib(mebibytes: usize) -> Self {
        Self::Bytes(mebibytes << 20)
    }

    /// So many times 2^30 bytes.
    pub const fn gib(gibibytes: usize) -> Self {
        Self::Bytes(gibibytes << 30)
    }
}

/// What a step needs; made by [`Arena::measure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    high_water_bytes: usize,
}

impl Measured {
    /// The most bytes that the step had in use.
    pub fn high_water_bytes(self) -> usize {
        self.high_water_bytes
    }
}

/// Whether an arena's capacity changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// Never.
    #[default]
    Fixed,
    /// At the end of a step that needed more, to what it needed, up to `max_bytes`.
    AtBoundary {
        /// The largest capacity.
        max_bytes: usize,
    },
}

/// Settings of an arena; see [`Arena::builder`].
#[derive(Debug)]
pub struct ArenaBuilder {
    device: Device,
    capacity: Capacity,
    overflow: Overflow,
    growth: Growth,
    step_deadline: Option<Duration>,
    reserve_bytes: Option<u64>,
    checked: bool,
}

impl ArenaBuilder {
    /// How large the arena is (default 1 GiB). The environment variable `STEPSCOPE_ARENA_GB` overrides it.
    #[must_use]
    pub fn capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// What happens when the arena is full (default: an error).
    #[must_use]
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    /// Whether the capacity follows the steps' needs (default: fixed).
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> Self {
        self.growth = growth;
        self
    }

    /// How long a step may take from its start to the end of its work on the device (default: no bound but those of its
    /// single calls). A step with a deadline waits for the device at its end.
    #[must_use]
    pub fn step_deadline(mut self, deadline: Duration) -> Self {
        self.step_deadline = Some(deadline);
        self
    }

    /// Bytes that must stay available to others on the device (default: see the admission rules of the guide).
    #[must_use]
    pub fn reserve_bytes(mut self, reserve_bytes: u64) -> Self {
        self.reserve_bytes = Some(reserve_bytes);
        self
    }

    /// Whether tensors are guarded and poisoned (default: no). The environment variable `STEPSCOPE_CHECKED` (`1` or `0`)
    /// overrides it. A write behind a tensor is then [`Error::Overrun`] at the end of its scope.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// Takes the memory from the device.
    ///
    /// # Errors
    /// [`Error::Refused`] when the memory is not available, with every number; [`Error::DeviceMemory`] when the driver
    /// has none; [`Error::Misuse`] for a capacity of zero, a malformed `STEPSCOPE_ARENA_GB` or a prime above the cap.
    pub fn build(self) -> Result<Arena> {
        let Self { device, capacity, overflow, growth, step_deadline, reserve_bytes, checked } = self;
        let situation = situation(&device, reserve_bytes)?;
        let capacity = match (variable()?, capacity) {
            (Some(bytes), _) | (None, Capacity::Bytes(bytes)) => bytes,
            (None, Capacity::Measured(measured)) => measured.high_water_bytes,
            (None, Capacity::FractionOfAvailable(share)) if share > 0.0 && share <= 1.0 => {
                (situation.available_bytes() as f64 * share) as usize
            }
            (None, Capacity::FractionOfAvailable(share)) => {
                return Err(Error::misuse("arena", "a share above 0 and up to 1", share.to_string()));
            }
        };
        if capacity == 0 {
            return Err(Error::misuse("arena", "a capacity above zero", "0 bytes"));
        }
        situation.admit(capacity as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))?;
        let mut region = Region::allocate(device, capacity)?;
        region.reserve_bytes = reserve_bytes;
        if checked_variable()?.unwrap_or(checked) {
            region.checks = Some(RefCell::new(Checks::new(&region.device)?));
        }
        if let Overflow::Pool { cap_bytes, prime_bytes, deadline } = overflow {
            let pool = OverflowPool::open(&region.device, cap_bytes, prime_bytes, deadline, reserve_bytes)?;
            region.overflow = Some(RefCell::new(pool));
        }
        tracing::info!(
            capacity_bytes = capacity,
            ?overflow,
            ?growth,
            device = region.device.description().name,
            available_bytes = situation.available_bytes(),
            "arena ready"
        );
        Ok(Arena { region, growth, step_deadline })
    }
}

/// Memory that can be had on the device now.
pub(super) fn situation(device: &Device, reserve_bytes: Option<u64>) -> Result<Situation> {
    let Description { integrated, memory_bytes, .. } = *device.description();
    let driver_free_bytes = device.free_bytes()?;
    let driver_total_bytes = memory_bytes.unwrap_or(driver_free_bytes);
    let reserve_bytes = reserve_bytes.unwrap_or_else(|| default_reserve_bytes(integrated, driver_total_bytes));
    Ok(Situation { integrated, driver_free_bytes, driver_total_bytes, host: Situation::read_host(), reserve_bytes })
}

/// What the environment asks for.
fn variable() -> Result<Option<usize>> {
    let value = std::env::var_os(ARENA_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    arena_bytes_from_env(value.as_deref())
        .map_err(|reason| Error::misuse("arena", "a number of GiB in STEPSCOPE_ARENA_GB", reason))
}

/// Whether the environment asks for checked mode.
fn checked_variable() -> Result<Option<bool>> {
    match std::env::var(CHECKED_VARIABLE).as_deref() {
        Err(_) => Ok(None),
        Ok("0") => Ok(Some(false)),
        Ok("1") => Ok(Some(true)),
        Ok(other) => Err(Error::misuse("arena", "0 or 1 in STEPSCOPE_CHECKED", format!("`{other}`"))),
    }
}

/// A tensor to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Its bytes, before padding.
    pub(crate) bytes: usize,
    pub(crate) shape: Shape,
    /// Its element type's name.
    pub(crate) element: &'static str,
    /// What checked mode fills it with.
    pub(crate) poison: u32,
}

/// The memory of an arena and where it stands. Steps borrow it.
#[derive(Debug)]
pub(crate) struct Region {
    device: Device,
    address: u64,
    capacity: usize,
    bump: Cell<Bump>,
    high_water: Cell<usize>,
    counters: RefCell<Counters>,
    overflow: Option<RefCell<OverflowPool>>,
    checks: Option<RefCell<Checks>>,
    reserve_bytes: Option<u64>,
    resets: u64,
    growths: u64,
}

impl Region {
    fn allocate(device: Device, capacity: usize) -> Result<Self> {
        let address = device.allocate(capacity)?;
        Ok(Self {
            device,
            address,
            capacity,
            bump: Cell::new(Bump::new(capacity)),
            high_water: Cell::new(0),
            counters: RefCell::default(),
            overflow: None,
            checks: None,
            reserve_bytes: None,
            resets: 0,
            growths: 0,
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// What the step is doing from now on; returns what it did before.
    pub(crate) fn enter(&self, phase: Phase) -> Phase {
        std::mem::replace(&mut self.counters.borrow_mut().phase, phase)
    }

    /// A backward pass is complete.
    pub(crate) fn pass_completed(&self) {
        self.counters.borrow_mut().passes += 1;
    }

    /// The address of memory that nothing else uses until the rewind past it.
    #[inline]
    pub(crate) fn take(&self, request: Request, site: &'static Location<'static>) -> Result<u64> {
        if self.checks.is_some() { self.take_checked(request, site) } else { self.take_bytes(request.bytes, site) }
    }

    #[inline]
    fn take_bytes(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        let before = self.bump.get();
        let Some((offset, next)) = before.take(bytes) else { return self.take_beyond(bytes, site) };
        self.bump.set(next);
        // The overflow's share only ever adds to a full arena, whose own part was counted when it was taken.
        self.high_water.set(self.high_water.get().max(next.offset()));
        self.counters.borrow_mut().allocated(site, next.offset() - offset);
        Ok(self.address + offset as u64)
    }

    /// With a guard behind, poisoned.
    #[cold]
    fn take_checked(&self, request: Request, site: &'static Location<'static>) -> Result<u64> {
        let bytes = padded(request.bytes).and_then(|bytes| bytes.checked_add(GUARD_BYTES)).unwrap_or(usize::MAX);
        let address = self.take_bytes(bytes, site)?;
        // SAFETY: these bytes were just taken, and nothing else uses them.
        let block = unsafe { Memory::<u32>::new(address, bytes / size_of::<u32>()) };
        if let Some(checks) = &self.checks {
            checks.borrow_mut().made(&self.device, block, request, site)?;
        }
        Ok(address)
    }

    /// The arena is full: from the pool, or an error that says why.
    #[cold]
    fn take_beyond(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        // An empty tensor names no byte: any address does.
        let padded = padded(bytes).unwrap_or(usize::MAX).max(1);
        let cause = self.counters.borrow().cause(padded, self.capacity);
        let Some(overflow) = &self.overflow else { return Err(self.full(padded, cause, site, None)) };
        let mut overflow = overflow.borrow_mut();
        if overflow.mark() == 0 {
            tracing::warn!(
                %cause,
                requested_bytes = padded,
                %site,
                capacity_bytes = self.capacity,
                advice = advice(cause, self.capacity, padded),
                "the arena is full: this step overflows into its pool"
            );
        }
        let start = Instant::now();
        let deadline = overflow.deadline;
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
                self.high_water.set(self.high_water.get().max(self.bump.get().offset() + used));
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
        cause: super::diagnostics::Cause,
        site: &'static Location<'static>,
        overflow: Option<String>,
    ) -> Error {
        let report = self.report();
        Error::ArenaFull {
            requested_bytes,
            used_bytes: report.offset_bytes,
            capacity_bytes: self.capacity,
            allocations: self.counters.borrow().step_allocations,
            site: site.to_string(),
            cause,
            advice: overflow.map_or_else(
                || advice(cause, self.capacity, requested_bytes),
                |overflow| format!("{overflow}; {}", advice(cause, self.capacity, requested_bytes)),
            ),
            report: Box::new(report),
        }
    }

    /// A timeout with what the arena knows.
    pub(crate) fn with_report(&self, error: Error) -> Error {
        match error {
            Error::Timeout { call, waited, report: None } => {
                Error::Timeout { call, waited, report: Some(Box::new(self.report())) }
            }
            other => other,
        }
    }

    /// Where the step stands: what is taken from here on can be given back.
    pub(crate) fn mark(&self) -> Mark {
        let blocks = self.overflow.as_ref().map_or(0, |overflow| overflow.borrow().mark());
        let guards = self.checks.as_ref().map_or(0, |checks| checks.borrow().mark());
        Mark { offset: self.bump.get().offset(), blocks, guards }
    }

    /// Runs a scope and then gives back what it took, whether it returned, failed or panicked.
    pub(crate) fn scope<R>(&self, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let mark = self.mark();
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let sound = if matches!(outcome, Ok(Ok(_))) { self.verify(mark) } else { Ok(()) };
        let given_back = self.rewind(mark);
        match outcome {
            Ok(Ok(result)) => sound.and(given_back).map(|()| result),
            // The scope's own error came first and says more.
            Ok(Err(error)) => Err(error),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// In checked mode: looks at the guards of a scope that ends, and poisons its memory.
    fn verify(&self, mark: Mark) -> Result<()> {
        let Some(checks) = &self.checks else { return Ok(()) };
        checks.borrow().verify(&self.device, mark.guards)?;
        let used = self.bump.get().offset() - mark.offset;
        // SAFETY: the scope is over, and with it every tensor in this part of the arena's own memory.
        let memory = unsafe { Memory::<u32>::new(self.address + mark.offset as u64, used / size_of::<u32>()) };
        poison(&self.device, memory, f32::POISON)
    }

    fn rewind(&self, mark: Mark) -> Result<()> {
        if let Some(checks) = &self.checks {
            checks.borrow_mut().forget(mark.guards);
        }
        self.bump.set(self.bump.get().rewind(mark.offset));
        let Some(overflow) = &self.overflow else { return Ok(()) };
        let mut overflow = overflow.borrow_mut();
        let blocks = overflow.mark() - mark.blocks;
        let start = Instant::now();
        overflow.give_back(&self.device, mark.blocks)?;
        let mut counters = self.counters.borrow_mut();
        counters.waited += if blocks > 0 { start.elapsed() } else { Duration::ZERO };
        counters.overflow.live_blocks -= blocks as u64;
        Ok(())
    }

    fn report(&self) -> ArenaReport {
        let host = Situation::read_host();
        let description = self.device.description();
        let memory = SystemMemory {
            device_total_bytes: description.memory_bytes,
            // A lost device is not asked again.
            device_free_bytes: self.device.free_bytes().ok(),
            host_free_bytes: host.map(|host| host.free_bytes),
            host_available_bytes: host.map(|host| host.available_bytes),
        };
        ArenaReport {
            capacity_bytes: self.capacity,
            offset_bytes: self.bump.get().offset(),
            high_water_bytes: self.high_water.get(),
            resets: self.resets,
            growths: self.growths,
            memory,
            ..self.counters.borrow().report()
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(overflow) = self.overflow.take() {
            let pool = overflow.into_inner().pool;
            // SAFETY: no step is alive, each borrows the region, and its blocks went back at its end.
            if let Err(error) = unsafe { self.device.destroy_pool(pool) } {
                tracing::debug!(%error, "the overflow pool stays until the process ends");
            }
        }
        // SAFETY: `allocate` took exactly this; the arena owns it, and no step is alive.
        unsafe { self.device.free(self.address, self.capacity) };
    }
}

/// Where a scope began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    offset: usize,
    blocks: usize,
    guards: usize,
}

/// What to do about a full arena of this capacity.
fn advice(cause: super::diagnostics::Cause, capacity: usize, requested: usize) -> String {
    use super::diagnostics::Cause;
    match cause {
        Cause::RequestLargerThanArena => format!(
            "raise the capacity above {:.1} MiB (now {:.1} MiB), or split the tensor",
            mib(requested as u64),
            mib(capacity as u64)
        ),
        Cause::NeverReset { .. } => {
            "end the step after each backward pass (one `arena.step` for each micro-batch): its end takes the memory back".into()
        }
        Cause::WorkingSetLargerThanArena => format!(
            "size the arena from `Arena::measure` or let it grow (`Growth::AtBoundary`), shorten the step (a smaller \
             micro-batch), or free temporaries early with `step.scratch`; the capacity is {:.1} MiB",
            mib(capacity as u64)
        ),
    }
}

/// Device memory for the tensors of one step at a time.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    growth: Growth,
    step_deadline: Option<Duration>,
}

impl Arena {
    /// An arena on `device`.
    pub fn builder(device: &Device) -> ArenaBuilder {
        ArenaBuilder {
            device: device.clone(),
            capacity: Capacity::gib(1),
            overflow: Overflow::Refuse,
            growth: Growth::Fixed,
            step_deadline: None,
            reserve_bytes: None,
            checked: false,
        }
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// Runs one step. Every tensor that it makes is branded with `'s`, which the result cannot name; the memory is
    /// taken back when the closure has returned, failed or panicked, and only then.
    ///
    /// # Errors
    /// Those of the closure; [`Error::Timeout`] when the step has a deadline and missed it; [`Error::Driver`] when the
    /// overflow could not be given back.
    pub fn step<R>(&mut self, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>) -> Result<R> {
        let start = Instant::now();
        let region = &self.region;
        let deadline = self.step_deadline;
        let outcome = region.scope(|| {
            let result = run(&mut Eager::new(region))?;
            if let Some(deadline) = deadline {
                region.device.synchronize(deadline.saturating_sub(start.elapsed()))?;
            }
            Ok(result)
        });
        let outcome = outcome.map_err(|error| region.with_report(error));
        self.region.counters.get_mut().reset();
        self.region.resets += 1;
        self.grow()?;
        outcome
    }

    /// Runs a step without kernels and without memory, and tells what it would need. Persistent buffers of this device
    /// can be lent to it; what it reads is zero, and nothing on the device changes.
    ///
    /// # Errors
    /// Those of the closure.
    pub fn measure<R>(&self, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>) -> Result<Measured> {
        // Addresses alone, as many as a step may want.
        const EVERYTHING: usize = 1 << 46;
        let region = Region::allocate(self.region.device.counting()?, EVERYTHING)?;
        region.scope(|| run(&mut Eager::new(&region)).map(drop))?;
        Ok(Measured { high_water_bytes: region.high_water.get() })
    }

    /// Grows to what the steps have needed, if that is wanted and there is room.
    fn grow(&mut self) -> Result<()> {
        let Growth::AtBoundary { max_bytes } = self.growth else { return Ok(()) };
        let region = &mut self.region;
        let wanted = region.high_water.get().next_multiple_of(GROWTH_BYTES).min(max_bytes);
        if wanted <= region.capacity || region.device.lost().is_some() {
            return Ok(());
        }
        let situation = situation(&region.device, region.reserve_bytes)?;
        if let Err(refusal) = situation.admit(wanted as u64) {
            tracing::warn!(%refusal, "the arena stays as it is");
            return Ok(());
        }
        let address = region.device.allocate(wanted)?;
        tracing::info!(from_bytes = region.capacity, to_bytes = wanted, "the arena grows");
        // SAFETY: the region owns its old memory, and no step is alive: `&mut self`.
        unsafe { region.device.free(region.address, region.capacity) };
        region.address = address;
        region.capacity = wanted;
        region.bump.set(Bump::new(wanted));
        region.growths += 1;
        if let Some(overflow) = &region.overflow {
            // What the arena holds now, the pool need not keep.
            let prime = overflow.borrow().cap_bytes / 8;
            overflow.borrow_mut().trim(&region.device, prime)?;
        }
        Ok(())
    }

    /// Gives the system all memory that the overflow pool keeps. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the device does not answer.
    pub fn trim(&mut self) -> Result<()> {
        match &self.region.overflow {
            Some(overflow) => overflow.borrow_mut().trim(&self.region.device, 0),
            None => Ok(()),
        }
    }

    /// What the arena has done so far.
    pub fn report(&self) -> ArenaReport {
        self.region.report()
    }
}
