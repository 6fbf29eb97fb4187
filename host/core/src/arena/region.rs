//! The memory of an arena and its current state, which steps borrow.
//!
//! Invariant: every allocation is disjoint from all live ones. `scope.rs` frees them.

use super::budget::situation;
use super::checked::{Checks, GUARD_BYTES};
use super::conditions::ReplayPreconditions;
use super::counters::Counters;
use super::layout::{Bump, End, grown, guarded, padded};
use super::overflow::OverflowPool;
use super::peak::Peak;
use super::request::Request;
use super::reuse::Reuse;
#[cfg(feature = "nvtx")]
use super::sanitizer::Sanitizer;
use super::sections::{GraphReservation, Sections};
use super::snapshot::{Event, Kind, Origin, Recording};
use crate::admission::MemoryBudget;
use crate::cgroup::CgroupMemory;
use crate::deadline::after;
use crate::device::{BufferBorrow, DeferredFree, Device, Launches};
use crate::error::{Error, Result};
use crate::report::{ArenaReport, Phase, SystemMemory};
use crate::tensor::{Element, Memory, Shape, Source, Stored, Tensor};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The memory of an arena and its current state. Steps borrow it.
#[derive(Debug)]
pub(crate) struct ArenaInner {
    pub(super) device: Device,
    pub(super) address: u64,
    /// The owner number of the memory that steps have.
    pub(super) owner: u64,
    /// The bytes of device memory that this region owns, or zero if its memory is borrowed.
    pub(super) owned_bytes: usize,
    /// The bytes that steps may fill: all except those of captured steps.
    pub(super) capacity: Cell<usize>,
    sections: Sections,
    pub(super) bump: Cell<Bump>,
    /// The end from which the running scope takes tensors.
    pub(super) end: Cell<End>,
    /// The freed blocks that the running scope may reuse.
    pub(super) reuse: Reuse,
    pub(super) peak: Peak,
    /// The bytes that the running step has taken from the overflow pool.
    pub(super) overflowed: Cell<usize>,
    /// The most that a step would have had in use, including refused requests. The arena grows to
    /// this.
    pub(super) needed: Cell<usize>,
    /// True if this step's overflow has been logged.
    pub(super) warned: Cell<bool>,
    /// The time when the step must have ended, if it has a deadline.
    until: Cell<Option<Instant>>,
    /// The source line that is reported in place of the caller's, while a backward pass runs.
    attributed: Cell<Option<&'static Location<'static>>>,
    pub(super) counters: RefCell<Counters>,
    pub(super) overflow: Option<RefCell<OverflowPool>>,
    pub(super) checks: Option<RefCell<Checks>>,
    /// The bytes after each tensor that belong to no tensor. Nonzero in checked mode and under a
    /// sanitizer, even when only the needs are measured.
    guard_bytes: usize,
    /// The sanitizer that tensors are reported to.
    #[cfg(feature = "nvtx")]
    sanitizer: RefCell<Option<Sanitizer>>,
    pub(super) reserve_bytes: Option<u64>,
    pub(super) recording: Option<RefCell<Recording>>,
    conditions: ReplayPreconditions,
    launches: Launches,
    resets: Cell<u64>,
    growths: u64,
    /// The buffers that the running step has borrowed. None for a recorded step, which relies on no
    /// buffer yet.
    lending: Option<BufferBorrow>,
}

impl ArenaInner {
    /// The size of a region that consists only of addresses: as many as a step may want.
    pub(crate) const EVERYTHING: usize = 1 << 46;

    /// Returns the arena's number among those of its device, or none for a recorded step.
    pub(super) fn number(&self) -> Option<u64> {
        self.lending.as_ref().map(BufferBorrow::number)
    }

    /// Takes the memory from the device.
    pub(super) fn allocate(device: Device, capacity: usize) -> Result<Self> {
        let address = device.allocate(capacity)?;
        let mut region = Self::lent(device, address, capacity);
        let lending = region.device.lending();
        region.owner = region.device.owner_of_steps(lending.number());
        region.lending = Some(lending);
        region.owned_bytes = capacity;
        Ok(region)
    }

    /// Creates a region over memory that the caller keeps alive, for one step in a dry run. If it
    /// gets full, the step needs more than it was given.
    pub(crate) fn lent(device: Device, address: u64, capacity: usize) -> Self {
        Self {
            owner: device.owner_of_steps(1),
            launches: Launches::new(device.clone()),
            device,
            address,
            owned_bytes: 0,
            capacity: Cell::new(capacity),
            sections: Sections::default(),
            bump: Cell::new(Bump::new(capacity)),
            end: Cell::new(End::Front),
            reuse: Reuse::default(),
            peak: Peak::default(),
            overflowed: Cell::new(0),
            needed: Cell::new(0),
            warned: Cell::new(false),
            attributed: Cell::new(None),
            until: Cell::new(None),
            counters: RefCell::default(),
            overflow: None,
            checks: None,
            guard_bytes: 0,
            #[cfg(feature = "nvtx")]
            sanitizer: RefCell::new(None),
            reserve_bytes: None,
            recording: None,
            conditions: ReplayPreconditions::default(),
            resets: Cell::new(0),
            growths: 0,
            lending: None,
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Turns checked mode on.
    pub(super) fn check(&mut self) -> Result<()> {
        self.checks = Some(RefCell::new(Checks::new(&self.device)?));
        self.guard_bytes = GUARD_BYTES;
        Ok(())
    }

    /// Registers this memory with the sanitizer that started this program, if one did (feature
    /// `nvtx`).
    #[cfg(feature = "nvtx")]
    pub(super) fn sanitize(&mut self) {
        self.told_by(Sanitizer::attach(&self.device, self.address, self.owned_bytes));
    }

    /// Sets the sanitizer that each tensor is reported to from now on.
    #[cfg(feature = "nvtx")]
    pub(super) fn told_by(&mut self, sanitizer: Option<Sanitizer>) {
        if sanitizer.is_some() {
            self.guard_bytes = GUARD_BYTES;
        }
        if let Some(earlier) = self.sanitizer.replace(sanitizer) {
            earlier.end(&self.device);
        }
    }

    /// Reports these bytes to the sanitizer as those of a tensor or a captured step.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "only the sanitizer uses them"))]
    #[inline]
    fn tell_taken(&self, address: u64, bytes: usize) {
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = &mut *self.sanitizer.borrow_mut() {
            sanitizer.register(&self.device, address, bytes);
        }
    }

    /// Withdraws the sanitizer's registrations in these bytes.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "only the sanitizer uses them"))]
    #[inline]
    pub(super) fn tell_gone(&self, offsets: Range<usize>) {
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = &mut *self.sanitizer.borrow_mut() {
            sanitizer.unregister(&self.device, self.address + offsets.start as u64..self.address + offsets.end as u64);
        }
    }

    /// Creates a region on a dry run of this device, on which a step can be measured.
    pub(super) fn counting(&self, dry_run: &Device) -> Result<Self> {
        let mut region = Self::allocate(dry_run.clone(), Self::EVERYTHING)?;
        region.guard_bytes = self.guard_bytes;
        Ok(region)
    }

    /// Returns true if the memory is borrowed, which means that the region belongs to a recorded
    /// step.
    pub(crate) fn is_lent(&self) -> bool {
        self.owned_bytes == 0
    }

    /// Returns the preconditions of the running step.
    pub(crate) fn conditions(&self) -> &ReplayPreconditions {
        &self.conditions
    }

    /// Returns the launches of the running step.
    pub(crate) fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Returns `result` after the driver has taken all launches so far. If a launch failed, returns
    /// its error, which came first.
    pub(crate) fn launched<R>(&self, result: Result<R>) -> Result<R> {
        let settled = self.launches.settle(self.time_left(), result);
        settled.map_err(|error| self.with_report(error))
    }

    /// Reserves bytes at the end, which no later step uses while the section is alive, and returns
    /// them with their address. Call it between steps.
    pub(super) fn reserve(&self, bytes: usize) -> Option<(Arc<GraphReservation>, u64)> {
        let section = self.sections.reserve(self.owned_bytes, bytes)?;
        let address = self.address + section.start() as u64;
        self.refresh_capacity();
        self.tell_taken(address, section.bytes());
        Some((section, address))
    }

    /// Returns the most bytes that a section may have.
    pub(super) fn available_bytes(&self) -> usize {
        self.sections.limit(self.owned_bytes)
    }

    /// Updates the bytes that steps may fill to those that no section owns. Call it between steps.
    fn refresh_capacity(&self) {
        let limit = self.sections.limit(self.owned_bytes);
        if limit != self.capacity.get() {
            self.tell_gone(self.capacity.get()..limit.max(self.capacity.get()));
            self.peak.captured_changes(self.captured_bytes());
            self.capacity.set(limit);
            self.bump.set(Bump::new(limit));
        }
    }

    /// Returns the bytes at the end that steps may not fill.
    fn captured_bytes(&self) -> usize {
        self.owned_bytes.saturating_sub(self.capacity.get())
    }

    /// Takes memory for a recorded step's input, before the step begins. No scope frees it, and
    /// checked mode ignores it.
    #[track_caller]
    pub(crate) fn slot(&self, bytes: usize) -> Result<Memory<u8>> {
        let address = self.take_bytes(bytes, Location::caller())?;
        // SAFETY: these bytes were just taken, up to the next multiple of 256, and nothing else
        // uses them. The lender of the region keeps them alive.
        Ok(unsafe { Memory::new(self.owner, address, bytes) })
    }

    /// Takes uninitialized memory for a tensor of the running step.
    ///
    /// # Errors
    /// [`Error::ArenaFull`] if it does not fit. [`Error::Misuse`] if the shape's bytes overflow.
    #[inline]
    pub(crate) fn empty<T: Element>(&self, shape: Shape, site: &'static Location<'static>) -> Result<Memory<T>> {
        let bytes = shape.checked_elements().and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(bytes) = bytes else {
            return Err(Error::misuse("tensor", "a shape whose size fits the address space", shape.to_string()));
        };
        let address = self.take(Request { bytes, shape, element: T::NAME, poison: T::POISON }, site)?;
        // SAFETY: these bytes were just taken, up to the next multiple of 256, or freed by a tensor
        // that is gone. Nothing else uses them until the rewind past them. `Step::empty` brands the
        // tensor made of them, so none is left after the rewind.
        Ok(unsafe { Memory::new(self.owner, address, shape.elements()) })
    }

    /// Keeps this memory because it is read after the step. The tensor that owns it may still be
    /// passed to `free`, which then has no effect.
    pub(crate) fn keep<T: Element>(&self, memory: Memory<T>) {
        if self.owns(memory) {
            // A recorded step's memory lies in its own part of the arena, and there is no overflow.
            self.reuse.keep((memory.address() - self.address) as usize);
        }
    }

    /// Returns true for memory of a tensor of the running step, false for that of a buffer.
    pub(crate) fn owns<T: Element>(&self, memory: Memory<T>) -> bool {
        memory.is_of(self.owner)
    }

    /// Reuses the memory of a tensor of the running step for the next one of the same size. In
    /// checked mode no memory is reused, because a guard must stay until it is checked.
    pub(crate) fn free<S: Stored>(&self, tensor: Tensor<'_, S>, site: &'static Location<'static>) {
        let (address, bytes) = (tensor.memory().as_slice().address(), tensor.shape().elements() * size_of::<S>());
        // Memory in the overflow, or from before the scope, is outside the running scope's part.
        let place = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        let block =
            place.zip(padded(bytes.max(1))).and_then(|(offset, bytes)| Some(offset..offset.checked_add(bytes)?));
        let Some(block) = block.filter(|_| self.guard_bytes == 0) else { return };
        if self.reuse.give(self.bump.get(), block) {
            self.note(Kind::Free, Origin::Arena, address, bytes, site, "".into());
        }
    }

    /// Sets the guard bytes after each tensor, and the guards that the recorded step itself checks,
    /// in checked mode.
    pub(crate) fn guard_like(&mut self, guard_bytes: usize, checks: Option<Checks>) {
        self.guard_bytes = guard_bytes;
        self.checks = checks.map(RefCell::new);
    }

    /// Returns the guard bytes after each tensor in checked mode, else zero. A sanitizer treats a
    /// captured step's memory as one region.
    pub(crate) fn guard_bytes(&self) -> usize {
        if self.checks.is_some() { self.guard_bytes } else { 0 }
    }

    /// Takes the guards of a recorded step after it has ended.
    pub(crate) fn take_checks(&mut self) -> Option<Checks> {
        self.checks.take().map(RefCell::into_inner)
    }

    /// Returns the bytes and tensors that the running step has now.
    pub(super) fn in_use(&self) -> (usize, u64) {
        (self.bump.get().taken() + self.overflowed.get(), self.counters.borrow().step_allocations)
    }

    /// Returns the number of steps that have ended.
    pub(super) fn steps(&self) -> u64 {
        self.resets.get()
    }

    /// Returns the number of tensors made so far.
    pub(crate) fn allocations(&self) -> u64 {
        self.counters.borrow().report().allocations
    }

    /// Returns the most bytes that a scope has had in use.
    pub(crate) fn high_water_bytes(&self) -> usize {
        self.peak.step_bytes()
    }

    /// Starts to record events, or stops if `limit` is zero.
    pub(super) fn record(&mut self, limit: usize) {
        let name = &self.device.description().name;
        self.recording = (limit > 0).then(|| RefCell::new(Recording::new(name, limit)));
        self.note(Kind::Reserve, Origin::Arena, self.address, self.owned_bytes, Location::caller(), "arena".into());
    }

    /// Returns the events recorded so far.
    pub(super) fn recording(&self) -> Option<Recording> {
        self.recording.as_ref().map(|recording| recording.borrow().clone())
    }

    /// Records an event if recording is on.
    pub(super) fn note(
        &self,
        kind: Kind,
        origin: Origin,
        address: u64,
        bytes: usize,
        site: &'static Location<'static>,
        label: Cow<'static, str>,
    ) {
        let Some(recording) = &self.recording else { return };
        let time_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let phase = self.counters.borrow().phase.name();
        let (file, line) = (site.file(), site.line());
        recording.borrow_mut().push(Event { time_us, kind, address, bytes, origin, phase, file, line, label });
    }

    /// Sets the phase of the step, and returns the one before.
    pub(crate) fn enter(&self, phase: Phase) -> Phase {
        std::mem::replace(&mut self.counters.borrow_mut().phase, phase)
    }

    /// Reports this source line instead of the caller's from now on, for work that another line
    /// causes. Returns the one before.
    pub(crate) fn attribute(&self, site: Option<&'static Location<'static>>) -> Option<&'static Location<'static>> {
        self.attributed.replace(site)
    }

    /// Records that the running step relies on a buffer of `bytes` bytes, which it may write if
    /// `written`.
    pub(crate) fn lend(&self, address: u64, bytes: usize, written: bool) {
        if let Some(lending) = &self.lending {
            lending.add(address, bytes, written);
        }
    }

    /// Counts a complete backward pass.
    pub(crate) fn pass_completed(&self) {
        self.counters.borrow_mut().passes += 1;
    }

    /// Takes memory that nothing else uses until the rewind past it, and returns its address.
    #[inline]
    fn take(&self, request: Request, site: &'static Location<'static>) -> Result<u64> {
        let site = self.attributed.get().unwrap_or(site);
        let plain = self.guard_bytes == 0 && self.recording.is_none();
        if plain { self.take_bytes(request.bytes, site) } else { self.take_watched(request, site) }
    }

    #[inline]
    fn take_bytes(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        // An empty tensor takes a byte, so no two tensors of a step have the same address.
        let bytes = bytes.max(1);
        if let Some(offset) = self.reuse.take(bytes) {
            self.counters.borrow_mut().allocated(site, 0);
            return Ok(self.address + offset as u64);
        }
        let before = self.bump.get();
        let Some((offset, next)) = before.take(self.end.get(), bytes) else { return self.take_beyond(bytes, site) };
        self.bump.set(next);
        self.peak.step_has(next.taken() + self.overflowed.get());
        self.counters.borrow_mut().allocated(site, next.taken() - before.taken());
        Ok(self.address + offset as u64)
    }

    /// Takes memory with a guard after it and poisons it in checked mode, and records the event if
    /// recording is on.
    #[cold]
    fn take_watched(&self, request: Request, site: &'static Location<'static>) -> Result<u64> {
        let bytes = guarded(request.bytes, self.guard_bytes);
        let label = || Cow::from(format!("{}{}", request.element, request.shape));
        let address = self.take_bytes(bytes, site).inspect_err(|_| {
            let free_bytes = self.device.free_bytes(self.device.deadline()).unwrap_or(0);
            self.note(Kind::Refuse { free_bytes }, Origin::Arena, 0, request.bytes, site, label());
        })?;
        let inside = (self.address..self.address + self.capacity.get() as u64).contains(&address);
        let origin = if inside { Origin::Arena } else { Origin::Overflow };
        self.note(Kind::Allocate, origin, address, request.bytes, site, label());
        if inside {
            // In checked mode the guard is written and read, so the sanitizer must treat it as part
            // of the tensor.
            self.tell_taken(address, if self.checks.is_some() { bytes } else { request.bytes });
        }
        if let Some(checks) = &self.checks {
            // SAFETY: these bytes were just taken, and nothing else uses them.
            let block = unsafe { Memory::new(self.owner, address, bytes) };
            let made = checks.borrow_mut().made(&self.device, block, request, site);
            made.map_err(|error| self.with_report(error))?;
        }
        Ok(address)
    }

    /// Adds the arena's report to a timeout.
    pub(crate) fn with_report(&self, error: Error) -> Error {
        match error {
            Error::Timeout { call, waited, report: None } => {
                Error::Timeout { call, waited, report: Some(Box::new(self.report())) }
            }
            other => other,
        }
    }

    /// Begins a step. When the returned guard drops, even on a panic, the step is counted and its
    /// own counts restart.
    pub(super) fn step_begins(&self, deadline: Option<Duration>) -> StepGuard<'_> {
        self.refresh_capacity();
        self.launches.begin();
        self.until.set(deadline.map(after));
        StepGuard { region: self }
    }

    /// Returns the longest time that a wait may take: the rest of the step's time, and at most the
    /// device's deadline.
    pub(crate) fn time_left(&self) -> Duration {
        let deadline = self.device.deadline();
        self.until.get().map_or(deadline, |until| until.saturating_duration_since(Instant::now()).min(deadline))
    }

    /// Grows to what the steps have needed, up to `max_bytes`, if there is room.
    pub(super) fn grow(&mut self, max_bytes: usize) -> Result<()> {
        let needed = self.needed.get().max(self.high_water_bytes());
        if needed <= self.capacity.get() {
            return Ok(());
        }
        let wanted = grown(needed, max_bytes);
        if wanted <= self.capacity.get() || self.device.lost().is_some() {
            return Ok(());
        }
        if let Err(refusal) = situation(&self.device, self.reserve_bytes, self.device.deadline())?.admit(wanted as u64)
        {
            tracing::warn!(%refusal, "the arena keeps its size");
            return Ok(());
        }
        let address = match self.device.allocate(wanted) {
            Ok(address) => address,
            Err(error @ Error::DeviceMemory { .. }) => {
                tracing::warn!(%error, "the arena keeps its size");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        tracing::info!(from_bytes = self.owned_bytes, to_bytes = wanted, "the arena grows");
        let here = Location::caller();
        self.note(Kind::Release, Origin::Arena, self.address, self.owned_bytes, here, "arena".into());
        self.note(Kind::Reserve, Origin::Arena, address, wanted, here, "arena".into());
        let old = DeferredFree::Memory { address: self.address, bytes: self.owned_bytes };
        // SAFETY: the region owns its old memory, and `&mut self` means that no step is alive.
        // Captured steps that own a part of it pin it.
        unsafe { self.device.retire(old) };
        self.peak.captured_changes(self.captured_bytes());
        (self.address, self.owned_bytes) = (address, wanted);
        self.sections.forget();
        self.capacity.set(wanted);
        self.bump.set(Bump::new(wanted));
        #[cfg(feature = "nvtx")]
        self.sanitize();
        self.growths += 1;
        match &self.overflow {
            // The pool need not keep memory that the arena holds now.
            Some(overflow) => overflow.borrow_mut().shrink_to_prime(&self.device),
            None => Ok(()),
        }
    }

    /// Returns all memory that the overflow pool keeps to the system.
    pub(super) fn trim(&mut self) -> Result<()> {
        self.overflow.as_ref().map_or(Ok(()), |overflow| overflow.borrow_mut().trim(&self.device, 0))
    }

    /// Returns the state and counts of the arena.
    pub(super) fn report(&self) -> ArenaReport {
        let (host, cgroup) = (MemoryBudget::read_host(), CgroupMemory::read());
        let description = self.device.description();
        let memory = SystemMemory {
            device_total_bytes: description.memory_bytes,
            // A lost device is not called again.
            device_free_bytes: self.device.free_bytes(self.device.deadline()).ok(),
            host_free_bytes: host.map(|host| host.free_bytes),
            host_available_bytes: host.map(|host| host.available_bytes),
            cgroup_limit_bytes: cgroup.map(|cgroup| cgroup.limit_bytes),
            cgroup_available_bytes: cgroup.as_ref().map(CgroupMemory::available_bytes),
        };
        ArenaReport {
            capacity_bytes: self.available_bytes(),
            captured_bytes: self.sections.bytes(),
            offset_bytes: self.bump.get().taken(),
            high_water_bytes: self.high_water_bytes(),
            peak_bytes: self.peak.whole_bytes(self.captured_bytes()),
            resets: self.resets.get(),
            growths: self.growths,
            memory,
            ..self.counters.borrow().report()
        }
    }
}

impl Drop for ArenaInner {
    fn drop(&mut self) {
        if let Some(overflow) = self.overflow.take() {
            // SAFETY: each step borrows the region, so no step is alive, and its blocks were freed
            // at its end.
            unsafe { self.device.retire(DeferredFree::Pool(overflow.into_inner().pool)) };
        }
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = self.sanitizer.take() {
            sanitizer.end(&self.device);
        }
        if !self.is_lent() {
            let memory = DeferredFree::Memory { address: self.address, bytes: self.owned_bytes };
            // SAFETY: `allocate` took exactly this memory, the arena owns it, and no step is alive.
            // Captured steps pin it.
            unsafe { self.device.retire(memory) };
        }
    }
}

/// A guard that ends a step's counts when it drops.
pub(super) struct StepGuard<'r> {
    region: &'r ArenaInner,
}

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        if let Some(lending) = &self.region.lending {
            lending.end();
        }
        self.region.counters.borrow_mut().reset();
        self.region.warned.set(false);
        self.region.until.set(None);
        self.region.resets.set(self.region.resets.get() + 1);
    }
}
