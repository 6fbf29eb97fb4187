//! Frozen weights: one flat region for each type in which they are stored.
//!
//! Invariant: no kernel writes a frozen weight, so the digest of frozen weights changes only when
//! the host writes one. The BF16 copy of frozen f32 weights equals these weights, rounded.
//!
//! Matrices in NF4 are decoded into memory of the step once for each product. If the prologue of a
//! product decoded them, each row of tiles would decode the weights again.

#![forbid(unsafe_code)]

use super::matrix::MatrixWeights;
use super::nf4::{self, Nf4Matrix};
use super::spec::{FrozenType, ParameterEntry, ParameterSpec, StackedParameters};
use super::weights::draw;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::digest::hex;
use crate::error::{Error, Result};
use crate::initializer::Initializer;
use crate::launch::launch_on;
use crate::non_finite::all_finite;
use crate::step::Step;
use crate::tensor::{Element, Lent, LentMut, Memory, Shape, Source, Stored, Target};
use crate::upload::{Content, Transfer};
use half::bf16;
use kernels::cast::{cast_to_bf16, cast_to_f32};
use sha2::{Digest, Sha256};
use std::sync::OnceLock;

/// The frozen weights of a model on a device.
#[derive(Debug, Default)]
pub(super) struct Frozen {
    f32: Option<Buffer<f32>>,
    /// The weights of `f32` rounded to BF16, at the same positions.
    copy: Option<Buffer<bf16>>,
    bf16: Option<Buffer<bf16>>,
    /// The words of matrices in NF4.
    nf4: Option<Buffer<u32>>,
    digest: OnceLock<String>,
}

impl Frozen {
    /// Makes the frozen weights of a spec with their initializers. `drawn` is the number of random
    /// numbers that the parameters before each one have used.
    pub(super) fn new(device: &Device, spec: &ParameterSpec, seed: u64, drawn: &[u64]) -> Result<Self> {
        let f32 = region(device, spec, FrozenType::F32, &|entry: &ParameterEntry, within, part: &mut [u8]| {
            draw(entry, within / size_of::<f32>(), seed, drawn, part.as_chunks_mut().0, f32::to_le_bytes);
        })?;
        let bf16 = region(device, spec, FrozenType::Bf16, &|entry: &ParameterEntry, within, part: &mut [u8]| {
            let rounded = |value| bf16::from_f32(value).to_le_bytes();
            draw(entry, within / size_of::<bf16>(), seed, drawn, part.as_chunks_mut().0, rounded);
        })?;
        let mut frozen = Self { f32, bf16, nf4: None, ..Self::default() };
        frozen.nf4 = region(device, spec, FrozenType::Nf4, &nf4::fill_zeros)?;
        let is_zero = |entry: &ParameterEntry| entry.initializer == Initializer::ZERO || entry.is_loaded;
        let others = |entry: &&ParameterEntry| !is_zero(entry) && !device.is_dry_run();
        for entry in spec.frozen(FrozenType::Nf4).iter().filter(others) {
            let mut values = vec![[0; 4]; entry.shape().elements()];
            draw(entry, 0, seed, drawn, &mut values, f32::to_le_bytes);
            let values: Vec<f32> = values.into_iter().map(f32::from_le_bytes).collect();
            frozen.write_words(entry.start(), &nf4::quantise(entry, &values))?;
        }
        Ok(frozen)
    }

    /// Adds a BF16 copy of the weights in f32, if a product reads any of them.
    pub(super) fn with_bf16_copy(self, spec: &ParameterSpec) -> Result<Self> {
        let read_by_products = |entry: &ParameterEntry| entry.shape().extents().len() > 1;
        let copy = match &self.f32 {
            Some(values) if spec.frozen(FrozenType::F32).iter().any(read_by_products) => {
                Some(Buffer::allocate(values.device(), values.len())?)
            }
            _ => None,
        };
        let frozen = Self { copy, ..self };
        frozen.round(0, frozen.f32.as_ref().map_or(0, Buffer::len))?;
        Ok(frozen)
    }

    /// Rounds these elements to the copy, if there is one.
    fn round(&self, start: usize, len: usize) -> Result<()> {
        let (Some(values), Some(copy)) = (&self.f32, &self.copy) else { return Ok(()) };
        let (x, out) = (values.memory().part(start, len), copy.memory().part(start, len));
        launch_on(values.device(), &cast_to_bf16 { x: x.as_slice(), out: out.as_out() })
    }

    /// Lends a parameter as S. NF4 is decoded into memory of the step, and BF16 is widened there.
    #[track_caller]
    pub(super) fn lend<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        entry: &ParameterEntry,
        stored: FrozenType,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        match stored {
            FrozenType::Nf4 => {
                let words = part(step, &self.nf4, entry.start(), entry.stored_elements())?;
                Ok(MatrixWeights::Converted(nf4::decoded(step, entry, words)?))
            }
            _ => self.lend_range(step, stored, entry.start(), entry.shape()),
        }
    }

    /// Lends a range of a region of f32 or BF16 as S.
    #[track_caller]
    fn lend_range<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        stored: FrozenType,
        start: usize,
        shape: Shape,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        let (len, as_f32) = (shape.elements(), <S as Element>::NAME == f32::NAME);
        let memory: Memory<S> = match (stored, as_f32) {
            (FrozenType::F32, true) => part(step, &self.f32, start, len)?.cast(),
            (FrozenType::F32, false) => {
                let Some(copy) = &self.copy else {
                    let expected = "a copy of the weights in bf16, which `Parameters::with_bf16_copy` makes";
                    return Err(Error::misuse("lend_as", expected, "only f32 weights"));
                };
                step.borrow(copy, false)?;
                copy.memory().part(start, len).cast()
            }
            (FrozenType::Bf16, false) => part(step, &self.bf16, start, len)?.cast(),
            (FrozenType::Bf16, true) => {
                let narrow = Lent::<bf16>::new(part(step, &self.bf16, start, len)?, shape);
                let out = step.empty::<S>(shape)?;
                let into = &mut LentMut::new(out.memory().cast(), shape);
                step.launch(cast_to_f32 { x: narrow.slice(), out: into.out() })?;
                return Ok(MatrixWeights::Converted(out));
            }
            (FrozenType::Nf4, _) => {
                return Err(Error::misuse("lend_stack", "members of a stack in f32 or BF16", "members in NF4"));
            }
        };
        Ok(MatrixWeights::Lent(Lent::new(memory, shape)))
    }

    /// Lends a stack, flat, as S.
    pub(super) fn lend_stack<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        spec: &ParameterSpec,
        stack: &StackedParameters,
        stored: FrozenType,
    ) -> Result<Lent<'b, 's, S>> {
        let (span, _) = spec.span(stack)?;
        Ok(self.lend_range(step, stored, span.start, [span.len()].into())?.keep())
    }

    /// Overwrites a parameter, from its first element on, with values that are converted to its
    /// type.
    pub(super) fn write<S: Stored>(&mut self, entry: &ParameterEntry, stored: FrozenType, values: &[S]) -> Result<()> {
        self.digest = OnceLock::new();
        let start = entry.start();
        match stored {
            FrozenType::F32 => {
                let written = write(&mut self.f32, start, values);
                // A failed upload may have changed some weights.
                let rounded = self.round(start, values.len());
                written.and(rounded)
            }
            FrozenType::Bf16 => write(&mut self.bf16, start, values),
            FrozenType::Nf4 => self.write_words(start, &nf4::quantise(entry, values)),
        }
    }

    /// Overwrites a matrix of a parameter in NF4.
    pub(super) fn write_nf4(&mut self, entry: &ParameterEntry, number: usize, matrix: &Nf4Matrix<'_>) -> Result<()> {
        let (first, words) = nf4::packed(entry, number, matrix)?;
        self.digest = OnceLock::new();
        self.write_words(entry.start() + first, &words)
    }

    /// Quantises a matrix of a parameter in NF4.
    pub(super) fn quantise<S: Stored>(&mut self, entry: &ParameterEntry, number: usize, weights: &[S]) -> Result<()> {
        let (first, words) = nf4::quantised(entry, number, weights)?;
        self.digest = OnceLock::new();
        self.write_words(entry.start() + first, &words)
    }

    fn write_words(&mut self, start: usize, words: &[u32]) -> Result<()> {
        self.nf4.as_mut().expect("a spec with parameters of this type has the region").write(start, words)
    }

    /// Waits, and returns the weights of a parameter as S.
    pub(super) fn read<S: Stored>(&self, entry: &ParameterEntry, stored: FrozenType) -> Result<Vec<S>> {
        let (start, len) = (entry.start(), entry.shape().elements());
        match stored {
            FrozenType::F32 => convert(existing(&self.f32).read_range(start, len)?),
            FrozenType::Bf16 => convert(existing(&self.bf16).read_range(start, len)?),
            FrozenType::Nf4 => Ok(nf4::values(entry, &existing(&self.nf4).read_range(start, entry.stored_elements())?)),
        }
    }

    /// Finds the first frozen parameter that is not finite. Waits.
    pub(super) fn first_not_finite<'l>(&self, spec: &'l ParameterSpec) -> Result<Option<&'l str>> {
        for entry in spec.frozen(FrozenType::F32) {
            for piece in existing(&self.f32).pieces(entry.range()) {
                if !all_finite(bytemuck::cast_slice(&piece?)) {
                    return Ok(Some(entry.name()));
                }
            }
        }
        for entry in spec.frozen(FrozenType::Bf16) {
            for piece in existing(&self.bf16).pieces(entry.range()) {
                if !piece?.iter().all(|value| value.is_finite()) {
                    return Ok(Some(entry.name()));
                }
            }
        }
        for entry in spec.frozen(FrozenType::Nf4) {
            let values: Vec<f32> = self.read(entry, FrozenType::Nf4)?;
            if !all_finite(bytemuck::cast_slice(&values)) {
                return Ok(Some(entry.name()));
            }
        }
        Ok(None)
    }

    /// The SHA-256 of names, shapes, types and bytes of the frozen weights, or `None` if there are
    /// none. Waits the first time, and after a write.
    pub(super) fn sha256(&self, spec: &ParameterSpec) -> Result<Option<String>> {
        if !spec.has_frozen() {
            return Ok(None);
        }
        if let Some(digest) = self.digest.get() {
            return Ok(Some(digest.clone()));
        }
        let mut hash = Sha256::new();
        for (_, entry) in spec.iter() {
            let Some(stored) = entry.frozen() else { continue };
            hash.update(format!("{}{} {stored:?}\n", entry.name(), entry.shape()));
            match stored {
                FrozenType::F32 => existing(&self.f32).hash_into(&mut hash, entry.range())?,
                FrozenType::Bf16 => existing(&self.bf16).hash_into(&mut hash, entry.range())?,
                FrozenType::Nf4 => existing(&self.nf4).hash_into(&mut hash, entry.range())?,
            }
        }
        let digest = hex(&hash.finalize());
        Ok(Some(self.digest.get_or_init(|| digest).clone()))
    }
}

/// The writer of a part of a parameter: its entry, the first byte within it, and the part's bytes.
type Write<'w> = dyn Fn(&ParameterEntry, usize, &mut [u8]) + Sync + 'w;

/// Makes a region of a type, if the spec has parameters of that type.
fn region<S: Element>(
    device: &Device,
    spec: &ParameterSpec,
    stored: FrozenType,
    write: &Write<'_>,
) -> Result<Option<Buffer<S>>> {
    let region = spec.frozen_region(stored);
    if region.elements == 0 {
        return Ok(None);
    }
    let values = Buffer::allocate(device, region.elements)?;
    let fill = |offset: usize, place: &mut [u8]| {
        region.fill(offset, place, |_, entry, within, part| write(entry, within, part));
    };
    let name = |offset| region.name_at(offset);
    Transfer::new().run(device, &[Content::new(values.memory(), &fill, &name)])?;
    Ok(Some(values))
}

/// Returns the region of a type that a parameter of the spec has.
fn existing<S: Element>(region: &Option<Buffer<S>>) -> &Buffer<S> {
    region.as_ref().expect("a spec with parameters of this type has the region")
}

/// Borrows a region for the step, and returns a part of it.
fn part<S: Element>(step: &Step<'_>, region: &Option<Buffer<S>>, start: usize, len: usize) -> Result<Memory<S>> {
    let region = existing(region);
    step.borrow(region, false)?;
    Ok(region.memory().part(start, len))
}

/// Overwrites elements of a region with values that are converted to its type.
fn write<T: Stored, S: Stored>(region: &mut Option<Buffer<T>>, start: usize, values: &[S]) -> Result<()> {
    let region = region.as_mut().expect("a spec with parameters of this type has the region");
    if <T as Element>::NAME == <S as Element>::NAME {
        return region.write(start, bytemuck::cast_slice(values));
    }
    let values: Vec<T> = values.iter().map(|&value| T::narrow(value.widen())).collect();
    region.write(start, &values)
}

fn convert<T: Stored, S: Stored>(values: Vec<T>) -> Result<Vec<S>> {
    Ok(values.into_iter().map(|value| S::narrow(value.widen())).collect())
}
