//! The inputs and outputs of a captured step: host values by number or name, device slots, and
//! handles of results.
//!
//! Invariant: a slot's name, shape and element type are those of the input at the time of
//! recording. Inputs of other shapes get another recording.

#![forbid(unsafe_code)]

use crate::arena::ArenaInner;
use crate::buffer::Buffer;
use crate::device::{Device, DeviceKind, Pins};
use crate::error::{Error, Result};
use crate::indices::{Indices, Known};
use crate::preconditions::IndexBound;
use crate::step::EagerStep;
use crate::tensor::{Brand, Element, Memory, Saved, Shape, Source, Values};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::Duration;

/// The host values of one replay, in the order of the slots.
///
/// ```
/// # use stepscope::HostInputs;
/// let (x, labels) = ([0.5f32; 6], [1u32, 0]);
/// let inputs = HostInputs::new().with(&x, [2, 3])?.with(&labels, [2])?.named("labels");
/// assert_eq!(inputs.indices("labels")?, [1, 0]);
/// # Ok::<(), stepscope::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct HostInputs<'i> {
    values: Vec<Value<'i>>,
    variant: u64,
}

/// One input.
#[derive(Clone, Copy, Debug)]
struct Value<'i> {
    form: InputSignature,
    values: Values<'i>,
}

/// The properties of one input that decide which recording it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InputSignature {
    /// The name, or empty for an input that has only a number.
    name: &'static str,
    element: &'static str,
    /// Bytes of an element.
    element_bytes: usize,
    shape: Shape,
}

impl<'i> HostInputs<'i> {
    /// Makes an empty list of inputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an input of this shape, row-major. Integers may be class labels or token ids:
    /// [`DeviceBatch::indices`] returns them as such. Ops that use them check on the host that they
    /// are valid, before each replay if the step is captured.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has a different number of elements.
    pub fn with<T: Element>(mut self, values: &'i [T], shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.checked_elements() != Some(values.len()) {
            return Err(Error::misuse("inputs", format!("a shape of {} elements", values.len()), shape.to_string()));
        }
        let form = InputSignature { name: "", element: T::NAME, element_bytes: size_of::<T>(), shape };
        self.values.push(Value { form, values: T::erase_values(values) });
        Ok(self)
    }

    /// Names the last input.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        if let Some(last) = self.values.last_mut() {
            last.form.name = name;
        }
        self
    }

    /// The integers of an input.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such input, or it has another element type.
    pub fn indices(&self, input: impl InputKey) -> Result<&'i [u32]> {
        let number = find(&input, self.values.iter().map(|value| value.form.name))?;
        match self.values[number] {
            Value { values: Values::U32(values), .. } => Ok(values),
            Value { form, .. } => Err(other_element(&input, u32::NAME, form)),
        }
    }

    /// The name of the input of this number, if it has one.
    pub fn name(&self, number: usize) -> Option<&'static str> {
        self.values.get(number).map(|value| value.form.name).filter(|name| !name.is_empty())
    }

    /// Sets a number that the step may branch on (default 0). Each variant has its own recording.
    #[must_use]
    pub fn variant(mut self, variant: u64) -> Self {
        self.variant = variant;
        self
    }

    /// Finds the first value that is not finite. Returns its input, and its index along the first
    /// extent.
    pub fn first_not_finite(&self) -> Option<(usize, usize)> {
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

/// The inputs for which a recording was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    forms: Vec<InputSignature>,
    variant: u64,
}

/// The inputs' elements and shapes, and the variant: `f32[256, 12, 193] u32[256] #0`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.forms.iter().try_for_each(|form| write!(f, "{}{} ", form.element, form.shape))?;
        write!(f, "#{}", self.variant)
    }
}

/// A result of a captured step, to be read after a replay with
/// [`Replay::read`](crate::Replay::read).
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

/// A number of an input, counted from 0, or a name: the name of a field of a derived batch, or
/// that of [`HostInputs::named`].
pub trait InputKey: sealed::Sealed {}

impl InputKey for usize {}
impl InputKey for &str {}

/// Returns the number of an input among those with these names.
fn find(key: &impl InputKey, names: impl ExactSizeIterator<Item = &'static str> + Clone) -> Result<usize> {
    key.number(names.clone()).ok_or_else(|| {
        let count = names.len();
        let named: Vec<String> = names.filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
        let or_name = if named.is_empty() { String::new() } else { format!(", or one of {}", named.join(", ")) };
        Error::misuse("input", format!("an input below {count}{or_name}"), key.shown())
    })
}

fn other_element(key: &impl InputKey, expected: &str, form: InputSignature) -> Error {
    let got = format!("{} {}", form.element, form.shape);
    Error::misuse("input", format!("{} of {expected} elements", key.shown()), got)
}

mod sealed {
    /// The lookup of an input.
    pub trait Sealed {
        fn number(&self, names: impl ExactSizeIterator<Item = &'static str>) -> Option<usize>;
        fn shown(&self) -> String;
    }

    impl Sealed for usize {
        fn number(&self, names: impl ExactSizeIterator<Item = &'static str>) -> Option<usize> {
            (*self < names.len()).then_some(*self)
        }

        fn shown(&self) -> String {
            format!("input {self}")
        }
    }

    impl Sealed for &str {
        fn number(&self, mut names: impl ExactSizeIterator<Item = &'static str>) -> Option<usize> {
            names.position(|name| name == *self && !name.is_empty())
        }

        fn shown(&self) -> String {
            format!("input `{self}`")
        }
    }
}

/// Inputs on the device, by number or name.
#[derive(Clone, Debug)]
pub struct DeviceBatch<'s> {
    inputs: Vec<(Memory<u8>, InputSignature, Known)>,
    brand: Brand<'s>,
}

impl<'s> DeviceBatch<'s> {
    /// The input of this number, counted from 0 in the order of [`HostInputs::with`], or of this
    /// name.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such input, or it has another element type.
    pub fn input<T: Element>(&self, input: impl InputKey) -> Result<Saved<'s, T>> {
        let (memory, shape, _) = self.find(&input, T::NAME)?;
        Ok(Saved::new(memory.cast(), shape))
    }

    /// The input of this number or name as class labels or token ids.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such input, or it has another element type than u32.
    pub fn indices(&self, input: impl InputKey) -> Result<Indices<'s>> {
        let (memory, shape, known) = self.find(&input, u32::NAME)?;
        Ok(Indices::new(memory.cast(), shape, known))
    }

    fn find(&self, input: &impl InputKey, element: &str) -> Result<(Memory<u8>, Shape, Known)> {
        let (memory, form, known) = self.inputs[find(input, self.inputs.iter().map(|(_, form, _)| form.name))?];
        if form.element != element {
            return Err(other_element(input, element, form));
        }
        Ok((memory, form.shape, known))
    }
}

impl<'s> EagerStep<'s> {
    /// Uploads inputs, so that a function written for capture can also run eagerly on the same
    /// values.
    #[track_caller]
    pub fn upload_inputs(&self, inputs: &HostInputs<'_>) -> Result<DeviceBatch<'s>> {
        let mut batch = DeviceBatch { inputs: Vec::new(), brand: PhantomData };
        for Value { form, values } in &inputs.values {
            let (memory, known) = match *values {
                Values::F32(values) => (self.upload(values, form.shape)?.memory().bytes(), Known::Nothing),
                Values::Bf16(values) => (self.upload(values, form.shape)?.memory().bytes(), Known::Nothing),
                Values::U32(values) => (self.upload(values, form.shape)?.memory().bytes(), Known::of(values)),
            };
            batch.inputs.push((memory, *form, known));
        }
        Ok(batch)
    }
}

/// The slots of a step that is being captured: its inputs on the device, and the list of its
/// outputs.
#[derive(Debug)]
pub struct CaptureInputs<'s> {
    ports: &'s Ports,
    region: &'s ArenaInner,
    batch: DeviceBatch<'s>,
}

impl<'s> CaptureInputs<'s> {
    /// All inputs.
    pub fn batch(&self) -> &DeviceBatch<'s> {
        &self.batch
    }

    /// The input of this number or name; see [`DeviceBatch::input`].
    pub fn input<T: Element>(&self, input: impl InputKey) -> Result<Saved<'s, T>> {
        self.batch.input(input)
    }

    /// The class labels or token ids of this number or name; see [`DeviceBatch::indices`].
    pub fn indices(&self, input: impl InputKey) -> Result<Indices<'s>> {
        self.batch.indices(input)
    }

    /// The number set by [`HostInputs::variant`].
    pub fn variant(&self) -> u64 {
        self.ports.key.variant
    }

    /// Registers a tensor as an output, to be read after each replay.
    pub fn output<T: Element>(&self, tensor: &impl Source<'s, T>) -> Output<T> {
        let Ports { outputs, pins, recording, .. } = self.ports;
        let memory = tensor.memory();
        pins.add([memory.address()]);
        self.region.keep(memory);
        let mut outputs = outputs.borrow_mut();
        outputs.push(memory.bytes());
        Output { recording: *recording, index: outputs.len() - 1, element: PhantomData }
    }

    /// Announces memory. Each replay reports when it has queued the last launch that uses this
    /// memory, and all memory announced earlier.
    pub fn announce<T: Element>(&self, memory: Memory<T>) {
        let start = memory.as_slice().address();
        self.ports.announced.borrow_mut().push(start..start + memory.bytes().len() as u64);
    }
}

/// The size in bytes from which an input is transferred to the device concurrently with its work. A
/// smaller one is copied faster than two streams synchronize.
const LEAST_TRANSIT_BYTES: usize = 64 << 10;

/// The slot of an input, and a second buffer in which the input waits while the previous replay
/// still reads the slot.
#[derive(Debug)]
struct Port {
    memory: Memory<u8>,
    bounce: Option<Buffer<u32>>,
    /// The bounds of its indices.
    bounds: Vec<IndexBound>,
}

/// The inputs and outputs of a recording.
#[derive(Debug)]
pub(super) struct Ports {
    recording: u64,
    key: Key,
    inputs: Vec<Port>,
    outputs: RefCell<Vec<Memory<u8>>>,
    /// Addresses whose last use each replay reports.
    announced: RefCell<Vec<Range<u64>>>,
    pins: Pins,
}

impl Ports {
    /// Makes slots at the region's start, which no scope frees.
    pub(super) fn new(region: &ArenaInner, key: &Key, recording: u64, pins: &Pins) -> Result<Self> {
        let port = |form: &InputSignature| {
            // An input of this size existed when the key was made, so the product does not
            // overflow.
            let memory = region.slot(form.shape.elements() * form.element_bytes)?;
            Ok(Port { memory, bounce: None, bounds: Vec::new() })
        };
        let inputs = key.forms.iter().map(port).collect::<Result<_>>()?;
        let (outputs, announced) = (RefCell::default(), RefCell::default());
        Ok(Self { recording, key: key.clone(), inputs, outputs, announced, pins: pins.clone() })
    }

    /// The announced memory, in order.
    pub(super) fn announced(&self) -> Vec<Range<u64>> {
        self.announced.borrow().clone()
    }

    /// Keeps the bounds of the recorded ops, each with the number of its input.
    pub(super) fn bind(&mut self, bounds: &[(usize, IndexBound)]) {
        for &(input, bound) in bounds {
            self.inputs[input].bounds.push(bound);
        }
    }

    /// Checks the indices among the inputs.
    pub(super) fn check(&self, inputs: &HostInputs<'_>) -> Result<()> {
        self.inputs.iter().zip(&inputs.values).try_for_each(|(port, value)| match value.values {
            Values::U32(values) => port.bounds.iter().try_for_each(|bound| bound.check(values)),
            Values::F32(_) | Values::Bf16(_) => Ok(()),
        })
    }

    /// Allocates device memory in which large inputs wait. A GPU that shares the host's memory
    /// would only copy once more within it, and the emulator does one thing at a time, so both skip
    /// this.
    pub(super) fn add_bounce_buffers(&mut self, device: &Device) -> Result<()> {
        let description = device.description();
        if description.kind != DeviceKind::Cuda || description.integrated {
            return Ok(());
        }
        let large = |port: &&mut Port| port.memory.len() >= LEAST_TRANSIT_BYTES;
        self.inputs.iter_mut().filter(large).try_for_each(|port| {
            port.bounce = Some(Buffer::allocate(device, port.memory.words().len())?);
            Ok(())
        })
    }

    /// The view of the slots that the recorded function, whose step has this region, receives.
    pub(super) fn slots<'r>(&'r self, region: &'r ArenaInner) -> CaptureInputs<'r> {
        let ports = self.inputs.iter().zip(&self.key.forms).enumerate();
        let inputs = ports.map(|(number, (port, form))| (port.memory, *form, Known::Input(number))).collect();
        CaptureInputs { ports: self, region, batch: DeviceBatch { inputs, brand: PhantomData } }
    }

    /// The inputs for which the recording was made.
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// True if the recording serves these inputs.
    pub(super) fn fit(&self, inputs: &HostInputs<'_>) -> bool {
        inputs.variant == self.key.variant && inputs.values.iter().map(|value| &value.form).eq(&self.key.forms)
    }

    /// Queues copies of the inputs to their slots.
    pub(super) fn fill(&self, device: &Device, inputs: &HostInputs<'_>, deadline: Duration) -> Result<()> {
        self.inputs.iter().zip(&inputs.values).try_for_each(|(port, value)| {
            let bounce = port.bounce.as_ref().map(|bounce| bounce.memory().bytes());
            port.memory.copy_bytes(bounce, device, value.values.bytes(), deadline)
        })
    }

    /// The memory of an output.
    pub(super) fn find<T: Element>(&self, output: Output<T>) -> Result<Memory<T>> {
        match self.outputs.borrow().get(output.index) {
            Some(memory) if output.recording == self.recording => Ok(memory.cast()),
            _ => Err(Error::misuse("replay.read", "an output of this replay", "an output of another recording")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn first_non_finite_value_is_found() {
        let (sound, labels) = ([1.0f32; 6], [u32::MAX; 3]);
        let halves = |at: usize, value: f32| {
            let mut halves = [bf16::ONE; 15];
            halves[at] = bf16::from_f32(value);
            halves
        };
        for (at, value) in [(0, f32::NAN), (4, f32::INFINITY), (14, f32::NEG_INFINITY)] {
            let halves = halves(at, value);
            let inputs = HostInputs::new().with(&sound, [3, 2]).unwrap().with(&labels, [3]).unwrap();
            let inputs = inputs.with(&halves, [3, 5]).unwrap();
            assert_eq!(inputs.first_not_finite(), Some((2, at / 5)), "{at}");
        }
        let halves = halves(3, 2.0);
        assert_eq!(HostInputs::new().with(&halves, [3, 5]).unwrap().first_not_finite(), None);
        let key = HostInputs::new().with(&halves, [3, 5]).unwrap().with(&labels, [3]).unwrap().key();
        assert_eq!(key.to_string(), "bf16[3, 5] u32[3] #0");
    }

    #[test]
    fn inputs_have_numbers_and_names() {
        let (x, labels) = ([1.0f32; 6], [4u32, 5, 6]);
        let inputs = HostInputs::new().with(&x, [3, 2]).unwrap().with(&labels, [3]).unwrap().named("labels");
        assert_eq!((inputs.indices(1), inputs.indices("labels")), (Ok(&labels[..]), Ok(&labels[..])));
        assert_eq!((inputs.name(0), inputs.name(1), inputs.name(2)), (None, Some("labels"), None));
        let refused = |found: Result<&[u32]>| found.unwrap_err().to_string();
        assert!(refused(inputs.indices(0)).ends_with("input 0 of u32 elements, got f32 [3, 2]"));
        assert!(refused(inputs.indices(2)).ends_with("an input below 2, or one of `labels`, got input 2"));
        assert!(refused(inputs.indices("label")).ends_with("an input below 2, or one of `labels`, got input `label`"));
        assert!(refused(inputs.indices("")).ends_with("got input ``"));
        assert!(refused(HostInputs::new().indices(0)).ends_with("an input below 0, got input 0"));
        let unnamed = HostInputs::new().with(&x, [3, 2]).unwrap().with(&labels, [3]).unwrap();
        assert_ne!(inputs.key(), unnamed.key(), "a recording's inputs keep their names");
    }
}
