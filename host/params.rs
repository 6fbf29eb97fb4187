//! Weights and gradients: what outlives steps, one flat region each.
//!
//! Invariant: a layout gives every parameter a name, a shape and a 256-byte aligned place, the same in weights,
//! gradients and moments; the space between parameters stays zero. A handle knows its layout, and no other takes it.

#![forbid(unsafe_code)]

use crate::driver::Device;
use crate::error::{Error, Result, short};
use crate::finite::Quantity;
use crate::initializer::Initializer;
use crate::launch::{Lent, LentMut, Memory};
use crate::memory::{ALIGN_BYTES, Buffer};
use crate::random::SplitMix64;
use crate::step::Step;
use crate::tensor::Shape;
use crate::tensors::NOTES;
use crate::upload::{Content, Transfer};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A parameter's handle within its [`Layout`] and that layout's clones. Anywhere else it is [`Error::Misuse`], also where a layout
/// was built alike: build the layout once, and clone it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    layout: u64,
    index: usize,
}

/// Parameters of one shape at a constant distance from each other: one batched multiply serves them all. A handle as
/// [`Parameter`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    members: Vec<Parameter>,
}

impl Stack {
    /// The parameters in order.
    pub fn members(&self) -> &[Parameter] {
        &self.members
    }
}

/// A parameter's name, shape and place.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    name: String,
    shape: Shape,
    start: usize,
    initializer: Initializer,
}

impl Entry {
    /// The name, unique in the layout.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The first element's place in a flat region of this layout.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The elements' places in a flat region of this layout.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.elements()
    }

    /// The same in bytes.
    fn bytes(&self) -> Range<usize> {
        let Range { start, end } = self.range();
        start * size_of::<f32>()..end * size_of::<f32>()
    }
}

/// Collects a model's parameters; see [`Layout::builder`].
#[derive(Debug)]
pub struct LayoutBuilder {
    identity: u64,
    entries: Vec<Entry>,
    elements: usize,
    /// The first parameter with which the layout has more bytes than memory can have.
    beyond: Option<usize>,
}

impl Default for LayoutBuilder {
    fn default() -> Self {
        // Tells handles of one layout from another's.
        static LAYOUTS: AtomicU64 = AtomicU64::new(0);
        Self { identity: LAYOUTS.fetch_add(1, Ordering::Relaxed), entries: Vec::new(), elements: 0, beyond: None }
    }
}

impl LayoutBuilder {
    /// A parameter of a name and a shape. What is wrong with either is an error of [`LayoutBuilder::build`].
    pub fn add(&mut self, name: impl Into<String>, shape: impl Into<Shape>, initializer: Initializer) -> Parameter {
        let shape = shape.into();
        let end = shape.checked_elements().and_then(|elements| self.elements.checked_add(elements));
        let end = end.and_then(|end| end.checked_next_multiple_of(ALIGN_BYTES / size_of::<f32>()));
        let start = match end.filter(|&end| end <= isize::MAX as usize / size_of::<f32>()) {
            Some(end) => std::mem::replace(&mut self.elements, end),
            None => {
                self.beyond.get_or_insert(self.entries.len());
                self.elements
            }
        };
        self.entries.push(Entry { name: name.into(), shape, start, initializer });
        Parameter { layout: self.identity, index: self.entries.len() - 1 }
    }

    /// `count` parameters of one shape, named by their number.
    pub fn add_stack(
        &mut self,
        count: usize,
        name: impl Fn(usize) -> String,
        shape: impl Into<Shape>,
        initializer: Initializer,
    ) -> Stack {
        let shape = shape.into();
        Stack { members: (0..count).map(|number| self.add(name(number), shape, initializer)).collect() }
    }

    /// The finished layout.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no parameter, an empty one, two of one name (as `b.c` in `a` and `c` in `a.b` are), one named `__metadata__`, as
    /// no tensor of a file can be, or more bytes than memory can have.
    pub fn build(self) -> Result<Layout> {
        let refused = |expected: &str, got: String| Err(Error::misuse("layout", expected, got));
        let named = |entry: &Entry| format!("`{}` {}", short(&entry.name), entry.shape);
        if let Some(entry) = self.beyond.map(|first| &self.entries[first]) {
            let got = format!("{} behind {} elements", named(entry), entry.start);
            return refused("parameters that memory can hold", got);
        }
        let mut names: Vec<&str> = self.entries.iter().map(Entry::name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused("a different name for each parameter", format!("two named `{}`", short(pair[0])));
        }
        if names.binary_search(&NOTES).is_ok() {
            return refused("names that a file's tensors can have", format!("`{NOTES}`, where a file has its notes"));
        }
        if let Some(empty) = self.entries.iter().find(|entry| entry.shape.elements() == 0) {
            return refused("parameters with elements", named(empty));
        }
        if self.entries.is_empty() {
            return refused("at least one parameter", "none".into());
        }
        let Self { identity, entries, elements, .. } = self;
        Ok(Layout { shared: Arc::new(Shared { identity, entries, elements }) })
    }
}

#[derive(Debug)]
struct Shared {
    identity: u64,
    entries: Vec<Entry>,
    elements: usize,
}

/// Where each parameter of a model stands. Clones share it.
#[derive(Clone, Debug)]
pub struct Layout {
    shared: Arc<Shared>,
}

impl Layout {
    /// A layout without parameters so far.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// All parameters in order.
    pub fn entries(&self) -> &[Entry] {
        &self.shared.entries
    }

    /// The handles of all parameters in order.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = Parameter> + use<> {
        let layout = self.shared.identity;
        (0..self.entries().len()).map(move |index| Parameter { layout, index })
    }

    /// One parameter.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's.
    pub fn entry(&self, parameter: Parameter) -> Result<&Entry> {
        Ok(&self.entries()[self.index(parameter)?])
    }

    /// A parameter's place among the entries.
    pub(crate) fn index(&self, parameter: Parameter) -> Result<usize> {
        if parameter.layout == self.shared.identity {
            return Ok(parameter.index);
        }
        let got = format!("parameter {} of another layout", parameter.index);
        Err(Error::misuse("parameter", "a handle that this layout's builder, or that of its clones, gave", got))
    }

    /// Elements of a flat region, the space between parameters included.
    pub fn elements(&self) -> usize {
        self.shared.elements
    }

    /// Weights of the model: elements without the space between.
    pub fn weights(&self) -> usize {
        self.entries().iter().map(|entry| entry.shape.elements()).sum()
    }

    /// Whether both are the same layout, not only equal ones.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.shared.identity == other.shared.identity
    }

    /// Writes what follows byte `offset` of a flat region: each parameter's bytes by `write`, from its entry, its place in the layout
    /// and the first byte within it, and zeros between.
    fn fill(&self, offset: usize, mut place: &mut [u8], write: impl Fn(usize, &Entry, usize, &mut [u8])) {
        let mut at = offset;
        let mut take = |bytes: usize| {
            let bytes = bytes.min(place.len());
            let (part, rest) = std::mem::take(&mut place).split_at_mut(bytes);
            place = rest;
            part
        };
        let first = self.entries().partition_point(|entry| entry.bytes().end <= offset);
        for (number, entry) in self.entries().iter().enumerate().skip(first) {
            let bytes = entry.bytes();
            let gap = take(bytes.start.saturating_sub(at));
            gap.fill(0);
            at += gap.len();
            let part = take(bytes.end - at);
            if part.is_empty() {
                return;
            }
            write(number, entry, at - bytes.start, part);
            at += part.len();
        }
        take(usize::MAX).fill(0);
    }

    /// The name of what holds byte `offset` of a flat region, or precedes it, and where that starts.
    fn name_at(&self, offset: usize) -> (String, usize) {
        let entry = &self.entries()[self.entries().partition_point(|entry| entry.bytes().start <= offset) - 1];
        (entry.name.clone(), entry.bytes().start)
    }

    /// Overwrites flat regions of this layout, each with its sources in the order of the entries.
    pub(crate) fn upload(&self, regions: &[(&mut Buffer<f32>, Vec<&[u8]>)], transfer: Transfer<'_>) -> Result<()> {
        let Some((first, _)) = regions.first() else { return Ok(()) };
        let fill = |sources: &[&[u8]], offset: usize, place: &mut [u8]| {
            self.fill(offset, place, |number, _, within, part| {
                part.copy_from_slice(&sources[number][within..][..part.len()]);
            });
        };
        let fills: Vec<_> = regions
            .iter()
            .map(|(_, sources)| move |offset: usize, place: &mut [u8]| fill(sources, offset, place))
            .collect();
        let name = |offset| self.name_at(offset);
        let contents: Vec<_> = regions
            .iter()
            .zip(&fills)
            .map(|((buffer, _), fill)| Content { memory: buffer.memory().cast(), fill, name: &name })
            .collect();
        transfer.run(first.device(), &contents)
    }

    /// The shape of each member of a stack, and the elements from one's start to the next one's.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's, or has no members.
    pub fn stack(&self, stack: &Stack) -> Result<(Shape, usize)> {
        let head = self.head(stack)?;
        let second = stack.members.get(1).map(|second| self.entry(*second)).transpose()?;
        Ok((head.shape, second.map_or(0, |second| second.start - head.start)))
    }

    /// The places from the first element of the first member to the last of the last.
    fn span(&self, stack: &Stack) -> Result<Range<usize>> {
        let start = self.head(stack)?.start;
        stack.members.last().map_or(Ok(start..start), |last| Ok(start..self.entry(*last)?.range().end))
    }

    /// The first member.
    fn head(&self, stack: &Stack) -> Result<&Entry> {
        let first =
            stack.members.first().ok_or_else(|| Error::misuse("stack", "a stack of at least one parameter", "none"))?;
        self.entry(*first)
    }
}

/// A flat region of this layout, by parameter.
#[derive(Debug)]
struct Flat {
    layout: Layout,
    values: Buffer<f32>,
}

impl Flat {
    /// One parameter's memory, for whoever borrows the region as it will use it.
    fn part(&self, step: &Step<'_>, parameter: Parameter, written: bool) -> Result<(Memory<f32>, Shape)> {
        step.borrow(&self.values, written)?;
        let entry = self.layout.entry(parameter)?;
        Ok((self.values.memory().part(entry.start, entry.shape.elements()), entry.shape))
    }

    /// A stack's memory from the first member's start to the last one's end, likewise.
    fn stack(&self, step: &Step<'_>, stack: &Stack, written: bool) -> Result<(Memory<f32>, Shape)> {
        step.borrow(&self.values, written)?;
        let span = self.layout.span(stack)?;
        Ok((self.values.memory().part(span.start, span.len()), [span.len()].into()))
    }

    fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        let entry = self.layout.entry(parameter)?;
        self.values.read_range(entry.start, entry.shape.elements())
    }
}

/// A model's weights on a device.
#[derive(Debug)]
pub struct Parameters {
    flat: Flat,
}

impl Parameters {
    /// Weights as their initialisers make them from `seed`: the same on every machine.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room.
    pub fn new(device: &Device, layout: &Layout, seed: u64) -> Result<Self> {
        // How many random numbers the parameters before each have used.
        let drawn: Vec<u64> = layout
            .entries()
            .iter()
            .scan(0, |drawn, entry| {
                let before = *drawn;
                *drawn += entry.initializer.draws() * entry.shape.elements() as u64;
                Some(before)
            })
            .collect();
        let fill = |offset: usize, place: &mut [u8]| {
            layout.fill(offset, place, |number, entry, within, part| {
                let before = (within / size_of::<f32>()) as u64 * entry.initializer.draws();
                let mut random = SplitMix64::after(seed, drawn[number] + before);
                for word in part.as_chunks_mut().0 {
                    *word = entry.initializer.draw(&mut random).to_le_bytes();
                }
            });
        };
        let values = Buffer::allocate(device, layout.elements())?;
        let content = Content { memory: values.memory().cast(), fill: &fill, name: &|offset| layout.name_at(offset) };
        Transfer::new().run(device, &[content])?;
        Ok(Self { flat: Flat { layout: layout.clone(), values } })
    }

    /// Overwrites all weights with what `source` gives for each parameter, in the layout's order: its elements as
    /// little-endian f32, row-major, at any alignment, from memory that nobody changes meanwhile. Small parameters share a copy, large ones take
    /// several. The sources are not needed any more when it returns.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a parameter without a source or with one of another length, and [`Error::NotFinite`] for one that holds such a
    /// number, unless [`Transfer::numbers`] allows it, before anything is changed; [`Error::Timeout`], [`Error::Damaged`] on a checked device, and what the transfer's progress returns: some weights are
    /// the new ones then.
    pub fn load<'b>(
        &mut self,
        mut source: impl FnMut(&Entry) -> Option<&'b [u8]>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        let Flat { layout, values } = &mut self.flat;
        let checked = |entry: &Entry| {
            let (expected, found) = (entry.bytes().len(), source(entry));
            found.filter(|bytes| bytes.len() == expected).ok_or_else(|| {
                let got = found.map_or("none".into(), |bytes| format!("{} bytes", bytes.len()));
                Error::misuse("load", format!("{expected} bytes for `{}` {}", short(&entry.name), entry.shape), got)
            })
        };
        let sources: Vec<&[u8]> = layout.entries().iter().map(checked).collect::<Result<_>>()?;
        transfer.allowed().check((None, Quantity::Weight), layout.finite_bytes("", &sources))?;
        layout.upload(&[(values, sources)], transfer)
    }

    /// Names, shapes and places.
    pub fn layout(&self) -> &Layout {
        &self.flat.layout
    }

    /// One parameter's weights, for kernels of a step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device, or the handle is another layout's.
    pub fn lend<'b, 's>(&'b self, step: &Step<'s>, parameter: Parameter) -> Result<Lent<'b, 's>> {
        let (memory, shape) = self.flat.part(step, parameter, false)?;
        Ok(Lent::new(memory, shape))
    }

    /// A stack's weights from the first member's start to the last one's end, flat; [`Layout::stack`] tells where each stands.
    ///
    /// # Errors
    /// As for [`Parameters::lend`]; [`Error::Misuse`] for a stack without members.
    pub fn lend_stack<'b, 's>(&'b self, step: &Step<'s>, stack: &Stack) -> Result<Lent<'b, 's>> {
        let (memory, shape) = self.flat.stack(step, stack, false)?;
        Ok(Lent::new(memory, shape))
    }

    /// Waits, and returns one parameter's weights.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's; as for [`Buffer::read`].
    pub fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        self.flat.read(parameter)
    }

    /// All weights as one flat region of the layout.
    pub fn flat(&self) -> &Buffer<f32> {
        &self.flat.values
    }

    /// Overwrites one parameter's weights, row-major, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's, or it has another number of elements; as for [`Buffer::write`].
    pub fn write(&mut self, parameter: Parameter, values: &[f32]) -> Result<()> {
        let entry = self.flat.layout.entry(parameter)?;
        if values.len() != entry.shape.elements() {
            let expected = format!("{} values for `{}` {}", entry.shape.elements(), entry.name, entry.shape);
            return Err(Error::misuse("write", expected, values.len().to_string()));
        }
        self.flat.values.write(entry.start, values)
    }

    /// All weights as one flat region, for kernels of a step that write them: keep the space between parameters zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn lend_flat_mut<'b, 's>(&'b mut self, step: &Step<'s>) -> Result<LentMut<'b, 's>> {
        let elements = self.flat.values.len();
        step.lend_mut(&mut self.flat.values, [elements])
    }

    /// All weights, to be overwritten: no other buffer may take its place.
    pub(crate) fn flat_mut(&mut self) -> &mut Buffer<f32> {
        &mut self.flat.values
    }

    /// The SHA-256 over names, shapes and the weights' bytes (little-endian), in the layout's order, in hexadecimal.
    ///
    /// # Errors
    /// As for [`Buffer::read`].
    pub fn sha256(&self) -> Result<String> {
        let values = self.flat.values.read()?;
        let mut hash = Sha256::new();
        for entry in self.layout().entries() {
            hash.update(format!("{}{}\n", entry.name, entry.shape));
            let words: Vec<[u8; 4]> = values[entry.range()].iter().map(|value| value.to_le_bytes()).collect();
            hash.update(words.as_flattened());
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A model's gradients on a device: backward adds to them, the optimiser reads them.
#[derive(Debug)]
pub struct Gradients {
    flat: Flat,
}

impl Gradients {
    /// Gradients of zero for `parameters`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room.
    pub fn zeros(parameters: &Parameters) -> Result<Self> {
        let layout = parameters.layout().clone();
        let values = Buffer::zeros(parameters.flat().device(), layout.elements())?;
        Ok(Self { flat: Flat { layout, values } })
    }

    /// Names, shapes and places.
    pub fn layout(&self) -> &Layout {
        &self.flat.layout
    }

    /// Queues zeros over all gradients.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn zero(&mut self, step: &Step<'_>) -> Result<()> {
        let elements = self.flat.values.len();
        crate::ops::fill_into(step, &mut step.lend_mut(&mut self.flat.values, [elements])?, 0.0)
    }

    /// One parameter's gradient, to be added to.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device, or the handle is another layout's.
    pub fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>, parameter: Parameter) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.flat.part(step, parameter, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// A stack's gradients from the first member's start to the last one's end, flat: keep the space between members zero.
    ///
    /// # Errors
    /// As for [`Gradients::lend_mut`]; [`Error::Misuse`] for a stack without members.
    pub fn lend_stack_mut<'b, 's>(&'b mut self, step: &Step<'s>, stack: &Stack) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.flat.stack(step, stack, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// Waits, and returns one parameter's gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's; as for [`Buffer::read`].
    pub fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        self.flat.read(parameter)
    }

    /// All gradients as one flat region of the layout.
    pub fn flat(&self) -> &Buffer<f32> {
        &self.flat.values
    }
}
