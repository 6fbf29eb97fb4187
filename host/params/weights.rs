//! Weights and gradients: what outlives steps, one flat region each.
//!
//! Invariant: the space between parameters stays zero, and each parameter's place is the layout's.

#![forbid(unsafe_code)]

use super::layout::{Layout, LayoutEntry, Parameter, Stack};
use crate::digest::hex;
use crate::driver::Device;
use crate::error::{Error, Quantity, Result, short};
use crate::memory::Buffer;
use crate::ops;
use crate::random::SplitMix64;
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Memory, Shape};
use crate::upload::{Content, Transfer};
use sha2::{Digest, Sha256};

impl Layout {
    /// Overwrites flat regions of this layout, each with its sources in the order of the entries.
    pub(crate) fn overwrite(&self, regions: &[(&mut Buffer<f32>, Vec<&[u8]>)], transfer: Transfer<'_>) -> Result<()> {
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
            .map(|((buffer, _), fill)| Content::new(buffer.memory(), fill, &name))
            .collect();
        transfer.run(first.device(), &contents)
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
        Ok((self.values.memory().part(entry.start(), entry.shape().elements()), entry.shape()))
    }

    /// A stack's memory from the first member's start to the last one's end, likewise.
    fn stack(&self, step: &Step<'_>, stack: &Stack, written: bool) -> Result<(Memory<f32>, Shape)> {
        step.borrow(&self.values, written)?;
        let span = self.layout.span(stack)?;
        Ok((self.values.memory().part(span.start, span.len()), [span.len()].into()))
    }

    fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        let entry = self.layout.entry(parameter)?;
        self.values.read_range(entry.start(), entry.shape().elements())
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
                *drawn += entry.initializer.draws() * entry.shape().elements() as u64;
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
        let name = |offset| layout.name_at(offset);
        let content = Content::new(values.memory(), &fill, &name);
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
        mut source: impl FnMut(&LayoutEntry) -> Option<&'b [u8]>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        let Flat { layout, values } = &mut self.flat;
        let checked = |entry: &LayoutEntry| {
            let (expected, found) = (entry.bytes().len(), source(entry));
            found.filter(|bytes| bytes.len() == expected).ok_or_else(|| {
                let got = found.map_or("none".into(), |bytes| format!("{} bytes", bytes.len()));
                Error::misuse("load", format!("{expected} bytes for `{}` {}", short(entry.name()), entry.shape()), got)
            })
        };
        let sources: Vec<&[u8]> = layout.entries().iter().map(checked).collect::<Result<_>>()?;
        transfer.allowed().check((None, Quantity::Weight), layout.finite_bytes("", &sources))?;
        layout.overwrite(&[(values, sources)], transfer)
    }

    /// Names, shapes and places.
    pub fn layout(&self) -> &Layout {
        &self.flat.layout
    }

    /// The first tensor that is not finite, of the gradients and then of the weights, as an error tells it; behind it `seen`, which says
    /// when. Waits.
    pub(crate) fn first_not_finite(&self, gradients: &Gradients, seen: &str) -> Result<String> {
        for (whose, flat) in [("the gradient of ", gradients.flat()), ("", self.flat())] {
            let flat = flat.read()?;
            if let Some((name, _)) = self.layout().finite("", &flat).find(|(_, finite)| !finite) {
                return Ok(format!("{whose}`{name}`{seen}"));
            }
        }
        Ok(format!("none, all gradients and weights are finite{seen}: a sum of finite numbers was too large"))
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
        if values.len() != entry.shape().elements() {
            let expected = format!("{} values for `{}` {}", entry.shape().elements(), entry.name(), entry.shape());
            return Err(Error::misuse("write", expected, values.len().to_string()));
        }
        self.flat.values.write(entry.start(), values)
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
            hash.update(format!("{}{}\n", entry.name(), entry.shape()));
            let words: Vec<[u8; 4]> = values[entry.range()].iter().map(|value| value.to_le_bytes()).collect();
            hash.update(words.as_flattened());
        }
        Ok(hex(&hash.finalize()))
    }
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
        ops::fill_into(step, &mut step.lend_mut(&mut self.flat.values, [elements])?, 0.0)
    }

    /// One parameter's gradient, to be added to.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is on another device, or the handle is another layout's.
    pub fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>, parameter: Parameter) -> Result<LentMut<'b, 's>> {
        let (memory, shape) = self.flat.part(step, parameter, true)?;
        Ok(LentMut::new(memory, shape))
    }

    /// The gradients of several parameters at once, to be added to.
    ///
    /// # Errors
    /// As for [`Gradients::lend_mut`]; [`Error::Misuse`] when one parameter is named twice.
    pub fn lend_many_mut<'b, 's, const N: usize>(
        &'b mut self,
        step: &Step<'s>,
        parameters: [Parameter; N],
    ) -> Result<[LentMut<'b, 's>; N]> {
        for (at, parameter) in parameters.iter().enumerate() {
            if parameters[..at].contains(parameter) {
                return Err(Error::misuse("gradients", "different parameters", "one of them twice"));
            }
        }
        // Parameters of one layout are places apart.
        let parts =
            parameters.iter().map(|&parameter| self.flat.part(step, parameter, true)).collect::<Result<Vec<_>>>()?;
        let mut parts = parts.into_iter().map(|(memory, shape)| LentMut::new(memory, shape));
        Ok(parameters.map(|_| parts.next().expect("one for each parameter")))
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
