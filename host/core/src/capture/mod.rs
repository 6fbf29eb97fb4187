//! Captured steps: a step is recorded once and replayed as one graph, or as several graphs if
//! others wait for its progress.
//!
//! The closure of [`Arena::capture`] is a plain function. It receives a bare [`Step`], which cannot
//! upload, read or overflow, and a state, through which it reaches everything else. The closure
//! runs twice, and never on the device. From the launches of the first run follows a plan of the
//! step's memory, in which tensors share memory that are not used at the same time. The second run
//! lists its launches at addresses that belong only to the capture. Only then does the driver
//! capture the launches, in one short job. The capture therefore contains no allocation, upload or
//! wait, and nothing in it can hang.
//!
//! Invariant: while a graph lives, no other step uses the part of the arena that it writes. Memory
//! that a graph refers to is not freed before the graph, even if its owner is dropped.

#![forbid(unsafe_code)]

mod recordings;
mod segments;
mod slots;
mod state;

pub use slots::{CaptureInputs, DeviceBatch, HostInputs, InputKey, Output};

use crate::arena::{
    ALIGN_BYTES, Arena, ArenaInner, Checks, GraphReservation, Listing, Measured, MemoryPlan, Placement, Uses,
};
use crate::device::{Device, Launch, PinnedReadback, Pins};
use crate::error::{Error, Result};
use crate::host_memory::Floor;
use crate::preconditions::ReplayPrecondition;
use crate::step::Step;
use crate::tensor::{Element, Stored};
use cuda_std::float_mode;
use recordings::{RecordedStep, Recordings};
use segments::Segments;
use serde::Serialize;
use slots::{Key, Ports};
use state::{Event, State};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::Span;
use tracing::field::Empty;

/// The function that a captured step runs. It makes its launches on `Step` and takes everything
/// else from the state `S`. Its result `R` holds [`Output`]s. It is a function, or a closure that
/// captures nothing.
pub type Record<S, R> = for<'s> fn(&mut Step<'s>, &mut S, &CaptureInputs<'s>) -> Result<R>;

/// A step that is replayed as one graph, together with its state. It has one recording for each
/// combination of input shapes.
pub struct Captured<S, R> {
    // Graphs are dropped before their section returns to the arena, and before the state.
    recordings: Recordings<R>,
    memory: CaptureMemory,
    record: Record<S, R>,
    state: S,
    replays: u64,
}

impl<S, R> fmt::Debug for Captured<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Captured").field("report", &self.report()).finish_non_exhaustive()
    }
}

/// The memory that a captured step may write.
struct CaptureMemory {
    device: Device,
    section: Arc<GraphReservation>,
    address: u64,
    /// Guard bytes after each tensor in checked mode, otherwise 0.
    guard_bytes: usize,
    deadline: Duration,
    floor: Floor,
}

/// Statistics of a captured step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CaptureReport {
    /// Launches of the most recently used recording.
    pub nodes: usize,
    /// Recordings made, one for each new combination of input shapes.
    pub recordings: u64,
    /// The largest number of recordings kept.
    pub kept: usize,
    /// Recordings evicted, because there were more shapes than recordings kept, or too little
    /// memory for another one.
    pub evictions: u64,
    /// Seconds spent on making the recordings.
    pub record_seconds: f64,
    /// Replays.
    pub replays: u64,
    /// Bytes of the arena that are reserved for this capture.
    pub bytes_owned: usize,
    /// Bytes that would be reserved in addition if each tensor lived until its scope ends.
    pub bytes_saved: usize,
}

impl Arena {
    /// Captures a step for inputs of these shapes. Nothing runs until [`Captured::replay`]. The
    /// inputs' values are not read.
    ///
    /// `record` is called at least twice for each recording and must do the same each time. It may
    /// reach the device only through its step: an upload, a read or an allocation in it is
    /// [`Error::Misuse`]. The part of the arena that the step needs belongs to the capture until
    /// the capture is dropped. Pass `&mut state` to keep the state if this call fails.
    ///
    /// ```
    /// # use stepscope::optim::UpdateTicket;
    /// # use stepscope::parameters::Initializer;
    /// # use stepscope::prelude::*;
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// # let mut spec = ParameterSpec::builder();
    /// # let w = spec.add("w", [4, 3], Initializer::fan_in(4));
    /// # let mut weights = Parameters::new(&device, &spec.build()?, 7)?;
    /// # let mut gradients = Gradients::zeros(&weights)?;
    /// # let mut adamw = Optimizer::new(&weights, AdamW::default())?;
    /// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// # let (x, labels) = ([0.5f32; 8], [0u32, 2]);
    /// let inputs = HostInputs::new().with(&x, [2, 4])?.with(&labels, [2])?;
    /// let state = (w, &mut weights, &mut gradients, &mut adamw);
    /// let mut captured = arena.capture(state, &inputs, |step, (w, weights, gradients, adamw), slots| {
    ///     gradients.zero(step)?;
    ///     let tape = Tape::new(step, weights);
    ///     let logits = tape.linear(&tape.input(slots.input::<f32>(0)?), *w, None)?;
    ///     let loss = tape.cross_entropy(&logits, slots.indices(1)?)?;
    ///     tape.backward(&loss, gradients)?;
    ///     adamw.apply(UpdateTicket::each_replay(slots), step, weights, gradients)?;
    ///     Ok(slots.output(loss.value()))
    /// })?;
    /// for _ in 0..10 {
    ///     // The learning rate and the corrections of this update, to their device slot.
    ///     captured.state_mut().3.advance()?.leave_to_replay();
    ///     let replay = captured.replay(&inputs)?; // the batch, to its slots; then the graph
    ///     let loss = replay.read_scalar(*replay.outputs())?; // waits, with a deadline
    ///     assert!(loss.is_finite());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::CaptureNeeds`] when the arena has too little memory, before the driver is called.
    /// [`Error::Misuse`] for a launch that uses a tensor of a running step, which the state brought
    /// in. [`Error::Driver`] when the driver refuses. After an error the arena and the device are
    /// as before.
    pub fn capture<S, R>(
        &mut self,
        mut state: S,
        inputs: &HostInputs<'_>,
        record: Record<S, R>,
    ) -> Result<Captured<S, R>> {
        let start = Instant::now();
        let device = self.device().clone();
        let (key, guard_bytes) = (inputs.key(), self.guard_bytes());
        let _span = span(&key).entered();
        let needs = CaptureNeeds::of(&device, guard_bytes, &key, &mut state, record)?;
        let (bytes, available) = (needs.bytes, self.available_bytes());
        let saved = needs.plan.as_ref().map_or(0, |plan| plan.saved_bytes());
        let Some((section, address)) = self.reserve(bytes, saved) else {
            return Err(Error::CaptureNeeds { bytes, available, overflow_bytes: self.overflow_bytes() });
        };
        let memory =
            CaptureMemory { section, address, guard_bytes, deadline: self.deadline(), device, floor: self.floor() };
        let first = memory.record(&key, &needs, &mut state, record)?;
        let recordings = Recordings::new(first, start.elapsed());
        Ok(Captured { recordings, memory, record, state, replays: 0 })
    }
}

impl Arena {
    /// Measures what [`Arena::capture`] would reserve.
    pub(crate) fn measure_capture<S, R>(
        &self,
        state: &mut S,
        inputs: &HostInputs<'_>,
        record: Record<S, R>,
    ) -> Result<Measured> {
        let needs = CaptureNeeds::of(self.device(), self.guard_bytes(), &inputs.key(), state, record)?;
        Ok(Measured { high_water_bytes: needs.bytes })
    }
}

impl<S, R> Captured<S, R> {
    /// Sets the number of recordings to keep, at least one (default 32). There is one recording for
    /// each combination of the inputs' shapes and the variant. When there are more, or memory for
    /// another one is refused, the least recently used recording is evicted. Its shapes are
    /// recorded again when they return. If that happens repeatedly, a warning is logged once.
    #[must_use]
    pub fn keep(mut self, recordings: usize) -> Self {
        self.recordings.keep(recordings);
        self
    }

    /// Sets the number of recordings to keep, like [`Captured::keep`], in place.
    pub fn set_kept(&mut self, recordings: usize) {
        self.recordings.keep(recordings);
    }

    /// The state that the step works on. The host reads it in stream order, after all replays so
    /// far.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The state, to be changed between replays. The graph keeps the addresses that it was recorded
    /// with, so write into a buffer rather than replacing it. If a buffer is taken out, each replay
    /// still writes it, always as a whole, and never during a step that borrows it.
    pub fn state_mut(&mut self) -> &mut S {
        &mut self.state
    }

    /// Ends the capture and returns the state.
    pub fn into_state(self) -> S {
        self.state
    }

    /// Returns the size of the recorded graphs, and counts of recordings, evictions and replays.
    pub fn report(&self) -> CaptureReport {
        let (kept, recordings, evictions, time) = self.recordings.report();
        CaptureReport {
            nodes: self.recordings.last().segments.kernels(),
            recordings,
            kept,
            evictions,
            record_seconds: float_mode::in_default(|| time.as_secs_f64()),
            replays: self.replays,
            bytes_owned: self.memory.section.bytes(),
            bytes_saved: self.memory.section.saved_bytes(),
        }
    }

    /// Writes the inputs to their slots and queues the graph, in stream order. Waits only for room
    /// to stage the inputs, and for another thread's step that borrows memory that the graph
    /// writes. Inputs of new shapes are recorded first.
    ///
    /// # Errors
    /// [`Error::CaptureNeeds`] when new shapes need more memory than the capture owns.
    /// [`Error::Misuse`] inside a step that borrows memory that the graph writes, and when a
    /// precondition that the recorded step registered does not hold: each update of an optimizer
    /// must be prepared. [`Error::Label`] for a label that is not a class. [`Error::Overrun`] in
    /// checked mode.
    pub fn replay(&mut self, inputs: &HostInputs<'_>) -> Result<Replay<'_, R>> {
        self.choose(inputs)?;
        self.run(Some(inputs), &mut |_, _| Ok(()))
    }

    /// Replays like [`Captured::replay`], and calls `between` with the state after each segment is
    /// queued and before the next. Its second argument is the number of entries passed to
    /// [`CaptureInputs::announce`] that no later segment uses.
    pub fn replay_telling(
        &mut self,
        inputs: &HostInputs<'_>,
        between: &mut dyn FnMut(&mut S, usize) -> Result<()>,
    ) -> Result<Replay<'_, R>> {
        self.choose(inputs)?;
        self.run(Some(inputs), between)
    }

    /// Queues the most recently used graph again, on the inputs that its slots still hold.
    ///
    /// # Errors
    /// [`Error::Misuse`] when a precondition that the recorded step registered does not hold.
    /// [`Error::Overrun`] in checked mode.
    pub fn repeat(&mut self) -> Result<Replay<'_, R>> {
        self.run(None, &mut |_, _| Ok(()))
    }

    /// Moves the recording for these inputs to the end, recording it if necessary.
    fn choose(&mut self, inputs: &HostInputs<'_>) -> Result<()> {
        if self.recordings.find(inputs) { Ok(()) } else { self.add(inputs) }
    }

    /// Replays the last recording.
    fn run(
        &mut self,
        inputs: Option<&HostInputs<'_>>,
        between: &mut dyn FnMut(&mut S, usize) -> Result<()>,
    ) -> Result<Replay<'_, R>> {
        let device = &self.memory.device;
        let recording = self.recordings.last_mut();
        let (key, kernels) = (recording.ports.key(), recording.segments.kernels());
        let _span = tracing::debug_span!("replay", %key, kernels, number = self.replays).entered();
        self.memory.floor.begin_step().map_err(Error::MemoryShortage)?;
        let state = &mut self.state;
        let outcome = recording.replay(device, inputs, self.memory.deadline, &mut |complete| between(state, complete));
        if device.lost().is_some() {
            recording.state = recording.state.after(Event::Lose)?;
        }
        outcome?;
        self.replays += 1;
        Ok(Replay { memory: &self.memory, recording })
    }

    /// Records the step for new shapes.
    fn add(&mut self, inputs: &HostInputs<'_>) -> Result<()> {
        let start = Instant::now();
        let CaptureMemory { device, section, guard_bytes, .. } = &self.memory;
        let key = inputs.key();
        let _span = span(&key).entered();
        let needs = CaptureNeeds::of(device, *guard_bytes, &key, &mut self.state, self.record)?;
        let (bytes, available) = (needs.bytes, section.bytes());
        if bytes > available {
            return Err(Error::CaptureNeeds { bytes, available, overflow_bytes: 0 });
        }
        let recording = loop {
            match self.memory.record(&key, &needs, &mut self.state, self.record) {
                // There is memory for fewer recordings than the number to keep.
                Err(Error::Refused(_) | Error::DeviceMemory { .. }) if self.recordings.evict() => {}
                recorded => break recorded?,
            }
        };
        self.recordings.add(recording, start.elapsed());
        Ok(())
    }
}

/// The tracing span of a recording. Its empty fields are filled in with the graph.
fn span(key: &Key) -> Span {
    tracing::debug_span!("capture", %key, bytes = Empty, tensors = Empty, kernels = Empty)
}

/// The result of a dry run of a step.
struct DryRunRecord<R> {
    result: R,
    ports: Ports,
    conditions: Vec<Arc<dyn ReplayPrecondition>>,
    checks: Option<Checks>,
    /// The step's tensors, if they were listed.
    listing: Option<Listing>,
    /// Bytes that it took without a plan, including inputs: a nonzero multiple of the arena's
    /// alignment.
    bytes: usize,
    tensors: usize,
}

/// The memory and the inputs of a dry run of a step.
struct DryRunSettings<'a> {
    address: u64,
    bytes: usize,
    /// Guard bytes after each tensor in checked mode, otherwise 0.
    guard_bytes: usize,
    checks: Option<Checks>,
    key: &'a Key,
    /// The number of the recording, or 0 for a measurement.
    identity: u64,
    placement: Placement,
    pins: &'a Pins,
}

/// Runs a step while its launches are only listed.
fn dry_run<S, R>(
    device: &Device,
    settings: DryRunSettings<'_>,
    state: &mut S,
    record: Record<S, R>,
) -> Result<(DryRunRecord<R>, Vec<Launch>)> {
    let DryRunSettings { address, bytes, guard_bytes, checks, key, identity, placement, pins } = settings;
    device.record(pins, |dry_run| {
        let mut region = ArenaInner::lent(dry_run.clone(), address, bytes);
        region.place(placement);
        let mut ports = Ports::new(&region, key, identity, pins)?;
        region.keep_inputs();
        region.guard_like(guard_bytes, checks);
        let result = region.scope(|| record(&mut Step::new(&region), state, &ports.slots(&region)))?;
        let (bytes, tensors) = (region.high_water_bytes().max(ALIGN_BYTES), region.allocations() as usize);
        let (conditions, bounds) = region.conditions().take();
        ports.bind(&bounds);
        let (checks, listing) = (region.take_checks(), region.take_listing());
        Ok(DryRunRecord { result, ports, conditions, checks, listing, bytes, tensors })
    })
}

/// Returns the offsets of memory in a step's `bytes` bytes, if it begins there.
fn inside(memory: Range<u64>, address: u64, bytes: usize) -> Option<Range<usize>> {
    let start = usize::try_from(memory.start.checked_sub(address)?).ok().filter(|start| *start < bytes)?;
    Some(start..start + (memory.end - memory.start) as usize)
}

/// Returns the memory that each launch uses in a step's `bytes` bytes.
fn uses(launches: &[Launch], address: u64, bytes: usize) -> Uses {
    let used = |launch| segments::used(launch).filter_map(|memory| inside(memory, address, bytes)).collect();
    launches.iter().map(used).collect()
}

/// The memory that a step needs for inputs of some shapes.
struct CaptureNeeds {
    /// The bytes of all tensors: a nonzero multiple of the arena's alignment.
    bytes: usize,
    tensors: usize,
    /// The plan of the memory. There is none in checked mode, in which no memory is reused.
    plan: Option<Arc<MemoryPlan>>,
}

impl CaptureNeeds {
    /// The address of a measured step's memory. No device or host has this address, and nothing is
    /// launched.
    const ADDRESS: u64 = 1 << 52;

    /// Measures a step in a dry run, and plans its memory.
    fn of<S, R>(device: &Device, guard_bytes: usize, key: &Key, state: &mut S, record: Record<S, R>) -> Result<Self> {
        let (address, bytes, pins) = (Self::ADDRESS, ArenaInner::EVERYTHING, &device.pins());
        let placement = if guard_bytes == 0 { Placement::Listed(Listing::default()) } else { Placement::Scoped };
        let settings = DryRunSettings { address, bytes, guard_bytes, checks: None, key, identity: 0, placement, pins };
        let (run, launches) = dry_run(device, settings, state, record)?;
        let Some(listing) = run.listing else {
            return Ok(Self { bytes: run.bytes, tensors: run.tensors, plan: None });
        };
        let announced = run.ports.announced().into_iter().filter_map(|memory| inside(memory, address, bytes));
        announced.for_each(|memory| listing.keep(memory));
        let plan = MemoryPlan::new(listing, uses(&launches, address, bytes), run.bytes);
        Ok(Self { bytes: plan.bytes().max(ALIGN_BYTES), tensors: run.tensors, plan: Some(Arc::new(plan)) })
    }
}

impl CaptureMemory {
    /// Lists the launches of a step at its own addresses, and makes a graph of them.
    fn record<S, R>(
        &self,
        key: &Key,
        needs: &CaptureNeeds,
        state: &mut S,
        record: Record<S, R>,
    ) -> Result<RecordedStep<R>> {
        static RECORDINGS: AtomicU64 = AtomicU64::new(1);
        let identity = RECORDINGS.fetch_add(1, Ordering::Relaxed);
        let Self { device, section, address, guard_bytes, .. } = self;
        let CaptureNeeds { tensors, plan, .. } = needs;
        let checks = if *guard_bytes > 0 { Some(Checks::recorded(device, *tensors)?) } else { None };
        let pins = device.pins();
        // The driver keeps the section allocated while the graph may write it.
        pins.add([*address]);
        let life = State::Warm.after(Event::Record)?;
        let settings = DryRunSettings {
            address: *address,
            bytes: section.bytes(),
            guard_bytes: *guard_bytes,
            checks,
            key,
            identity,
            placement: plan.clone().map_or(Placement::Scoped, Placement::by),
            pins: &pins,
        };
        let captured = dry_run(device, settings, state, record).and_then(|(mut run, launches)| {
            plan.as_ref().map_or(Ok(()), |plan| plan.check(&uses(&launches, *address, section.bytes())))?;
            run.ports.add_bounce_buffers(device)?;
            Ok((Segments::capture(device, launches, &run.ports.announced(), &pins)?, run))
        });
        let (segments, DryRunRecord { result, ports, conditions, checks, .. }) = captured.inspect_err(|error| {
            debug_assert_eq!(life.after(Event::Abandon), Ok(State::Warm));
            tracing::debug!(%error, "a capture was abandoned");
        })?;
        let (bytes, kernels) = (section.bytes(), segments.kernels());
        Span::current().record("bytes", bytes).record("tensors", tensors).record("kernels", kernels);
        Ok(RecordedStep { state: life.after(Event::Seal)?, segments, ports, result, conditions, checks })
    }
}

/// A replay that is queued or finished. The next replay overwrites its results.
pub struct Replay<'c, R> {
    memory: &'c CaptureMemory,
    recording: &'c RecordedStep<R>,
}

impl<R: fmt::Debug> fmt::Debug for Replay<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Replay of {:?}", self.recording.result)
    }
}

impl<R> Replay<'_, R> {
    /// The captured function's result.
    pub fn outputs(&self) -> &R {
        &self.recording.result
    }

    /// Waits for the replay and returns the elements of an output.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the deadline. [`Error::Misuse`] for an output of another recording.
    pub fn read<T: Element>(&self, output: Output<T>) -> Result<Vec<T>> {
        let memory = self.recording.ports.find(output)?;
        memory.download(&self.memory.device, self.memory.deadline)
    }

    /// Queues a copy of a one-element output to the next word of `readback`, to be waited for after
    /// later replays are queued.
    pub fn queue_readback<S: Stored>(&self, output: Output<S>, readback: &mut PinnedReadback) -> Result<()> {
        // The output was made by a dry run, which had this device's memory.
        readback.queue(self.memory.device.identity(), self.recording.ports.find(output)?)
    }

    /// Reads an output of one element, like [`Replay::read`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when it has a different number of elements.
    pub fn read_scalar<T: Element>(&self, output: Output<T>) -> Result<T> {
        match self.read(output)?.as_slice() {
            [value] => Ok(*value),
            values => Err(Error::misuse("read_scalar", "one element", format!("{} elements", values.len()))),
        }
    }
}
