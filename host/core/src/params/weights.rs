//! Weights, which outlive steps: those that are trained, and those that are frozen.
//!
//! Invariant: each parameter's position is the spec's.

#![forbid(unsafe_code)]

use super::Gradients;
use super::contents::{self, RegionContents, Values, WriteRegion};
use super::frozen::Frozen;
use super::masters::{LentMasters, Masters};
use super::matrix::MatrixWeights;
use super::nf4::Nf4Matrix;
use super::spec::{FrozenType, Parameter, ParameterEntry, ParameterSpec, StackedParameters};
use crate::buffer::{AnyBuffer, Buffer};
use crate::device::Device;
use crate::digest::hex;
use crate::error::{Error, Quantity, Result, short};
use crate::initializer::Initializer;
use crate::non_finite::{NonFinite, are_finite};
use crate::random::SplitMix64;
use crate::step::Step;
use crate::tensor::{Lent, Memory, Shape, Source, Stored, Target, is_finite};
use crate::upload::Transfer;
use cuda_std::float_mode;
use half::bf16;
use kernels::cast::cast_to_bf16;
use sha2::{Digest, Sha256};

/// A flat region of a spec, accessed by parameter.
#[derive(Debug)]
pub(super) struct Flat<S: Stored = f32> {
    pub(super) spec: ParameterSpec,
    pub(super) values: Buffer<S>,
}

impl<S: Stored> Flat<S> {
    /// Returns one parameter's memory. The caller borrows the region according to its use.
    pub(super) fn part(&self, step: &Step<'_>, parameter: Parameter, written: bool) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let entry = self.spec.trained_entry(parameter)?;
        Ok((self.values.memory().part(entry.start(), entry.shape().elements()), entry.shape()))
    }

    /// Returns a stack's memory from the first member's start to the last member's end, in the same
    /// way.
    pub(super) fn stack(
        &self,
        step: &Step<'_>,
        stack: &StackedParameters,
        written: bool,
    ) -> Result<(Memory<S>, Shape)> {
        step.borrow(&self.values, written)?;
        let span = self.spec.trained_span(stack)?;
        Ok((self.values.memory().part(span.start, span.len()), [span.len()].into()))
    }

    pub(super) fn read(&self, parameter: Parameter) -> Result<Vec<S>> {
        let entry = self.spec.trained_entry(parameter)?;
        self.values.read_range(entry.start(), entry.shape().elements())
    }

    /// Finds the first parameter that is not finite. Waits. Needs host memory for one piece.
    pub(super) fn first_not_finite(&self) -> Result<Option<&str>> {
        for entry in self.spec.entries() {
            for piece in self.values.pieces(entry.range()) {
                if !are_finite(&piece?) {
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
    masters: Masters,
    frozen: Frozen,
    /// True if a caller has written values that are not finite, or was allowed to.
    unchecked: bool,
}

impl Parameters {
    /// Makes weights with their initializers from `seed`. They are the same on every machine. The
    /// trained ones are stored in the type of [`ParameterSpec::with_masters`].
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room.
    pub fn new(device: &Device, spec: &ParameterSpec, seed: u64) -> Result<Self> {
        // The number of random numbers that the parameters before each one have used.
        let drawn: Vec<u64> = spec
            .iter()
            .scan(0, |drawn, (_, entry)| {
                let before = *drawn;
                // The generator's position wraps too.
                let draws = entry.initializer.draws().wrapping_mul(entry.shape().elements() as u64);
                *drawn = u64::wrapping_add(*drawn, draws);
                Some(before)
            })
            .collect();
        let mut masters = Masters::allocate(device, spec)?;
        contents::upload(spec, &masters.contents_of(&Values::Drawn(seed, &drawn)), Transfer::new())?;
        let frozen = Frozen::new(device, spec, seed, &drawn)?;
        Ok(Self { masters, frozen, unchecked: false })
    }

    /// Adds a BF16 copy of the weights, so that products read half the bytes. Each weight is
    /// rounded to nearest, ties to even, at the same position. The copy follows the weights: code
    /// that loads or writes the weights writes the copy too, and so does an update, in the same
    /// launch. Files do not contain the copy. [`Parameters::lend_as`] lends it. Frozen weights in
    /// f32 get a copy too, unless all are gains or biases. Those in BF16 need none, and neither do
    /// split masters.
    ///
    /// ```
    /// use stepscope::parameters::Initializer;
    /// use stepscope::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// # let device = Device::open(DeviceKind::Emulated)?;
    /// let mut spec = ParameterSpec::builder();
    /// let w = spec.add("w", [2], Initializer::Constant(0.1));
    /// let mut weights = Parameters::new(&device, &spec.build()?, 7)?.with_bf16_copy()?;
    /// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// let copy = arena.step(|step| step.read(&weights.lend_as::<bf16>(step, w)?))?;
    /// assert_eq!(copy, [bf16::from_f32(0.1); 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room.
    pub fn with_bf16_copy(self) -> Result<Self> {
        let frozen = self.frozen.with_bf16_copy(self.masters.spec())?;
        Ok(Self { masters: self.masters.with_bf16_copy()?, frozen, unchecked: self.unchecked })
    }

    /// Overwrites all trained weights, and other regions of the spec in the same transfer. The
    /// writers are those of [`Parameters::regions`].
    ///
    /// # Panics
    /// Panics unless there is a writer for each region.
    pub fn overwrite<'r>(
        &mut self,
        weights: Vec<Box<WriteRegion<'r>>>,
        others: impl IntoIterator<Item = RegionContents<'r>>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        self.unchecked |= transfer.allowed() == NonFinite::Allow;
        let spec = self.spec().clone();
        let mut contents = self.masters.contents(weights);
        // Pushed one by one, because these borrows may end later.
        for content in others {
            contents.push(content);
        }
        let overwritten = contents::upload(&spec, &contents, transfer);
        drop(contents);
        self.round_after(overwritten)
    }

    /// Rounds all weights to their copy. A failed upload may have changed some weights.
    fn round_after(&self, overwritten: Result<()>) -> Result<()> {
        let rounded = self.masters.round(0..self.spec().elements());
        overwritten.and(rounded)
    }

    /// Overwrites all trained weights with the bytes that `source` returns for each parameter, in
    /// the spec's order. The bytes are the elements as little-endian f32, row-major, at any
    /// alignment, in memory that nobody changes during the call. Small parameters share a copy, and
    /// large ones take several. The sources are no longer needed when it returns.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a parameter without a source or with a source of another length.
    /// [`Error::NotFinite`] for a source with a value that is not finite, unless
    /// [`Transfer::non_finite`] allows it. Nothing has been changed after either of these.
    ///
    /// [`Error::Timeout`], [`Error::Damaged`] on a checked device, and the errors of the transfer's
    /// progress callback. After these, some weights are already the new ones.
    pub fn load<'b>(
        &mut self,
        mut source: impl FnMut(&ParameterEntry) -> Option<&'b [u8]>,
        transfer: Transfer<'_>,
    ) -> Result<()> {
        let spec = self.spec().clone();
        let checked = |entry: &ParameterEntry| {
            let (expected, found) = (entry.bytes().len(), source(entry));
            found.filter(|bytes| bytes.len() == expected).ok_or_else(|| {
                let got = found.map_or("none".into(), |bytes| format!("{} bytes", bytes.len()));
                Error::misuse("load", format!("{expected} bytes for `{}` {}", short(entry.name()), entry.shape()), got)
            })
        };
        let sources: Vec<&[u8]> = spec.entries().iter().map(checked).collect::<Result<_>>()?;
        transfer.allowed().check((None, Quantity::Weight), spec.finite_bytes("", &sources))?;
        self.unchecked |= transfer.allowed() == NonFinite::Allow;
        let values = Values::Bytes(&sources);
        let overwritten = contents::upload(&spec, &self.masters.contents_of(&values), transfer);
        self.round_after(overwritten)
    }

    /// The names, shapes and positions.
    pub fn spec(&self) -> &ParameterSpec {
        self.masters.spec()
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        self.masters.device()
    }

    /// Returns the error text for the first tensor that is not finite: of the gradients, if given,
    /// then of the weights, trained and frozen. `seen` is appended and states when it was found.
    /// Waits.
    pub fn first_not_finite(&self, gradients: Option<&Gradients>, seen: &str) -> Result<String> {
        if let Some(gradients) = gradients
            && let Some(name) = gradients.first_not_finite()?
        {
            return Ok(format!("the gradient of `{name}`{seen}"));
        }
        if let Some(name) = self.masters.first_not_finite()? {
            return Ok(format!("`{name}`{seen}"));
        }
        if let Some(name) = self.frozen.first_not_finite(self.spec())? {
            return Ok(format!("the frozen `{name}`{seen}"));
        }
        let all = if gradients.is_some() { "all gradients and weights" } else { "all weights" };
        Ok(format!("none, {all} are finite{seen}: a sum of finite numbers overflowed"))
    }

    /// Returns an error that names the first tensor that is not finite, after this many updates.
    /// Waits.
    pub fn check_finite(&self, update: u64) -> Result<()> {
        let first = self.masters.first_not_finite()?.map(|name| (name.to_owned(), false));
        NonFinite::Reject.check((Some(update), Quantity::Weight), first)
    }

    /// True if a caller has written values that are not finite, or was allowed to. This does not
    /// cover values that kernels write.
    pub fn are_unchecked(&self) -> bool {
        self.unchecked
    }

    /// Lends one parameter's weights to kernels of a step.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device, or the handle belongs to another
    /// parameter spec.
    pub fn lend<'b, 's>(&'b self, step: &Step<'s>, parameter: Parameter) -> Result<Lent<'b, 's>> {
        self.lend_as(step, parameter)
    }

    /// Lends one parameter's weights as S stores them to kernels of a step. BF16 comes from the
    /// copy, or from a frozen parameter in BF16 itself. A frozen parameter in BF16 that is lent as
    /// f32, and one in NF4, is converted into memory of the step first, which the step keeps. See
    /// [`Parameters::matrix`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy.
    #[track_caller]
    pub fn lend_as<'b, 's, S: Stored>(&'b self, step: &Step<'s>, parameter: Parameter) -> Result<Lent<'b, 's, S>> {
        Ok(self.matrix(step, parameter)?.keep())
    }

    /// Lends one parameter's weights like [`Parameters::lend_as`], to an op that frees converted
    /// weights when it has queued its launches.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy; [`Error::ArenaFull`] when converted weights have no
    /// room.
    #[track_caller]
    pub fn matrix<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        parameter: Parameter,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        let entry = self.spec().entry(parameter)?;
        if let Some(stored) = entry.frozen() {
            return self.frozen.lend(step, entry, stored);
        }
        self.masters.lend(step, entry.range(), entry.shape())
    }

    /// Lends a stack's weights from the first member's start to the last member's end, flat.
    /// [`ParameterSpec::stack`] returns each member's position.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a stack without members.
    pub fn lend_stack<'b, 's>(&'b self, step: &Step<'s>, stack: &StackedParameters) -> Result<Lent<'b, 's>> {
        self.lend_stack_as(step, stack)
    }

    /// Lends a stack's weights as S stores them, flat. BF16 comes from the copy.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no copy.
    pub fn lend_stack_as<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        stack: &StackedParameters,
    ) -> Result<Lent<'b, 's, S>> {
        if let Some(stored) = self.spec().head(stack)?.frozen() {
            return self.frozen.lend_stack(step, self.spec(), stack, stored);
        }
        let (span, _) = self.spec().span(stack)?;
        let shape = [span.len()].into();
        Ok(self.masters.lend(step, span, shape)?.keep())
    }

    /// Waits, and returns one parameter's weights.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec.
    pub fn read(&self, parameter: Parameter) -> Result<Vec<f32>> {
        self.read_as(parameter)
    }

    /// Waits, and returns one parameter's weights as S, to which they are converted.
    pub fn read_as<S: Stored>(&self, parameter: Parameter) -> Result<Vec<S>> {
        let entry = self.spec().entry(parameter)?;
        match entry.frozen() {
            Some(stored) => self.frozen.read(entry, stored),
            None => Ok(self.masters.read(entry.range())?.into_iter().map(S::narrow).collect()),
        }
    }

    /// Waits, and returns all trained weights as one flat region of the spec.
    pub fn read_flat(&self) -> Result<Vec<f32>> {
        self.masters.read(0..self.spec().elements())
    }

    /// The flat regions in which the trained weights are stored: one of f32, or the halves of split
    /// masters and then their corrections, four in a word.
    pub fn regions(&self) -> Vec<AnyBuffer<'_>> {
        self.masters.regions()
    }

    /// The flat region of BF16 that products read, with the same positions, if there is one: the
    /// copy of all trained weights, or the halves of split masters.
    pub fn bf16_copy(&self) -> Option<&Buffer<bf16>> {
        self.masters.bf16().map(|region| &region.values)
    }

    /// Overwrites one parameter's weights, row-major, after the work queued before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the handle belongs to another parameter spec, or the number of
    /// elements differs.
    pub fn write(&mut self, parameter: Parameter, values: &[f32]) -> Result<()> {
        self.write_as(parameter, values)
    }

    /// Overwrites one parameter's weights like [`Parameters::write`], with values of S. They are
    /// converted to the parameter's type: exactly to f32, rounded to BF16, and quantised to NF4.
    pub fn write_as<S: Stored>(&mut self, parameter: Parameter, values: &[S]) -> Result<()> {
        let spec = self.spec().clone();
        let entry = spec.entry(parameter)?;
        let range = entry.range();
        if values.len() != entry.shape().elements() {
            let expected = format!("{} values for `{}` {}", entry.shape().elements(), entry.name(), entry.shape());
            return Err(Error::misuse("write", expected, values.len().to_string()));
        }
        self.unchecked |= !are_finite(values);
        if let Some(stored) = entry.frozen() {
            return self.frozen.write(entry, stored, values);
        }
        self.masters.write(range.start, values)
    }

    /// Overwrites a matrix of a parameter that is frozen in NF4. `number` is its place among the
    /// parameter's [`matrices`](ParameterEntry::matrices).
    ///
    /// # Errors
    /// [`Error::Misuse`] when the parameter is not in NF4, has no such matrix, or the matrix has
    /// other extents.
    pub fn write_nf4(&mut self, parameter: Parameter, number: usize, matrix: &Nf4Matrix<'_>) -> Result<()> {
        let entry = nf4_entry("write_nf4", self.masters.spec(), parameter)?;
        self.unchecked |= !matrix.factors.iter().chain([&matrix.offset]).all(|&value| is_finite(value));
        self.frozen.write_nf4(entry, number, matrix)
    }

    /// Quantises a matrix of a parameter that is frozen in NF4, like [`Parameters::write_nf4`]. The
    /// weights are `[outputs, inputs]`, as in a file. [`Parameters::write`] writes the same from
    /// `[inputs, outputs]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the parameter is not in NF4, has no such matrix, or the number of
    /// weights differs.
    pub fn quantise<S: Stored>(&mut self, parameter: Parameter, number: usize, weights: &[S]) -> Result<()> {
        let entry = nf4_entry("quantise", self.masters.spec(), parameter)?;
        self.unchecked |= !are_finite(weights);
        self.frozen.quantise(entry, number, weights)
    }

    /// The SHA-256 of names, shapes, types and bytes of the frozen weights, in hexadecimal, or
    /// `None` if no parameter is frozen. It is computed once, and again after a write.
    pub fn frozen_sha256(&self) -> Result<Option<String>> {
        self.frozen.sha256(self.spec())
    }

    /// Lends all trained weights to kernels of a step that write them.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device.
    pub fn lend_masters<'b, 's>(&'b mut self, step: &Step<'s>) -> Result<LentMasters<'b, 's>> {
        self.masters.lend_mut(step)
    }

    /// Lends all trained weights to a backward pass, which lets those be written that it no longer
    /// reads.
    pub(crate) fn lend_to_pass<'b, 's>(&'b self, step: &Step<'s>) -> Result<LentMasters<'b, 's>> {
        self.masters.lend_to_pass(step)
    }

    /// Queues the rounding of all weights to their copy, if there is one.
    #[track_caller]
    pub fn queue_copy(&mut self, step: &Step<'_>) -> Result<()> {
        match self.lend_masters(step)? {
            LentMasters::F32 { weights, copy: Some(mut copy) } => {
                step.launch(cast_to_bf16 { x: weights.slice(), out: copy.out() })
            }
            LentMasters::F32 { copy: None, .. } | LentMasters::Split { .. } => Ok(()),
        }
    }

    /// The SHA-256 of names, shapes and the trained weights' bytes (little-endian f32), in the
    /// spec's order, in hexadecimal.
    pub fn sha256(&self) -> Result<String> {
        let mut hash = Sha256::new();
        for entry in self.spec().entries() {
            hash.update(format!("{}{}\n", entry.name(), entry.shape()));
            self.masters.for_each_piece(entry.range(), &mut |piece| {
                hash.update(bytemuck::cast_slice(piece));
                Ok(())
            })?;
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Returns the entry of a parameter, which must be frozen in NF4.
fn nf4_entry<'l>(op: &'static str, spec: &'l ParameterSpec, parameter: Parameter) -> Result<&'l ParameterEntry> {
    let entry = spec.entry(parameter)?;
    if entry.frozen() == Some(FrozenType::Nf4) {
        return Ok(entry);
    }
    Err(Error::misuse(op, "a parameter that is frozen in NF4", format!("`{}`", short(entry.name()))))
}

/// Draws the next elements of a parameter from element `first` on, and writes each as `write`
/// encodes it. They are zeros if the program loads the parameter. `drawn` is the number of random
/// numbers that the parameters before each one have used.
pub(super) fn draw<const N: usize>(
    entry: &ParameterEntry,
    first: usize,
    seed: u64,
    drawn: &[u64],
    place: &mut [[u8; N]],
    write: impl Fn(f32) -> [u8; N],
) {
    if entry.is_loaded {
        return place.fill(write(0.0));
    }
    if let Initializer::Constant(constant) = entry.initializer {
        return place.fill(write(constant));
    }
    let before = first as u64 * entry.initializer.draws();
    let mut random = SplitMix64::after(seed, drawn[entry.number] + before);
    float_mode::in_default(|| place.iter_mut().for_each(|word| *word = write(entry.initializer.draw(&mut random))));
}
