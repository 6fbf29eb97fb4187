//! Captured steps: a step recorded once, replayed as one graph, or as several where others must hear of its progress.
//!
//! The closure of [`Arena::capture`] is a plain function: it gets a bare [`Step`], which can neither upload nor read nor
//! overflow, and a state, through which everything else that it uses must come. It is run twice and never on the device: once
//! to see what it needs, once to list its launches at addresses that are the capture's alone. Only then does the driver
//! capture them, in one short job. So a capture cannot reach an allocation, an upload or a wait; there is nothing in it
//! that could hang. Invariants: the part of the arena that a graph writes is no step's while the graph lives; memory that
//! a graph names is not freed under it, even if its owner is dropped.

#![forbid(unsafe_code)]

mod recordings;
mod segments;
mod slots;
mod state;

pub use slots::{Batch, Inputs, Output, Slots};

use crate::driver::{Device, Landing, Launch, Pins};
use crate::error::{Error, Result};
use crate::memory::{ALIGN_BYTES, Arena, Checks, Floor, Region, Section, Turns};
use crate::step::Step;
use crate::tensor::{Element, Stored};
use cuda_std::float_mode;
use recordings::{RecordedStep, Recordings};
use segments::Segments;
use serde::Serialize;
use slots::{Key, Ports};
use state::{Event, State};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::Span;
use tracing::field::Empty;

/// What a captured step does: its own launches on `Step`, with all else from the state `S`; its result `R` holds
/// [`Output`]s. A function or a closure that captures nothing.
pub type Record<S, R> = for<'s> fn(&mut Step<'s>, &mut S, &Slots<'s>) -> Result<R>;

/// A step that is replayed as one graph, with the state that it works on. One recording for each shape of the inputs.
pub struct Captured<S, R> {
    // Graphs end before the section that they write goes back to the arena, and before the state does.
    recordings: Recordings<R>,
    place: Place,
    record: Record<S, R>,
    state: S,
    replays: u64,
}

impl<S, R> fmt::Debug for Captured<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Captured").field("report", &self.report()).finish_non_exhaustive()
    }
}

/// Where a captured step may write.
struct Place {
    device: Device,
    section: Arc<Section>,
    address: u64,
    /// Bytes behind each tensor in checked mode, else none.
    guard_bytes: usize,
    deadline: Duration,
    floor: Floor,
}

/// What a captured step has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CaptureReport {
    /// Launches of the recording that was used last.
    pub nodes: usize,
    /// Recordings made, one for each new shape of the inputs.
    pub recordings: u64,
    /// Recordings that are kept at most.
    pub kept: usize,
    /// Recordings that were evicted, since more shapes came than are kept or memory for another one
    /// was short.
    pub evictions: u64,
    /// Seconds that making them took.
    pub record_seconds: f64,
    /// Replays.
    pub replays: u64,
    /// Bytes of the arena that no other step uses meanwhile.
    pub bytes_owned: usize,
}

impl Arena {
    /// Captures a step for inputs of these shapes. Nothing runs until [`Captured::replay`]; the values are not looked at.
    ///
    /// `record` is called twice or more for each recording, must do the same each time, and may not touch the device but through its step: an upload, a
    /// read or an allocation in it is [`Error::Misuse`]. The part of the arena that the step needs belongs to the capture
    /// until it is dropped. Pass `&mut state` to keep the state if this fails.
    ///
    /// ```
    /// # use stepscope::*;
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// # let mut layout = Layout::builder();
    /// # let w = layout.add("w", [4, 3], Initializer::fan_in(4));
    /// # let mut weights = Parameters::new(&device, &layout.build()?, 7)?;
    /// # let mut gradients = Gradients::zeros(&weights)?;
    /// # let mut adamw = AdamW::new(&weights, AdamWConfig::default())?;
    /// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// # let (x, labels) = ([0.5f32; 8], [0u32, 2]);
    /// let inputs = Inputs::new().with(&x, [2, 4])?.with(&labels, [2])?;
    /// let state = (w, &mut weights, &mut gradients, &mut adamw);
    /// let mut captured = arena.capture(state, &inputs, |step, (w, weights, gradients, adamw), slots| {
    ///     gradients.zero(step)?;
    ///     let tape = Tape::new(step, weights);
    ///     let logits = tape.linear(&tape.input(slots.input::<f32>(0)?), *w, None)?;
    ///     let loss = tape.cross_entropy(&logits, slots.input(1)?, 0.5)?;
    ///     tape.backward(&loss, gradients)?;
    ///     adamw.apply(step, weights, gradients)?;
    ///     Ok(slots.output(loss.value()))
    /// })?;
    /// for _ in 0..10 {
    ///     captured.state_mut().3.advance()?; // the learning rate and the corrections of this update, to their device slot
    ///     let replay = captured.replay(&inputs)?; // the batch, to its slots; then the graph
    ///     let loss = replay.read_scalar(*replay.outputs())?; // waits, with a deadline
    ///     assert!(loss.is_finite());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::CaptureNeeds`] when the arena has less, before the driver is called;
    /// [`Error::Misuse`] for a launch that names a tensor of a step that runs meanwhile, which the
    /// state has brought; those of `record`; [`Error::Driver`] when the driver refuses. The arena
    /// and the device are as before then.
    pub fn capture<S, R>(&mut self, mut state: S, inputs: &Inputs<'_>, record: Record<S, R>) -> Result<Captured<S, R>> {
        let start = Instant::now();
        let device = self.device().clone();
        let (key, guard_bytes) = (inputs.key(), self.guard_bytes());
        let _span = span(&key).entered();
        let (bytes, tensors) = Place::needs(&device, guard_bytes, &key, &mut state, record)?;
        let available = self.available_bytes();
        let Some((section, address)) = self.reserve(bytes) else {
            return Err(Error::CaptureNeeds { bytes, available, overflow_bytes: self.overflow_bytes() });
        };
        let place = Place { section, address, guard_bytes, deadline: self.deadline(), device, floor: self.floor() };
        let first = place.record(&key, tensors, &mut state, record)?;
        let recordings = Recordings::new(first, start.elapsed());
        Ok(Captured { recordings, place, record, state, replays: 0 })
    }
}

impl<S, R> Captured<S, R> {
    /// Sets the number of recordings to keep, at least one (default 32). Each is for one
    /// combination of the inputs' shapes and the variant. When there are more, or the memory for
    /// another one is refused, the one that was unused for longest is evicted; its shapes are
    /// recorded anew when they come again. A warning is logged once when that happens repeatedly.
    #[must_use]
    pub fn keep(mut self, recordings: usize) -> Self {
        self.recordings.keep(recordings);
        self
    }

    /// [`Captured::keep`], in place.
    pub(crate) fn set_kept(&mut self, recordings: usize) {
        self.recordings.keep(recordings);
    }

    /// The state that the step works on. What the host reads of it is read behind all replays so far.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The state, to be changed between replays. The graph keeps the addresses that it was recorded with: write to a buffer, do
    /// not put another in its place. A buffer that is taken out is still written by each replay, as a whole and under no step that was
    /// lent it.
    pub fn state_mut(&mut self) -> &mut S {
        &mut self.state
    }

    /// Ends the capture and gives the state back.
    pub fn into_state(self) -> S {
        self.state
    }

    /// What was captured, and how often it ran.
    pub fn report(&self) -> CaptureReport {
        let (kept, recordings, evictions, time) = self.recordings.report();
        CaptureReport {
            nodes: self.recordings.last().segments.kernels(),
            recordings,
            kept,
            evictions,
            record_seconds: float_mode::in_default(|| time.as_secs_f64()),
            replays: self.replays,
            bytes_owned: self.place.section.bytes(),
        }
    }

    /// Writes the inputs to their slots and queues the graph, in the stream's order. Waits for nothing but room to stage the
    /// inputs, and the end of another thread's step that was lent what the graph writes. Inputs of shapes that are new are recorded
    /// first.
    ///
    /// # Errors
    /// [`Error::CaptureNeeds`] when new shapes need more than the capture owns; [`Error::Misuse`] when the step makes an update that is
    /// not set up, and inside a step that was lent what the graph writes; [`Error::Label`] for a label that is no class; in checked
    /// mode [`Error::Overrun`]; those of recording and of the driver.
    pub fn replay(&mut self, inputs: &Inputs<'_>) -> Result<Replay<'_, R>> {
        self.choose(inputs)?;
        self.run(Some(inputs), &mut |_, _| Ok(()))
    }

    /// [`Captured::replay`], which calls `between` with the state when a segment is queued and the one behind it is not, and behind the last:
    /// it hears how many of what [`Slots::announce`] was given no later segment uses.
    pub(crate) fn replay_telling(
        &mut self,
        inputs: &Inputs<'_>,
        between: &mut dyn FnMut(&mut S, usize) -> Result<()>,
    ) -> Result<Replay<'_, R>> {
        self.choose(inputs)?;
        self.run(Some(inputs), between)
    }

    /// Queues the graph that was used last, on the inputs that its slots still hold.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the step makes an update that is not set up; those of the driver; in checked mode [`Error::Overrun`].
    pub fn repeat(&mut self) -> Result<Replay<'_, R>> {
        self.run(None, &mut |_, _| Ok(()))
    }

    /// Has the recording for these inputs stand last.
    fn choose(&mut self, inputs: &Inputs<'_>) -> Result<()> {
        if self.recordings.find(inputs) { Ok(()) } else { self.add(inputs) }
    }

    /// Replays the recording that stands last.
    fn run(
        &mut self,
        inputs: Option<&Inputs<'_>>,
        between: &mut dyn FnMut(&mut S, usize) -> Result<()>,
    ) -> Result<Replay<'_, R>> {
        let device = &self.place.device;
        let recording = self.recordings.last_mut();
        let (key, kernels) = (recording.ports.key(), recording.segments.kernels());
        let _span = tracing::debug_span!("replay", %key, kernels, number = self.replays).entered();
        self.place.floor.begin_step()?;
        let state = &mut self.state;
        let outcome = recording.replay(device, inputs, self.place.deadline, &mut |complete| between(state, complete));
        if device.lost().is_some() {
            recording.state = recording.state.after(Event::Lose)?;
        }
        outcome?;
        self.replays += 1;
        Ok(Replay { place: &self.place, recording })
    }

    /// Records the step for new shapes.
    fn add(&mut self, inputs: &Inputs<'_>) -> Result<()> {
        let start = Instant::now();
        let Place { device, section, guard_bytes, .. } = &self.place;
        let key = inputs.key();
        let _span = span(&key).entered();
        let (bytes, tensors) = Place::needs(device, *guard_bytes, &key, &mut self.state, self.record)?;
        let available = section.bytes();
        if bytes > available {
            return Err(Error::CaptureNeeds { bytes, available, overflow_bytes: 0 });
        }
        let recording = loop {
            match self.place.record(&key, tensors, &mut self.state, self.record) {
                // There is memory for fewer recordings than are to be kept.
                Err(Error::Refused(_) | Error::DeviceMemory { .. }) if self.recordings.evict() => {}
                recorded => break recorded?,
            }
        };
        self.recordings.add(recording, start.elapsed());
        Ok(())
    }
}

/// What making a recording is traced as; the rest of its fields come with the graph.
fn span(key: &Key) -> Span {
    tracing::debug_span!("capture", %key, bytes = Empty, tensors = Empty, kernels = Empty)
}

/// A run of a step that launched nothing.
struct Rehearsed<R> {
    result: R,
    ports: Ports,
    turns: Vec<Arc<Turns>>,
    checks: Option<Checks>,
    /// What it took, inputs included: above zero, a multiple of the arena's alignment.
    bytes: usize,
    tensors: usize,
}

/// Runs a step where its launches are listed: in `bytes` at `address`, with guards behind its tensors if it is checked.
fn rehearse<S, R>(
    device: &Device,
    (address, bytes): (u64, usize),
    (guard_bytes, checks): (usize, Option<Checks>),
    (key, identity, pins): (&Key, u64, &Pins),
    state: &mut S,
    record: Record<S, R>,
) -> Result<(Rehearsed<R>, Vec<Launch>)> {
    device.record(pins, |rehearsal| {
        let mut region = Region::lent(rehearsal.clone(), address, bytes);
        let mut ports = Ports::new(&region, key, identity, pins)?;
        region.guard_like(guard_bytes, checks);
        let result = region.scope(|| record(&mut Step::new(&region), state, &ports.slots(&region)))?;
        let (bytes, tensors) = (region.high_water_bytes().max(ALIGN_BYTES), region.allocations() as usize);
        let (turns, labels) = region.conditions().take();
        ports.bind(&labels);
        Ok(Rehearsed { result, ports, turns, checks: region.take_checks(), bytes, tensors })
    })
}

impl Place {
    /// Bytes and tensors of a step that is run to be counted.
    fn needs<S, R>(
        device: &Device,
        guard_bytes: usize,
        key: &Key,
        state: &mut S,
        record: Record<S, R>,
    ) -> Result<(usize, usize)> {
        // Addresses that are no memory: nothing is launched.
        let everywhere = (1 << 40, Region::EVERYTHING);
        let (run, _) = rehearse(device, everywhere, (guard_bytes, None), (key, 0, &device.pins()), state, record)?;
        Ok((run.bytes, run.tensors))
    }

    /// Lists the launches of a step at its own addresses, and makes a graph of them.
    fn record<S, R>(&self, key: &Key, tensors: usize, state: &mut S, record: Record<S, R>) -> Result<RecordedStep<R>> {
        static RECORDINGS: AtomicU64 = AtomicU64::new(1);
        let identity = RECORDINGS.fetch_add(1, Ordering::Relaxed);
        let Self { device, section, address, guard_bytes, .. } = self;
        let checks = if *guard_bytes > 0 { Some(Checks::recorded(device, tensors)?) } else { None };
        let pins = device.pins();
        // The section goes back to no driver while the graph may write it.
        pins.add([*address]);
        let life = State::Warm.after(Event::Record)?;
        let (place, guards, names) = ((*address, section.bytes()), (*guard_bytes, checks), (key, identity, &pins));
        let captured = rehearse(device, place, guards, names, state, record).and_then(|(mut run, launches)| {
            run.ports.add_transits(device)?;
            Ok((Segments::capture(device, launches, &run.ports.announced(), &pins)?, run))
        });
        let (segments, Rehearsed { result, ports, turns, checks, .. }) = captured.inspect_err(|error| {
            debug_assert_eq!(life.after(Event::Abandon), Ok(State::Warm));
            tracing::debug!(%error, "a capture was abandoned");
        })?;
        let (bytes, kernels) = (section.bytes(), segments.kernels());
        Span::current().record("bytes", bytes).record("tensors", tensors).record("kernels", kernels);
        Ok(RecordedStep { state: life.after(Event::Seal)?, segments, ports, result, turns, checks })
    }
}

/// A replay that is queued or done. The next one overwrites its results.
pub struct Replay<'c, R> {
    place: &'c Place,
    recording: &'c RecordedStep<R>,
}

impl<R: fmt::Debug> fmt::Debug for Replay<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Replay of {:?}", self.recording.result)
    }
}

impl<R> Replay<'_, R> {
    /// What the captured function returned.
    pub fn outputs(&self) -> &R {
        &self.recording.result
    }

    /// Waits for the replay, and returns a result's elements.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the deadline; [`Error::Misuse`] for an output of another recording.
    pub fn read<T: Element>(&self, output: Output<T>) -> Result<Vec<T>> {
        let memory = self.recording.ports.find(output)?;
        memory.download(&self.place.device, self.place.deadline)
    }

    /// Queues a copy of a result of one element to the next word of `landing`, to be waited for when other replays have followed.
    pub(crate) fn land<S: Stored>(&self, output: Output<S>, landing: &mut Landing) -> Result<()> {
        self.recording.ports.find(output)?.land(landing)
    }

    /// [`Replay::read`] of a result with one element.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it has another number of elements; as for [`Replay::read`].
    pub fn read_scalar<T: Element>(&self, output: Output<T>) -> Result<T> {
        match self.read(output)?.as_slice() {
            [value] => Ok(*value),
            values => Err(Error::misuse("read_scalar", "one element", format!("{} elements", values.len()))),
        }
    }
}
