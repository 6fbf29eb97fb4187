//! What goes into a captured step and what comes out: host values by place, device slots, and handles of results.
//!
//! Invariant: a slot's shape and element type are those of the input that was there when the step was recorded; an input of
//! other shapes is another recording.

#![forbid(unsafe_code)]

use crate::driver::{Device, DeviceKind, Pins};
use crate::error::{Error, Result};
use crate::memory::{Buffer, Labels, Region};
use crate::step::Eager;
use crate::tensor::{Brand, Element, Memory, Saved, Shape, Source, Values};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::Duration;

/// The host values of one replay, in the order of the slots.
///
/// ```
/// # use stepscope::Inputs;
/// let (x, labels) = ([0.5f32; 6], [1u32, 0]);
/// let inputs = Inputs::new().with(&x, [2, 3])?.with(&labels, [2])?;
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Inputs<'i> {
    values: Vec<Value<'i>>,
    variant: u64,
}

/// One input.
#[derive(Clone, Copy, Debug)]
struct Value<'i> {
    form: Form,
    values: Values<'i>,
}

/// What decides how a step is recorded, of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    element: &'static str,
    /// Bytes of an element.
    element_bytes: usize,
    shape: Shape,
}

impl<'i> Inputs<'i> {
    /// No inputs so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more input, `shape` of it, row-major.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has another number of elements.
    pub fn with<T: Element>(mut self, values: &'i [T], shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.checked_elements() != Some(values.len()) {
            return Err(Error::misuse("inputs", format!("a shape of {} elements", values.len()), shape.to_string()));
        }
        let form = Form { element: T::NAME, element_bytes: size_of::<T>(), shape };
        self.values.push(Value { form, values: T::erase_values(values) });
        Ok(self)
    }

    /// A number that the step may branch on (default 0): each variant is recorded on its own.
    #[must_use]
    pub fn variant(mut self, variant: u64) -> Self {
        self.variant = variant;
        self
    }

    /// The first number that is not finite: its input, and the place of what it belongs to along the first extent.
    pub(crate) fn first_not_finite(&self) -> Option<(usize, usize)> {
        self.values.iter().enumerate().find_map(|(input, Value { form, values })| {
            let first = values.first_not_finite()?;
            let rows = form.shape.extents().first().copied().unwrap_or(1);
            Some((input, first / (form.shape.elements() / rows.max(1)).max(1)))
        })
    }

    pub(super) fn key(&self) -> Key {
        Key { forms: self.values.iter().map(|value| value.form).collect(), variant: self.variant }
    }
}

/// What a recording was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    forms: Vec<Form>,
    variant: u64,
}

/// The inputs' elements and shapes, and the variant: `f32[256, 12, 193] u32[256] #0`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.forms.iter().try_for_each(|form| write!(f, "{}{} ", form.element, form.shape))?;
        write!(f, "#{}", self.variant)
    }
}

/// A result of a captured step, to be read after a replay with [`Replay::read`](crate::Replay::read).
pub struct Output<T: Element = f32> {
    recording: u64,
    index: usize,
    element: PhantomData<T>,
}

impl<T: Element> Clone for Output<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for Output<T> {}

impl<T: Element> fmt::Debug for Output<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output<{}> {}", T::NAME, self.index)
    }
}

/// Inputs on the device, by their place.
#[derive(Clone, Debug)]
pub struct Batch<'s> {
    inputs: Vec<(Memory<u8>, Form)>,
    brand: Brand<'s>,
}

impl<'s> Batch<'s> {
    /// The input of this number, counted from 0: what [`Inputs::with`] gave.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is none, or it has other elements.
    pub fn input<T: Element>(&self, number: usize) -> Result<Saved<'s, T>> {
        let Some((memory, form)) = self.inputs.get(number) else {
            let expected = format!("one of {} inputs", self.inputs.len());
            return Err(Error::misuse("input", expected, format!("input {number}")));
        };
        if form.element != T::NAME {
            let got = format!("{} {}", form.element, form.shape);
            return Err(Error::misuse("input", format!("input {number} of {} elements", T::NAME), got));
        }
        Ok(Saved::new(memory.cast(), form.shape))
    }
}

impl<'s> Eager<'s> {
    /// Uploads inputs, so that a function that is captured can be run at once on the same values.
    ///
    /// # Errors
    /// As for [`Eager::upload`].
    #[track_caller]
    pub fn upload_inputs(&self, inputs: &Inputs<'_>) -> Result<Batch<'s>> {
        let mut batch = Batch { inputs: Vec::new(), brand: PhantomData };
        for Value { form, values } in &inputs.values {
            let memory = match *values {
                Values::F32(values) => self.upload(values, form.shape)?.memory().bytes(),
                Values::Bf16(values) => self.upload(values, form.shape)?.memory().bytes(),
                Values::U32(values) => self.upload(values, form.shape)?.memory().bytes(),
            };
            batch.inputs.push((memory, *form));
        }
        Ok(batch)
    }
}

/// The slots of a step that is being captured: its inputs on the device, and where its results are noted.
#[derive(Debug)]
pub struct Slots<'s> {
    ports: &'s Ports,
    region: &'s Region,
    batch: Batch<'s>,
}

impl<'s> Slots<'s> {
    /// All inputs.
    pub fn batch(&self) -> &Batch<'s> {
        &self.batch
    }

    /// [`Batch::input`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is none, or it has other elements.
    pub fn input<T: Element>(&self, number: usize) -> Result<Saved<'s, T>> {
        self.batch.input(number)
    }

    /// The number that [`Inputs::variant`] gave.
    pub fn variant(&self) -> u64 {
        self.ports.key.variant
    }

    /// Notes a result, to be read after each replay.
    pub fn output<T: Element>(&self, tensor: &impl Source<'s, T>) -> Output<T> {
        let Ports { outputs, pins, recording, .. } = self.ports;
        let memory = tensor.memory();
        pins.add([memory.address()]);
        self.region.keep(memory);
        let mut outputs = outputs.borrow_mut();
        outputs.push(memory.bytes());
        Output { recording: *recording, index: outputs.len() - 1, element: PhantomData }
    }

    /// Each replay is to tell when no launch that is still to be queued writes or reads this
    /// memory, nor any that was announced before it.
    pub(crate) fn announce<T: Element>(&self, memory: Memory<T>) {
        let start = memory.as_slice().address();
        self.ports.announced.borrow_mut().push(start..start + memory.bytes().len() as u64);
    }
}

/// Inputs of so many bytes come to the device while it works. A smaller one is copied before two streams have met.
const LEAST_TRANSIT_BYTES: usize = 64 << 10;

/// The place of an input, and another where it waits while the replay before still reads that one.
#[derive(Debug)]
struct Port {
    memory: Memory<u8>,
    transit: Option<Buffer<u32>>,
    /// What its values must be, if they are labels.
    labels: Vec<Labels>,
}

/// Where the values of a recording go in and out.
#[derive(Debug)]
pub(super) struct Ports {
    recording: u64,
    key: Key,
    inputs: Vec<Port>,
    outputs: RefCell<Vec<Memory<u8>>>,
    /// Addresses whose last use each replay tells of.
    announced: RefCell<Vec<Range<u64>>>,
    pins: Pins,
}

impl Ports {
    /// Slots at the region's start, which no scope gives back.
    pub(super) fn new(region: &Region, key: &Key, recording: u64, pins: &Pins) -> Result<Self> {
        let port = |form: &Form| {
            // Values of so many bytes were there when the key was made.
            let memory = region.slot(form.shape.elements() * form.element_bytes)?;
            Ok(Port { memory, transit: None, labels: Vec::new() })
        };
        let inputs = key.forms.iter().map(port).collect::<Result<_>>()?;
        let (outputs, announced) = (RefCell::default(), RefCell::default());
        Ok(Self { recording, key: key.clone(), inputs, outputs, announced, pins: pins.clone() })
    }

    /// What was announced, in order.
    pub(super) fn announced(&self) -> Vec<Range<u64>> {
        self.announced.borrow().clone()
    }

    /// Marks the inputs that the recorded ops took for labels.
    pub(super) fn bind(&mut self, asked: &[Labels]) {
        for port in &mut self.inputs {
            let address = port.memory.as_slice().address();
            port.labels = asked.iter().copied().filter(|labels| labels.address == address).collect();
        }
    }

    /// Looks at the labels among the inputs.
    pub(super) fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        self.inputs.iter().zip(&inputs.values).try_for_each(|(port, value)| match value.values {
            Values::U32(values) => port.labels.iter().try_for_each(|labels| labels.check(values)),
            Values::F32(_) | Values::Bf16(_) => Ok(()),
        })
    }

    /// Takes memory of the device for large inputs to wait in. A GPU that shares the host's memory would only copy within it once
    /// more, and the emulator does one thing at a time.
    pub(super) fn add_transits(&mut self, device: &Device) -> Result<()> {
        let description = device.description();
        if description.kind != DeviceKind::Cuda || description.integrated {
            return Ok(());
        }
        let large = |port: &&mut Port| port.memory.len() >= LEAST_TRANSIT_BYTES;
        self.inputs.iter_mut().filter(large).try_for_each(|port| {
            port.transit = Some(Buffer::allocate(device, port.memory.words().len())?);
            Ok(())
        })
    }

    /// What the recorded function, whose step has this region, sees of them.
    pub(super) fn slots<'r>(&'r self, region: &'r Region) -> Slots<'r> {
        let inputs = self.inputs.iter().map(|port| port.memory).zip(self.key.forms.iter().copied()).collect();
        Slots { ports: self, region, batch: Batch { inputs, brand: PhantomData } }
    }

    /// What the recording was made for.
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// Whether the recording serves these inputs.
    pub(super) fn fit(&self, inputs: &Inputs<'_>) -> bool {
        inputs.variant == self.key.variant && inputs.values.iter().map(|value| &value.form).eq(&self.key.forms)
    }

    /// Queues copies of the inputs to their slots.
    pub(super) fn fill(&self, device: &Device, inputs: &Inputs<'_>, deadline: Duration) -> Result<()> {
        self.inputs.iter().zip(&inputs.values).try_for_each(|(port, value)| {
            let transit = port.transit.as_ref().map(|transit| transit.memory().bytes());
            port.memory.copy_bytes(transit, device, value.values.bytes(), deadline)
        })
    }

    /// Where a result is.
    pub(super) fn find<T: Element>(&self, output: Output<T>) -> Result<Memory<T>> {
        match self.outputs.borrow().get(output.index) {
            Some(memory) if output.recording == self.recording => Ok(memory.cast()),
            _ => Err(Error::misuse("replay.read", "an output of this replay", "one of another recording")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn the_first_number_that_is_not_finite_is_found_in_any_type() {
        let (sound, labels) = ([1.0f32; 6], [u32::MAX; 3]);
        let halves = |at: usize, value: f32| {
            let mut halves = [bf16::ONE; 15];
            halves[at] = bf16::from_f32(value);
            halves
        };
        for (at, value) in [(0, f32::NAN), (4, f32::INFINITY), (14, f32::NEG_INFINITY)] {
            let halves = halves(at, value);
            let inputs = Inputs::new().with(&sound, [3, 2]).unwrap().with(&labels, [3]).unwrap();
            let inputs = inputs.with(&halves, [3, 5]).unwrap();
            assert_eq!(inputs.first_not_finite(), Some((2, at / 5)), "{at}");
        }
        let halves = halves(3, 2.0);
        assert_eq!(Inputs::new().with(&halves, [3, 5]).unwrap().first_not_finite(), None);
        let key = Inputs::new().with(&halves, [3, 5]).unwrap().with(&labels, [3]).unwrap().key();
        assert_eq!(key.to_string(), "bf16[3, 5] u32[3] #0");
    }
}
