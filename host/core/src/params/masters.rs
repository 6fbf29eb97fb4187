//! The trained weights in the type in which they are stored: f32, or split masters.
//!
//! Invariant: the padding between parameters stays zero, in each region. Whenever a kernel can read
//! a BF16 copy, it equals the rounded f32 weights, because all code that writes the weights also
//! writes the copy.

#![forbid(unsafe_code)]

use super::contents::{RegionContents, Values, WriteRegion};
use super::matrix::MatrixWeights;
use super::spec::{MasterType, ParameterSpec, StateType};
use super::weights::Flat;
use crate::buffer::{AnyBuffer, Buffer, PIECE_BYTES};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::non_finite::are_finite;
use crate::step::Step;
use crate::tensor::{Element, Lent, LentMut, Memory, Shape, Source, Stored, Target};
use cuda_std::launch::PointerMut;
use half::bf16;
use kernels::cast::cast_to_bf16;
use kernels::split::{join, split};
use kernels::split_masters::join_masters;
use std::any::Any;
use std::ops::Range;

/// The elements whose corrections share a word.
const PER_WORD: usize = 4;

/// The trained weights of a model on a device, by the flat regions in which they are stored.
#[derive(Debug)]
pub(super) enum Masters {
    F32 {
        weights: Flat,
        /// The weights rounded to BF16, at the same positions.
        copy: Option<Flat<bf16>>,
    },
    Split {
        /// The BF16 of each weight, which products read.
        halves: Flat<bf16>,
        /// The corrections, four in a word.
        corrections: Buffer<u32>,
    },
}

/// All trained weights, lent to kernels of a step that write them. Keep the padding between
/// parameters zero.
#[derive(Debug)]
pub enum LentMasters<'b, 's> {
    /// Weights in f32. Write the copy too, if there is one, so that it equals the rounded weights.
    F32 {
        /// The weights.
        weights: LentMut<'b, 's>,
        /// Their BF16 copy.
        copy: Option<LentMut<'b, 's, bf16>>,
    },
    /// Split masters; see [`kernels::split`].
    Split {
        /// The BF16 of each weight.
        halves: LentMut<'b, 's, bf16>,
        /// The corrections, four in a word.
        corrections: LentMut<'b, 's, u32>,
    },
}

/// A part of an optimizer's state for all weights, or for a slice of them, lent to kernels of a
/// step that update it.
#[derive(Debug)]
pub enum LentState<'b, 's> {
    /// State in f32.
    F32(LentMut<'b, 's>),
    /// State in 8 bits; see [`kernels::companded`].
    Bits8(LentMut<'b, 's, u32>),
}

impl<'s> LentState<'_, 's> {
    /// The type in which the state is stored.
    pub fn stored(&self) -> StateType {
        match self {
            Self::F32(_) => StateType::F32,
            Self::Bits8(_) => StateType::Bits8,
        }
    }

    /// Lends the words of the state.
    pub(crate) fn words(&mut self) -> LentMut<'_, 's, u32> {
        let memory = match self {
            Self::F32(state) => state.memory().cast(),
            Self::Bits8(state) => state.memory(),
        };
        LentMut::new(memory, [memory.len()].into())
    }
}

/// The arguments by which a kernel of an update gets weights of any type.
pub(crate) struct MasterArguments<'a> {
    pub(crate) weights: PointerMut<'a, f32>,
    pub(crate) has_bf16: u32,
    pub(crate) halves: PointerMut<'a, bf16>,
    pub(crate) corrections: PointerMut<'a, u32>,
}

impl LentMasters<'_, '_> {
    /// The type in which the weights are stored.
    pub fn stored(&self) -> MasterType {
        match self {
            Self::F32 { .. } => MasterType::F32,
            Self::Split { .. } => MasterType::Split,
        }
    }

    /// Returns the arguments of a kernel that updates the weights.
    pub(crate) fn arguments(&mut self) -> MasterArguments<'_> {
        let (weights, halves, corrections) = (PointerMut::empty(), PointerMut::empty(), PointerMut::empty());
        let none = MasterArguments { weights, has_bf16: 0, halves, corrections };
        match self {
            Self::F32 { weights, copy: None } => MasterArguments { weights: weights.out(), ..none },
            Self::F32 { weights, copy: Some(copy) } => {
                MasterArguments { weights: weights.out(), has_bf16: 1, halves: copy.out(), ..none }
            }
            Self::Split { halves, corrections } => {
                MasterArguments { halves: halves.out(), corrections: corrections.out(), ..none }
            }
        }
    }

    /// Returns the part with these elements, which begins and ends at multiples of four.
    ///
    /// # Panics
    /// Panics if the range exceeds the weights.
    pub fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32 { weights, copy } => {
                Self::F32 { weights: weights.part(range.clone()), copy: copy.map(|copy| copy.part(range)) }
            }
            Self::Split { halves, corrections } => {
                let corrections = corrections.part(range.start / PER_WORD..range.end.div_ceil(PER_WORD));
                Self::Split { halves: halves.part(range), corrections }
            }
        }
    }
}

impl Masters {
    /// Makes weights with unspecified values.
    pub(super) fn allocate(device: &Device, spec: &ParameterSpec) -> Result<Self> {
        let elements = spec.elements();
        Ok(match spec.masters() {
            MasterType::F32 => {
                let values = Buffer::allocate(device, elements)?;
                Self::F32 { weights: Flat { spec: spec.clone(), values }, copy: None }
            }
            MasterType::Split => {
                let values = Buffer::allocate(device, elements)?;
                let corrections = Buffer::allocate(device, elements / PER_WORD)?;
                Self::Split { halves: Flat { spec: spec.clone(), values }, corrections }
            }
        })
    }

    /// Adds a BF16 copy to weights in f32. Split masters need none.
    pub(super) fn with_bf16_copy(self) -> Result<Self> {
        let Self::F32 { weights, .. } = self else { return Ok(self) };
        let Flat { spec, values } = &weights;
        let copy = Some(Flat { spec: spec.clone(), values: Buffer::allocate(values.device(), values.len())? });
        let masters = Self::F32 { weights, copy };
        masters.round(masters.all())?;
        Ok(masters)
    }

    pub(super) fn spec(&self) -> &ParameterSpec {
        match self {
            Self::F32 { weights, .. } => &weights.spec,
            Self::Split { halves, .. } => &halves.spec,
        }
    }

    pub(super) fn device(&self) -> &Device {
        match self {
            Self::F32 { weights, .. } => weights.values.device(),
            Self::Split { halves, .. } => halves.values.device(),
        }
    }

    /// The elements of all weights.
    fn all(&self) -> Range<usize> {
        0..self.spec().elements()
    }

    /// The regions that hold the weights: f32, or the halves and then the corrections.
    pub(super) fn regions(&self) -> Vec<AnyBuffer<'_>> {
        match self {
            Self::F32 { weights, .. } => vec![AnyBuffer::F32(&weights.values)],
            Self::Split { halves, corrections } => vec![AnyBuffer::Bf16(&halves.values), AnyBuffer::U32(corrections)],
        }
    }

    /// The region in BF16 that products read, if there is one.
    pub(super) fn bf16(&self) -> Option<&Flat<bf16>> {
        match self {
            Self::F32 { copy, .. } => copy.as_ref(),
            Self::Split { halves, .. } => Some(halves),
        }
    }

    /// Rounds these elements to the copy, if there is one. Call it after writing them, even if the
    /// write failed.
    pub(super) fn round(&self, range: Range<usize>) -> Result<()> {
        let Self::F32 { weights, copy: Some(copy) } = self else { return Ok(()) };
        let weights = weights.values.memory().part(range.start, range.len());
        let copy = copy.values.memory().part(range.start, range.len());
        launch_on(self.device(), &cast_to_bf16 { x: weights.as_slice(), out: copy.as_out() })
    }

    /// Describes new contents of all regions, from values in f32.
    pub(super) fn contents_of<'r>(&'r mut self, values: &'r Values<'r>) -> Vec<RegionContents<'r>> {
        let spec = self.spec().clone();
        match self {
            Self::F32 { weights, .. } => {
                let write = |number, entry: &_, within, part: &mut [u8]| {
                    values.write((number, entry), within / size_of::<f32>(), part, f32::to_le_bytes);
                };
                vec![RegionContents::new(&spec, &mut weights.values, Box::new(write))]
            }
            Self::Split { halves, corrections } => {
                let write = |number, entry: &_, within, part: &mut [u8]| {
                    let half = |value| (split(value).0 as u16).to_le_bytes();
                    values.write((number, entry), within / size_of::<bf16>(), part, half);
                };
                let halves = RegionContents::new(&spec, &mut halves.values, Box::new(write));
                let write = |number, entry: &_, within, part: &mut [u8]| {
                    values.write((number, entry), within, part, |value| [split(value).1 as u8]);
                };
                vec![halves, RegionContents::new(&spec, corrections, Box::new(write))]
            }
        }
    }

    /// Describes new contents of all regions, in the order of [`Masters::regions`]: each from the
    /// writer of its bytes.
    pub(super) fn contents<'r>(&'r mut self, writers: Vec<Box<WriteRegion<'r>>>) -> Vec<RegionContents<'r>> {
        let (spec, mut writers) = (self.spec().clone(), writers.into_iter());
        let mut next = || writers.next().expect("a writer for each region");
        match self {
            Self::F32 { weights, .. } => vec![RegionContents::new(&spec, &mut weights.values, next())],
            Self::Split { halves, corrections } => vec![
                RegionContents::new(&spec, &mut halves.values, next()),
                RegionContents::new(&spec, corrections, next()),
            ],
        }
    }

    /// Overwrites elements from `start` on, which are converted on the way to the device.
    pub(super) fn write<S: Stored>(&mut self, start: usize, values: &[S]) -> Result<()> {
        /// Writes the codes of the values from byte `offset` on, and zeros after the last value.
        fn encode<S: Stored, const N: usize>(
            values: &[S],
            offset: usize,
            place: &mut [u8],
            code: impl Fn(f32) -> [u8; N],
        ) {
            let values = values[(offset / N).min(values.len())..].iter().map(|value| code(value.widen()));
            place
                .as_chunks_mut()
                .0
                .iter_mut()
                .zip(values.chain(std::iter::repeat([0; N])))
                .for_each(|(to, of)| *to = of);
        }
        let len = values.len();
        match self {
            Self::F32 { weights, .. } => {
                let fill = |offset, place: &mut [u8]| encode(values, offset, place, f32::to_le_bytes);
                let written = weights.values.write_with(start, len, &fill);
                // A failed upload may have changed some weights.
                let rounded = self.round(start..start + len);
                written.and(rounded)
            }
            Self::Split { halves, corrections } => {
                let half = |value| (split(value).0 as u16).to_le_bytes();
                halves.values.write_with(start, len, &|offset, place| encode(values, offset, place, half))?;
                let correction = |value| [split(value).1 as u8];
                let fill = |offset, place: &mut [u8]| encode(values, offset, place, correction);
                corrections.write_with(start / PER_WORD, len.div_ceil(PER_WORD), &fill)
            }
        }
    }

    /// Waits, and returns the weights of a range that begins at a multiple of four.
    pub(super) fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        match self {
            Self::F32 { weights, .. } => weights.values.read_range(range.start, range.len()),
            Self::Split { halves, corrections } => {
                let words = corrections.read_range(range.start / PER_WORD, range.len().div_ceil(PER_WORD))?;
                let corrections: &[u8] = bytemuck::cast_slice(&words);
                let halves = halves.values.read_range(range.start, range.len())?;
                let both = halves.iter().zip(corrections);
                Ok(both.map(|(half, &correction)| join(half.to_bits().into(), correction.into())).collect())
            }
        }
    }

    /// Passes the weights of a range to `each`, piece by piece. Waits for each piece.
    pub(super) fn for_each_piece(&self, range: Range<usize>, each: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let most = PIECE_BYTES / size_of::<f32>();
        range.clone().step_by(most).try_for_each(|start| each(&self.read(start..range.end.min(start + most))?))
    }

    /// Finds the first parameter that is not finite. Waits. Needs host memory for one piece.
    pub(super) fn first_not_finite(&self) -> Result<Option<&str>> {
        for entry in self.spec().entries() {
            let mut finite = true;
            self.for_each_piece(entry.range(), &mut |piece| {
                finite &= are_finite(piece);
                Ok(())
            })?;
            if !finite {
                return Ok(Some(entry.name()));
            }
        }
        Ok(None)
    }

    /// Lends elements from `range.start` on as S. Split masters are converted to f32 in memory of
    /// the step.
    #[track_caller]
    pub(super) fn lend<'b, 's, S: Stored>(
        &'b self,
        step: &Step<'s>,
        range: Range<usize>,
        shape: Shape,
    ) -> Result<MatrixWeights<'b, 's, S>> {
        if let (Self::Split { halves, corrections }, true) = (self, <S as Element>::NAME == f32::NAME) {
            step.borrow(&halves.values, false)?;
            step.borrow(corrections, false)?;
            let halves = halves.values.memory().part(range.start, range.len());
            let words = range.start / PER_WORD..range.end.div_ceil(PER_WORD);
            let corrections = corrections.memory().part(words.start, words.len());
            let (halves, corrections) = (Lent::new(halves, shape), Lent::new(corrections, [words.len()].into()));
            let out = step.empty::<S>(shape)?;
            let into = &mut LentMut::<f32>::new(out.memory().cast(), shape);
            let (halves, corrections) = (halves.slice(), corrections.slice());
            step.launch(join_masters { halves, corrections, out: into.out() })?;
            return Ok(MatrixWeights::Converted(out));
        }
        let region = self.region_as::<S>()?;
        step.borrow(&region.values, false)?;
        let memory: Memory<S> = region.values.memory().part(range.start, range.len());
        Ok(MatrixWeights::Lent(Lent::new(memory, shape)))
    }

    /// Returns the region of this type.
    fn region_as<S: Stored>(&self) -> Result<&Flat<S>> {
        let f32 = match self {
            Self::F32 { weights, .. } => Some(weights as &dyn Any),
            Self::Split { .. } => None,
        };
        let bf16 = self.bf16().map(|region| region as &dyn Any);
        let found = [f32, bf16].into_iter().flatten().find_map(|region| region.downcast_ref());
        found.ok_or_else(|| {
            let expected = "a copy of the weights in bf16, which `Parameters::with_bf16_copy` makes";
            Error::misuse("lend_as", expected, "only f32 weights")
        })
    }

    /// Lends all weights to kernels of a step that write them.
    pub(super) fn lend_mut<'b, 's>(&'b mut self, step: &Step<'s>) -> Result<LentMasters<'b, 's>> {
        self.lend_to_pass(step)
    }

    /// Lends all weights to a backward pass, which lets those be written that it no longer reads.
    pub(super) fn lend_to_pass<'b, 's>(&'b self, step: &Step<'s>) -> Result<LentMasters<'b, 's>> {
        fn lend<'b, 's, T: Element>(step: &Step<'s>, buffer: &'b Buffer<T>) -> Result<LentMut<'b, 's, T>> {
            step.borrow(buffer, true)?;
            Ok(LentMut::new(buffer.memory(), [buffer.len()].into()))
        }
        match self {
            Self::F32 { weights, copy } => {
                let copy = copy.as_ref().map(|copy| lend(step, &copy.values)).transpose()?;
                Ok(LentMasters::F32 { weights: lend(step, &weights.values)?, copy })
            }
            Self::Split { halves, corrections } => {
                Ok(LentMasters::Split { halves: lend(step, &halves.values)?, corrections: lend(step, corrections)? })
            }
        }
    }
}
