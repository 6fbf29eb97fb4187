//! The memory of an arena and where it stands; steps borrow it.
//!
//! Invariant: what is taken is disjoint from all that is taken and not given back; `scope.rs` gives it back.

use super::checked::{Checks, GUARD_BYTES};
use super::conditions::Conditions;
use super::counters::Counters;
use super::layout::{Bump, End, grown, guarded, padded};
use super::overflow::OverflowPool;
use super::peak::Peak;
use super::request::Request;
use super::reuse::Reuse;
#[cfg(feature = "nvtx")]
use super::sanitizer::Sanitizer;
use super::sections::{Section, Sections};
use super::situation::situation;
use super::snapshot::{Event, Kind, Origin, Recording};
use crate::admission::Situation;
use crate::cgroup::CgroupMemory;
use crate::driver::{Device, Launches, Lending, Retired};
use crate::error::{Error, Result};
use crate::report::{ArenaReport, Phase, SystemMemory};
use crate::tensor::{Element, Memory, Shape, Source, Stored, Tensor};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The memory of an arena and where it stands. Steps borrow it.
#[derive(Debug)]
pub(crate) struct Region {
    pub(super) device: Device,
    pub(super) address: u64,
    /// The number of the owner of what steps have.
    pub(super) owner: u64,
    /// Bytes of device memory at the address that are this region's own; none where it is lent.
    pub(super) owned_bytes: usize,
    /// Bytes that steps may fill: all but what captured steps own.
    pub(super) capacity: Cell<usize>,
    sections: Sections,
    pub(super) bump: Cell<Bump>,
    /// Where the running scope takes tensors from.
    pub(super) end: Cell<End>,
    /// What the running scope's tensors have left to others of their size.
    pub(super) reuse: Reuse,
    pub(super) peak: Peak,
    /// Bytes that the running step has from the overflow pool.
    pub(super) overflowed: Cell<usize>,
    /// The most that a step would have had in use, what was refused included: what the arena grows to.
    pub(super) needed: Cell<usize>,
    /// Whether this step has been warned of.
    pub(super) warned: Cell<bool>,
    /// When the step must have ended, if it has a deadline.
    until: Cell<Option<Instant>>,
    /// The line that is named in place of the caller's, while a backward pass runs.
    attributed: Cell<Option<&'static Location<'static>>>,
    pub(super) counters: RefCell<Counters>,
    pub(super) overflow: Option<RefCell<OverflowPool>>,
    pub(super) checks: Option<RefCell<Checks>>,
    /// Bytes behind each tensor that are no tensor's: in checked mode and under a sanitizer, also where only the needs are measured.
    guard_bytes: usize,
    /// What a sanitizer is told.
    #[cfg(feature = "nvtx")]
    sanitizer: RefCell<Option<Sanitizer>>,
    pub(super) reserve_bytes: Option<u64>,
    pub(super) recording: Option<RefCell<Recording>>,
    conditions: Conditions,
    launches: Launches,
    resets: Cell<u64>,
    growths: u64,
    /// What the running step is lent; a step that is recorded relies on nothing yet.
    lending: Option<Lending>,
}

impl Region {
    /// Bytes of a region that is addresses alone: as many as a step may want.
    pub(crate) const EVERYTHING: usize = 1 << 46;

    /// The number of the arena among those of its device; none of a step that is recorded.
    pub(super) fn number(&self) -> Option<u64> {
        self.lending.as_ref().map(Lending::number)
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

    /// A region over memory that somebody else keeps alive, for one step that is rehearsed: when it is full, the step needs
    /// more than it was given.
    pub(crate) fn lent(device: Device, address: u64, capacity: usize) -> Self {
        Self {
            owner: device.owner_of_steps(1),
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
            conditions: Conditions::default(),
            launches: Launches::default(),
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

    /// Tells the sanitizer that started this program, if one did, which bytes are whose (feature `nvtx`).
    #[cfg(feature = "nvtx")]
    pub(super) fn sanitize(&mut self) {
        self.told_by(Sanitizer::attach(&self.device, self.address, self.owned_bytes));
    }

    /// A sanitizer hears of each tensor from now on.
    #[cfg(feature = "nvtx")]
    pub(super) fn told_by(&mut self, sanitizer: Option<Sanitizer>) {
        if sanitizer.is_some() {
            self.guard_bytes = GUARD_BYTES;
        }
        if let Some(earlier) = self.sanitizer.replace(sanitizer) {
            earlier.end(&self.device);
        }
    }

    /// These bytes are a tensor's, or a captured step's.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "nobody is told"))]
    #[inline]
    fn tell_taken(&self, address: u64, bytes: usize) {
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = &mut *self.sanitizer.borrow_mut() {
            sanitizer.register(&self.device, address, bytes);
        }
    }

    /// What a sanitizer knows of these bytes is no longer so.
    #[cfg_attr(not(feature = "nvtx"), expect(unused_variables, reason = "nobody is told"))]
    #[inline]
    pub(super) fn tell_gone(&self, offsets: Range<usize>) {
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = &mut *self.sanitizer.borrow_mut() {
            sanitizer.unregister(&self.device, self.address + offsets.start as u64..self.address + offsets.end as u64);
        }
    }

    /// A region of a rehearsal of this one's device, on which a step can be measured.
    pub(super) fn counting(&self, rehearsal: &Device) -> Result<Self> {
        let mut region = Self::allocate(rehearsal.clone(), Self::EVERYTHING)?;
        region.guard_bytes = self.guard_bytes;
        Ok(region)
    }

    /// Whether the memory is somebody else's: the region is of a step that is recorded.
    pub(crate) fn is_lent(&self) -> bool {
        self.owned_bytes == 0
    }

    /// What the running step has asked of the host.
    pub(crate) fn conditions(&self) -> &Conditions {
        &self.conditions
    }

    /// What the running step has launched.
    pub(crate) fn launches(&self) -> &Launches {
        &self.launches
    }

    /// What has become of a part of the running step, once the driver has taken all that it launched so far: of a launch that failed, its
    /// error, which came first.
    pub(crate) fn launched<R>(&self, result: Result<R>) -> Result<R> {
        let settled = self.launches.settle(&self.device, self.time_left(), result);
        settled.map_err(|error| self.with_report(error))
    }

    /// Bytes at the end that no later step uses while the section is alive, and their address. Call it between steps.
    pub(super) fn reserve(&self, bytes: usize) -> Option<(Arc<Section>, u64)> {
        let section = self.sections.reserve(self.owned_bytes, bytes)?;
        let address = self.address + section.start() as u64;
        self.refresh_capacity();
        self.tell_taken(address, section.bytes());
        Some((section, address))
    }

    /// Bytes that a section may have at most.
    pub(super) fn available_bytes(&self) -> usize {
        self.sections.limit(self.owned_bytes)
    }

    /// Lets steps fill what no section has. Call it between steps.
    fn refresh_capacity(&self) {
        let limit = self.sections.limit(self.owned_bytes);
        if limit != self.capacity.get() {
            self.tell_gone(self.capacity.get()..limit.max(self.capacity.get()));
            self.peak.captured_changes(self.captured_bytes());
            self.capacity.set(limit);
            self.bump.set(Bump::new(limit));
        }
    }

    /// Bytes at the end that steps may not fill.
    fn captured_bytes(&self) -> usize {
        self.owned_bytes.saturating_sub(self.capacity.get())
    }

    /// Memory for a recorded step's input, before the step begins: no scope gives it back, and checked mode leaves it alone.
    #[track_caller]
    pub(crate) fn slot(&self, bytes: usize) -> Result<Memory<u8>> {
        let address = self.take_bytes(bytes, Location::caller())?;
        // SAFETY: these bytes were just taken, with those up to the next multiple of 256, and nothing else uses them; whoever lent the
        // region keeps them.
        Ok(unsafe { Memory::new(self.owner, address, bytes) })
    }

    /// Memory for a tensor of the running step, with whatever was there.
    ///
    /// # Errors
    /// [`Error::ArenaFull`]; [`Error::Misuse`] when the shape's bytes overflow.
    #[inline]
    pub(crate) fn empty<T: Element>(&self, shape: Shape, site: &'static Location<'static>) -> Result<Memory<T>> {
        let bytes = shape.checked_elements().and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(bytes) = bytes else {
            return Err(Error::misuse("tensor", "a shape whose bytes fit an address", shape.to_string()));
        };
        let address = self.take(Request { bytes, shape, element: T::NAME, poison: T::POISON }, site)?;
        // SAFETY: these bytes were just taken, with those up to the next multiple of 256, or given back by the tensor that had them, which is
        // gone. Nothing else uses them until the rewind past them; `Step::empty` brands the tensor that it makes of them, so none is left
        // then.
        Ok(unsafe { Memory::new(self.owner, address, shape.elements()) })
    }

    /// This memory is read when the step is over: the tensor that has it may be given back, and
    /// keeps it.
    pub(crate) fn keep<T: Element>(&self, memory: Memory<T>) {
        if self.owns(memory) {
            // What a recorded step has lies in its own part of the arena: there is no overflow.
            self.reuse.keep((memory.address() - self.address) as usize);
        }
    }

    /// Returns true for memory of a tensor of the running step, false for that of a buffer.
    pub(crate) fn owns<T: Element>(&self, memory: Memory<T>) -> bool {
        memory.is_of(self.owner)
    }

    /// Takes the memory of a tensor of the running step back, for the next one of the same size. In checked mode nothing is handed out twice:
    /// a guard must stay until it is looked at.
    pub(crate) fn give_back<S: Stored>(&self, tensor: Tensor<'_, S>, site: &'static Location<'static>) {
        let (address, bytes) = (tensor.memory().as_slice().address(), tensor.shape().elements() * size_of::<S>());
        // What lies elsewhere, in the overflow or before the scope, is no place in the running scope's part.
        let place = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        let block =
            place.zip(padded(bytes.max(1))).and_then(|(offset, bytes)| Some(offset..offset.checked_add(bytes)?));
        let Some(block) = block.filter(|_| self.guard_bytes == 0) else { return };
        if self.reuse.give(self.bump.get(), block) {
            self.note(Kind::Free, Origin::Arena, address, bytes, site, "".into());
        }
    }

    /// In checked mode: so many bytes behind each tensor, and guards there that the recorded step itself looks at.
    pub(crate) fn guard_like(&mut self, guard_bytes: usize, checks: Option<Checks>) {
        self.guard_bytes = guard_bytes;
        self.checks = checks.map(RefCell::new);
    }

    /// Bytes behind each tensor in checked mode, else none: a sanitizer sees a captured step's memory as one.
    pub(crate) fn guard_bytes(&self) -> usize {
        if self.checks.is_some() { self.guard_bytes } else { 0 }
    }

    /// The guards of a recorded step, when it is over.
    pub(crate) fn take_checks(&mut self) -> Option<Checks> {
        self.checks.take().map(RefCell::into_inner)
    }

    /// Bytes and tensors of the running step, as it stands.
    pub(super) fn in_use(&self) -> (usize, u64) {
        (self.bump.get().taken() + self.overflowed.get(), self.counters.borrow().step_allocations)
    }

    /// Steps that have ended.
    pub(super) fn steps(&self) -> u64 {
        self.resets.get()
    }

    /// Tensors made so far.
    pub(crate) fn allocations(&self) -> u64 {
        self.counters.borrow().report().allocations
    }

    /// The most bytes that a scope has had in use.
    pub(crate) fn high_water_bytes(&self) -> usize {
        self.peak.step_bytes()
    }

    /// Starts to record events, or stops.
    pub(super) fn record(&mut self, limit: usize) {
        let name = &self.device.description().name;
        self.recording = (limit > 0).then(|| RefCell::new(Recording::new(name, limit)));
        self.note(Kind::Reserve, Origin::Arena, self.address, self.owned_bytes, Location::caller(), "arena".into());
    }

    /// What has been recorded.
    pub(super) fn recording(&self) -> Option<Recording> {
        self.recording.as_ref().map(|recording| recording.borrow().clone())
    }

    /// Records what happened, if somebody listens.
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

    /// What the step is doing from now on; returns what it did before.
    pub(crate) fn enter(&self, phase: Phase) -> Phase {
        std::mem::replace(&mut self.counters.borrow_mut().phase, phase)
    }

    /// Names this line in place of the caller's from now on: work that another line is the reason for. Returns what was named.
    pub(crate) fn attribute(&self, site: Option<&'static Location<'static>>) -> Option<&'static Location<'static>> {
        self.attributed.replace(site)
    }

    /// The running step relies on a buffer, of so many bytes, which it may write if `written`.
    pub(crate) fn lend(&self, address: u64, bytes: usize, written: bool) {
        if let Some(lending) = &self.lending {
            lending.add(address, bytes, written);
        }
    }

    /// A backward pass is complete.
    pub(crate) fn pass_completed(&self) {
        self.counters.borrow_mut().passes += 1;
    }

    /// The address of memory that nothing else uses until the rewind past it.
    #[inline]
    fn take(&self, request: Request, site: &'static Location<'static>) -> Result<u64> {
        let site = self.attributed.get().unwrap_or(site);
        let plain = self.guard_bytes == 0 && self.recording.is_none();
        if plain { self.take_bytes(request.bytes, site) } else { self.take_watched(request, site) }
    }

    #[inline]
    fn take_bytes(&self, bytes: usize, site: &'static Location<'static>) -> Result<u64> {
        // An empty tensor takes a place of its own: no two tensors of a step have one address.
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

    /// With a guard behind and poisoned in checked mode, and noted where events are recorded.
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
            // A guard that is written and read is the tensor's, as far as a sanitizer sees.
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

    /// A timeout with what the arena knows.
    pub(crate) fn with_report(&self, error: Error) -> Error {
        match error {
            Error::Timeout { call, waited, report: None } => {
                Error::Timeout { call, waited, report: Some(Box::new(self.report())) }
            }
            other => other,
        }
    }

    /// A step begins: when the guard goes, panic or not, the step is counted and its own counts begin anew.
    pub(super) fn step_begins(&self, deadline: Option<Duration>) -> StepGuard<'_> {
        self.refresh_capacity();
        self.launches.begin();
        self.until.set(deadline.and_then(|deadline| Instant::now().checked_add(deadline)));
        StepGuard { region: self }
    }

    /// How long a wait may take: what is left of the step, and at most the device's deadline.
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
            tracing::warn!(%refusal, "the arena stays as it is");
            return Ok(());
        }
        let address = match self.device.allocate(wanted) {
            Ok(address) => address,
            Err(error @ Error::DeviceMemory { .. }) => {
                tracing::warn!(%error, "the arena stays as it is");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        tracing::info!(from_bytes = self.owned_bytes, to_bytes = wanted, "the arena grows");
        let here = Location::caller();
        self.note(Kind::Release, Origin::Arena, self.address, self.owned_bytes, here, "arena".into());
        self.note(Kind::Reserve, Origin::Arena, address, wanted, here, "arena".into());
        let old = Retired::Memory { address: self.address, bytes: self.owned_bytes };
        // SAFETY: the region owns its old memory, and no step is alive: `&mut self`. Captured steps that have a part of it pin it.
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
            // What the arena holds now, the pool need not keep.
            Some(overflow) => overflow.borrow_mut().shrink_to_prime(&self.device),
            None => Ok(()),
        }
    }

    /// Gives the system all memory that the overflow pool keeps.
    pub(super) fn trim(&mut self) -> Result<()> {
        self.overflow.as_ref().map_or(Ok(()), |overflow| overflow.borrow_mut().trim(&self.device, 0))
    }

    /// What the arena knows about itself.
    pub(super) fn report(&self) -> ArenaReport {
        let (host, cgroup) = (Situation::read_host(), CgroupMemory::read());
        let description = self.device.description();
        let memory = SystemMemory {
            device_total_bytes: description.memory_bytes,
            // A lost device is not asked again.
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

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(overflow) = self.overflow.take() {
            // SAFETY: no step is alive, each borrows the region, and its blocks went back at its end.
            unsafe { self.device.retire(Retired::Pool(overflow.into_inner().pool)) };
        }
        #[cfg(feature = "nvtx")]
        if let Some(sanitizer) = self.sanitizer.take() {
            sanitizer.end(&self.device);
        }
        if !self.is_lent() {
            let memory = Retired::Memory { address: self.address, bytes: self.owned_bytes };
            // SAFETY: `allocate` took exactly this; the arena owns it, and no step is alive. Captured steps pin it.
            unsafe { self.device.retire(memory) };
        }
    }
}

/// Ends a step's counts.
pub(super) struct StepGuard<'r> {
    region: &'r Region,
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
