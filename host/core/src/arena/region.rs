//! The memory of an arena and its current state, which steps borrow.
//!
//! Invariant: every allocation is disjoint from all live ones. `scope.rs` frees them.

use super::checked::{Checks, GUARD_BYTES};
use super::counters::{Counters, Peak};
use super::events::{Kind, Observers, Origin};
use super::layout::{Bump, End, GraphReservation, Sections, grown, guarded, padded};
use super::overflow::OverflowPool;
use super::plan::{Listing, Placement};
use super::scope::Reuse;
use crate::deadline::after;
use crate::device::{BufferBorrow, DeferredFree, Device, Launches};
use crate::error::{Error, Result};
use crate::preconditions::ReplayPreconditions;
use crate::report::Phase;
use crate::tensor::{Element, Memory, Shape, Source, Stored, Tensor};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A requested tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Its bytes, before padding.
    pub(crate) bytes: usize,
    pub(crate) shape: Shape,
    /// The name of its element type.
    pub(crate) element: &'static str,
    /// The word that checked mode fills it with.
    pub(crate) poison: u32,
}

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
    pub(super) sections: Sections,
    pub(super) bump: Cell<Bump>,
    /// The end from which the running scope takes tensors.
    pub(super) end: Cell<End>,
    /// The freed blocks that the running scope may reuse.
    pub(super) reuse: Reuse,
    placement: Placement,
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
    /// The bytes after each tensor that belong to no tensor. Nonzero in checked mode and if an
    /// observer needs them, even when only the needs are measured.
    pub(super) guard_bytes: usize,
    pub(super) observers: Observers,
    pub(super) reserve_bytes: Option<u64>,
    conditions: ReplayPreconditions,
    launches: Launches,
    pub(super) resets: Cell<u64>,
    pub(super) growths: u64,
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
            placement: Placement::default(),
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
            observers: Observers::default(),
            reserve_bytes: None,
            conditions: ReplayPreconditions::default(),
            resets: Cell::new(0),
            growths: 0,
            lending: None,
        }
    }

    /// Sets how a recorded step's tensors get their memory. Call it before the step begins.
    pub(crate) fn place(&mut self, placement: Placement) {
        self.placement = placement;
    }

    /// Lets the listed tensors so far live throughout the step.
    pub(crate) fn keep_inputs(&self) {
        if let Placement::Listed(listing) = &self.placement {
            listing.keep_inputs();
        }
    }

    /// Takes the list of the step's tensors after it has ended, if they were listed.
    pub(crate) fn take_listing(&mut self) -> Option<Listing> {
        match std::mem::take(&mut self.placement) {
            Placement::Listed(listing) => Some(listing),
            Placement::Scoped | Placement::Planned(..) => None,
        }
    }

    /// Returns the offset at which the tensor at this offset lies by scope. A plan has none.
    fn scoped(&self, offset: usize) -> Option<usize> {
        match &self.placement {
            Placement::Scoped => Some(offset),
            Placement::Listed(listing) => listing.scoped(offset),
            Placement::Planned(..) => None,
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
    /// them with their address. A plan has saved `saved` more. Call it between steps.
    pub(super) fn reserve(&self, bytes: usize, saved: usize) -> Option<(Arc<GraphReservation>, u64)> {
        let section = self.sections.reserve(self.owned_bytes, bytes, saved)?;
        let address = self.address + section.start() as u64;
        self.refresh_capacity();
        self.note(Kind::Capture, Origin::Arena, address, section.bytes(), Location::caller(), "captured step".into());
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
            if let Some(bytes) = limit.checked_sub(self.capacity.get()) {
                let address = self.address + self.capacity.get() as u64;
                self.note(Kind::EndCapture, Origin::Arena, address, bytes, Location::caller(), "captured step".into());
            }
            self.peak.captured_changes(self.captured_bytes());
            self.capacity.set(limit);
            self.bump.set(Bump::new(limit));
        }
    }

    /// Returns the bytes at the end that steps may not fill.
    pub(super) fn captured_bytes(&self) -> usize {
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
        if !self.owns(memory) {
            return;
        }
        // A recorded step's memory lies in its own part of the arena, and there is no overflow.
        let offset = (memory.address() - self.address) as usize;
        if let Placement::Listed(listing) = &self.placement {
            listing.keep(offset..offset + memory.bytes().len());
        }
        self.scoped(offset).into_iter().for_each(|scoped| self.reuse.keep(scoped));
    }

    /// Returns true for memory of a tensor of the running step, false for that of a buffer.
    pub(crate) fn owns<T: Element>(&self, memory: Memory<T>) -> bool {
        memory.is_of(self.owner)
    }

    /// Reuses the memory of a tensor of the running step for the next one of the same size. In
    /// checked mode no memory is reused, because a guard must stay until it is checked. A plan
    /// knows each tensor's lifetime already.
    pub(crate) fn free<S: Stored>(&self, tensor: Tensor<'_, S>, site: &'static Location<'static>) {
        let (address, bytes) = (tensor.memory().as_slice().address(), tensor.shape().elements() * size_of::<S>());
        // Memory in the overflow, or from before the scope, is outside the running scope's part.
        let place = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        let block = place
            .and_then(|offset| self.scoped(offset))
            .zip(padded(bytes.max(1)))
            .and_then(|(offset, bytes)| Some(offset..offset.checked_add(bytes)?));
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
        let plain = self.guard_bytes == 0 && !self.observed();
        if plain { self.take_bytes(request.bytes, site) } else { self.take_watched(request, site) }
    }

    #[inline]
    fn take_bytes(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        // An empty tensor takes a byte, so no two tensors of a step have the same address.
        let bytes = bytes.max(1);
        if let Placement::Planned(plan, taken) = &self.placement {
            let offset = plan.offset(taken.replace(taken.get() + 1), bytes)?;
            self.counters.borrow_mut().allocated(site, 0);
            return Ok(self.address + offset as u64);
        }
        if let Some(offset) = self.reuse.take(bytes) {
            self.counters.borrow_mut().allocated(site, 0);
            return self.listed(offset, bytes, site);
        }
        let before = self.bump.get();
        let Some((offset, next)) = before.take(self.end.get(), bytes) else { return self.take_beyond(bytes, site) };
        self.bump.set(next);
        self.peak.step_has(next.taken() + self.overflowed.get());
        self.counters.borrow_mut().allocated(site, next.taken() - before.taken());
        self.listed(offset, bytes, site)
    }

    /// Returns the address at this offset, or the tensor's own address if tensors are listed.
    #[inline]
    fn listed(&self, offset: usize, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        let Placement::Listed(listing) = &self.placement else { return Ok(self.address + offset as u64) };
        match listing.add(bytes, offset) {
            Some(offset) => Ok(self.address + offset as u64),
            None => self.take_beyond(bytes, site),
        }
    }

    /// Takes memory with a guard after it and poisons it in checked mode, and passes the event to
    /// the observers.
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
        if self.observed() {
            // In checked mode the guard is written and read.
            let accessed_bytes = if self.checks.is_some() { bytes } else { request.bytes };
            let event = self.event(Kind::Allocate, origin, address, request.bytes, accessed_bytes, site, label());
            self.observers.notify(&event);
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

    /// Grows to the most bytes that a step has needed, up to `max_bytes`, if there is room.
    pub(super) fn grow(&mut self, max_bytes: usize) -> Result<()> {
        let needed = self.needed.get().max(self.high_water_bytes());
        if needed <= self.capacity.get() {
            return Ok(());
        }
        let wanted = grown(needed, max_bytes);
        if wanted <= self.capacity.get() || self.device.lost().is_some() {
            return Ok(());
        }
        if let Err(refusal) = self.device.budget(self.reserve_bytes, self.device.deadline())?.admit(wanted as u64) {
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
}

impl Drop for ArenaInner {
    fn drop(&mut self) {
        if let Some(overflow) = self.overflow.take() {
            // SAFETY: each step borrows the region, so no step is alive, and its blocks were freed
            // at its end.
            unsafe { self.device.retire(DeferredFree::Pool(overflow.into_inner().pool)) };
        }
        if !self.is_lent() {
            let here = Location::caller();
            self.note(Kind::Release, Origin::Arena, self.address, self.owned_bytes, here, "arena".into());
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
