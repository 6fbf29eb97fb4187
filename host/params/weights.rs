//! Weights and gradients: what outlives steps, one flat region each.
//!
//! Invariant: the space between parameters stays zero, and each parameter's place is the layout's. A BF16 copy of the weights is these,
//! rounded, whenever a kernel can read it: whoever writes the ones writes the other.

#![forbid(unsafe_code)]

use super::layout::{Layout, LayoutEntry, Parameter, Stack};
use crate::digest::hex;
use crate::driver::Device;
use crate::error::{Error, Quantity, Result, short};
use crate::finite::{Numbers, all_finite};
use crate::launch::launch_on;
use crate::memory::Buffer;
use crate::ops;
use crate::random::SplitMix64;
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Memory, Shape, Source, Stored, Target};
use crate::upload::{Content, Transfer};
use cuda_std::float_mode;
use half::bf16;
use kernels::cast::cast_to_bf16;
use sha2::{Digest, Sha256};
use std::any::Any;
use std::ops::Range;

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
        let contents: Vec<_> =
            regions.iter().zip(&fills).map(|((buffer, _), fill)| Content::new(buffer.memory(), fill, &name)).collect();
        transfer.run(first.device(), &contents)
    }
}

/// A flat region of this layout, by parameter.
#[derive(Debug)]
struct Flat<S: Stored = f32> {
    layout: Layout,
    values: Buffer<S>,
}

impl<S: Stored> Flat<S> {
    /// One parameter's memory, for whoever borrows the region as it will use it.
    fn part(&self, step: &Step<'_>, parameter: Parameter, written: bool) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let entry = self.layout.entry(parameter)?;
        Ok((self.values.memory().part(entry.start(), entry.shape().elements()), entry.shape()))
    }

    /// A stack's memory from the first member's start to the last one's end, likewise.
    fn stack(&self, step: &Step<'_>, stack: &Stack, written: bool) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let span = self.layout.span(stack)?;
        Ok((self.values.memory().part(span.start, span.len()), [span.len()].into()))
    }

    fn read(&self, parameter: Parameter) -> Result<Vec<S>> {
        let entry = self.layout.entry(parameter)?;
        self.values.read_range(entry.start(), entry.shape().elements())
    }
}

impl Flat {
    /// The first parameter that is not finite. Waits; takes a piece's bytes of the host's memory.
    fn first_not_finite(&self) -> Result<Option<&str>> {
        for entry in self.layout.entries() {
            for piece in self.values.pieces(entry.range()) {
                if !all_finite(bytemuck::cast_slice(&piece?)) {
                    return Ok(Some(entry.name()));
                }
            }
        }
        Ok(None)
    }
}

/// A model's weights on a device.
#[derive(Debug)]
pub struct Parameters {
    flat: Flat,
    /// The same rounded, at the same places.
    copy: Option<Flat<bf16>>,
    /// Whether a caller has written numbers that are not finite, or was allowed to.
    unchecked: bool,
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
                // The generator's place wraps, too.
                let draws = entry.initializer.draws().wrapping_mul(entry.shape().elements() as u64);
                *drawn = u64::wrapping_add(*drawn, draws);
                Some(before)
            })
            .collect();
        let fill = |offset: usize, place: &mut [u8]| {
            layout.fill(offset, place, |number, entry, within, part| {
                let before = (within / size_of::<f32>()) as u64 * entry.initializer.draws();
                let mut random = SplitMix64::after(seed, drawn[number] + before);
                float_mode::in_default(|| {
                    for word in part.as_chunks_mut().0 {
                        *word = entry.initializer.draw(&mut random).to_le_bytes();
                    }
                });
            });
        };
        let values = Buffer::allocate(device, layout.elements())?;
        let name = |offset| layout.name_at(offset);
        let content = Content::new(values.memory(), &fill, &name);
        Transfer::new().run(device, &[content])?;
        Ok(Self { flat: Flat { layout: layout.clone(), values }, copy: None, unchecked: false })
    }

    /// The same weights with a copy in BF16 beside them, for products that read half the bytes: each weight rounded to the nearest, ties to
    /// even, at its place in the layout. It follows the weights: what loads or writes these writes the copy, and so does an update, in the
    /// same launch. Files do not have it. [`Parameters::lend_as`] lends it.
    ///
    /// ```
    /// use stepscope::*;
    ///
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// let mut layout = Layout::builder();
    /// let w = layout.add("w", [2], Initializer::Constant(0.1));
    /// let mut weights = Parameters::new(&device, &layout.build()?, 7)?.with_bf16_copy()?;
    /// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// let copy = arena.step(|step| step.read(&weights.lend_as::<bf16>(step, w)?))?;
    /// assert_eq!(copy, [bf16::from_f32(0.1); 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room.
    pub fn with_bf16_copy(self) -> Result<Self> {
        let Flat { layout, values } = &self.flat;
        let copy = Buffer::allocate(values.device(), layout.elements())?;
        let copy = Some(Flat { layout: layout.clone(), values: copy });
        let parameters = Self { copy, ..self };
        parameters.round(0..parameters.flat.values.len())?;
        Ok(parameters)
    }

    /// Rounds these elements to the copy, if there is one: for who has written them, whether that went well or not.
    fn round(&self, range: Range<usize>) -> Result<()> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let weights = self.flat.values.memory().part(range.start, range.len());
        let copy = copy.values.memory().part(range.start, range.len());
        launch_on(self.flat.values.device(), &cast_to_bf16 { x: weights.as_slice(), out: copy.as_out() })
    }

    /// Overwrites all weights, and other regions of the layout in the same transfer, each with its sources in the order of the entries.
    pub(crate) fn overwrite<'r>(
        &mut self,
        weights: Vec<&'r [u8]>,
        others: impl IntoIterator<Item = (&'r mut Buffer<f32>, Vec<&'r [u8]>)>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        self.unchecked |= transfer.allowed() == Numbers::Any;
        let Flat { layout, values } = &mut self.flat;
        let mut regions = vec![(values, weights)];
        for (region, sources) in others {
            regions.push((region, sources));
        }
        let overwritten = layout.overwrite(&regions, transfer);
        // An upload that failed may have changed some.
        let rounded = self.round(0..self.flat.values.len());
        overwritten.and(rounded)
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
        let layout = self.layout();
        let checked = |entry: &LayoutEntry| {
            let (expected, found) = (entry.bytes().len(), source(entry));
            found.filter(|bytes| bytes.len() == expected).ok_or_else(|| {
                let got = found.map_or("none".into(), |bytes| format!("{} bytes", bytes.len()));
                Error::misuse("load", format!("{expected} bytes for `{}` {}", short(entry.name()), entry.shape()), got)
            })
        };
        let sources: Vec<&[u8]> = layout.entries().iter().map(checked).collect::<Result<_>>()?;
        transfer.allowed().check((None, Quantity::Weight), layout.finite_bytes("", &sources))?;
        self.overwrite(sources, [], transfer)
    }

    /// Names, shapes and places.
    pub fn layout(&self) -> &Layout {
        &self.flat.layout
    }

    /// The first tensor that is not finite, of the gradients if they count and then of the weights,
    /// as an error names it; after it `seen`, which says when. Waits.
    pub(crate) fn first_not_finite(&self, gradients: Option<&Gradients>, seen: &str) -> Result<String> {
        if let Some(gradients) = gradients
            && let Some(name) = gradients.flat.first_not_finite()?
        {
            return Ok(format!("the gradient of `{name}`{seen}"));
        }
        if let Some(name) = self.flat.first_not_finite()? {
            return Ok(format!("`{name}`{seen}"));
        }
        let all = if gradients.is_some() { "all gradients and weights" } else { "all weights" };
        Ok(format!("none, {all} are finite{seen}: a sum of finite numbers was too large"))
    }

    /// An error that names the first tensor that is not finite, behind so many updates. Waits.
    pub(crate) fn check_finite(&self, update: u64) -> Result<()> {
        let first = self.flat.first_not_finite()?.map(|name| (name.to_owned(), false));
        Numbers::Finite.check((Some(update), Quantity::Weight), first)
    }

    /// Whether a caller has written numbers that are not finite, or was allowed to. Of what kernels
    /// write nothing is known here.
    pub(crate) fn are_unchecked(&self) -> bool {
        self.unchecked
    }

    /// One parameter's weights, for kernels of a step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device, or the handle is another layout's.
    pub fn lend<'b, 's>(&'b self, step: &Step<'s>, parameter: Parameter) -> Result<Lent<'b, 's>> {
        self.lend_as(step, parameter)
    }

    /// One parameter's weights as S stores them, for kernels of a step: of BF16, from the copy.
    ///
    /// # Errors
    /// As for [`Parameters::lend`]; [`Error::Misuse`] when there is no copy.
    pub fn lend_as<'b, 's, S: Stored>(&'b self, step: &Step<'s>, parameter: Parameter) -> Result<Lent<'b, 's, S>> {
        let (memory, shape) = self.flat_as::<S>()?.part(step, parameter, false)?;
        Ok(Lent::new(memory, shape))
    }

    /// The region of this type.
    fn flat_as<S: Stored>(&self) -> Result<&Flat<S>> {
        let copy = self.copy.as_ref().map(|copy| copy as &dyn Any);
        let found = [Some(&self.flat as &dyn Any), copy].into_iter().flatten().find_map(|flat| flat.downcast_ref());
        found.ok_or_else(|| {
            let expected = "a copy of the weights in bf16, which `Parameters::with_bf16_copy` makes";
            Error::misuse("lend_as", expected, "weights of f32 alone")
        })
    }

    /// A stack's weights from the first member's start to the last one's end, flat; [`Layout::stack`] tells where each stands.
    ///
    /// # Errors
    /// As for [`Parameters::lend`]; [`Error::Misuse`] for a stack without members.
    pub fn lend_stack<'b, 's>(&'b self, step: &Step<'s>, stack: &Stack) -> Result<Lent<'b, 's>> {
        self.lend_stack_as(step, stack)
    }

    /// The same as S stores them: of BF16, from the copy.
    ///
    /// # Errors
    /// As for [`Parameters::lend_stack`]; [`Error::Misuse`] when there is no copy.
    pub fn lend_stack_as<'b, 's, S: Stored>(&'b self, step: &Step<'s>, stack: &Stack) -> Result<Lent<'b, 's, S>> {
        let (memory, shape) = self.flat_as::<S>()?.stack(step, stack, false)?;
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

    /// The copy of all weights in BF16, a flat region of the same places, if there is one.
    pub fn bf16_copy(&self) -> Option<&Buffer<bf16>> {
        self.copy.as_ref().map(|copy| &copy.values)
    }

    /// Overwrites one parameter's weights, row-major, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle is another layout's, or it has another number of elements; as for [`Buffer::write`].
    pub fn write(&mut self, parameter: Parameter, values: &[f32]) -> Result<()> {
        let entry = self.flat.layout.entry(parameter)?;
        let range = entry.range();
        if values.len() != entry.shape().elements() {
            let expected = format!("{} values for `{}` {}", entry.shape().elements(), entry.name(), entry.shape());
            return Err(Error::misuse("write", expected, values.len().to_string()));
        }
        self.unchecked |= !all_finite(bytemuck::cast_slice(values));
        let written = self.flat.values.write(range.start, values);
        let rounded = self.round(range);
        written.and(rounded)
    }

    /// All weights as one flat region, and their BF16 copy if there is one, for kernels of a step that write them: write both, the copy what
    /// the weights are when rounded, and keep the space between parameters zero.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn lend_flat_mut<'b, 's>(
        &'b mut self,
        step: &Step<'s>,
    ) -> Result<(LentMut<'b, 's>, Option<LentMut<'b, 's, bf16>>)> {
        let elements = [self.flat.values.len()];
        let weights = step.lend_mut(&mut self.flat.values, elements)?;
        let copy = self.copy.as_mut().map(|copy| step.lend_mut(&mut copy.values, elements)).transpose()?;
        Ok((weights, copy))
    }

    /// Queues the rounding of all weights to their copy, if there is one.
    #[track_caller]
    pub(crate) fn queue_copy(&mut self, step: &Step<'_>) -> Result<()> {
        match self.lend_flat_mut(step)? {
            (weights, Some(mut copy)) => step.launch(cast_to_bf16 { x: weights.slice(), out: copy.out() }),
            (_, None) => Ok(()),
        }
    }

    /// The SHA-256 over names, shapes and the weights' bytes (little-endian), in the layout's order, in hexadecimal.
    ///
    /// # Errors
    /// As for [`Buffer::read`].
    pub fn sha256(&self) -> Result<String> {
        let mut hash = Sha256::new();
        for entry in self.layout().entries() {
            hash.update(format!("{}{}\n", entry.name(), entry.shape()));
            self.flat.values.hash_into(&mut hash, entry.range())?;
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
        ops::fill_into(step, &mut self.lend_flat_mut(step)?, 0.0)
    }

    /// All gradients as one flat region, for kernels of a step that write them: keep the space between parameters zero.
    pub(crate) fn lend_flat_mut<'b, 's>(&'b mut self, step: &Step<'s>) -> Result<LentMut<'b, 's>> {
        let elements = [self.flat.values.len()];
        step.lend_mut(&mut self.flat.values, elements)
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
