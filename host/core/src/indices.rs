//! Indices on the device: class labels and token ids, with the host's knowledge of them.
//!
//! An upload of indices is a type of its own, so that an op can check its bound on the host.
//!
//! Invariant: an op reads indices only through [`IndexSource`]. Each index that the host knows is
//! therefore below the op's bound before anything is queued: indices of an upload when the op is
//! called, and inputs of a recorded step before each replay.

#![forbid(unsafe_code)]

use crate::error::Result;
use crate::preconditions::IndexBound;
use crate::step::{EagerStep, ScratchStep, Step};
use crate::tensor::{Memory, Saved, Shape, Source};
use kernels::loss::IGNORED;
use std::fmt;

/// Class labels or token ids: integers that index classes or rows. [`EagerStep::upload_indices`]
/// and [`DeviceBatch::indices`](crate::DeviceBatch::indices) make them. They are read-only until
/// their step ends.
#[derive(Clone, Copy)]
pub struct Indices<'s> {
    values: Saved<'s, u32>,
    known: Known,
}

/// The host's knowledge of indices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known {
    /// The largest index of an upload, its largest index other than [`IGNORED`], and the number of
    /// these others.
    Upload { largest: [u32; 2], counted: usize },
    /// The number of an input of a recorded step. Each replay has other indices.
    Input(usize),
    /// Only the device has the indices.
    Nothing,
}

impl Known {
    /// Returns the host's knowledge of uploaded indices.
    pub(crate) fn of(values: &[u32]) -> Self {
        let largest = |all: &mut dyn Iterator<Item = u32>| all.max().unwrap_or(0);
        let counted = || values.iter().copied().filter(|&value| value != IGNORED);
        let largest = [largest(&mut values.iter().copied()), largest(&mut counted())];
        Self::Upload { largest, counted: counted().count() }
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` has no indices that an op of this step can check",
    note = "indices come from `upload_indices` or from an input's `indices`; `OnDevice` has those that the host cannot know"
)]
/// Indices that an op of the step `'s` can read: [`Indices`], or [`OnDevice`].
pub trait IndexSource<'s>: sealed::Sealed {
    /// The tensor that has the indices.
    type Values: Source<'s, u32>;

    /// The extents.
    fn shape(&self) -> Shape;

    /// Returns the tensor, if all indices that the host knows are within the bound. An op calls
    /// this before it queues anything. Inputs of a recorded step are checked before each replay.
    ///
    /// # Errors
    /// [`Error::Label`](crate::Error::Label) with the place of the first invalid index.
    fn within(&self, step: &Step<'s>, bound: IndexBound) -> Result<&Self::Values>;

    /// Returns the number of indices other than [`IGNORED`]. `None` if the host does not know it:
    /// inputs of a recorded step have other indices in each replay.
    fn counted(&self) -> Option<usize>;
}

impl<'s> Indices<'s> {
    pub(crate) fn new(memory: Memory<u32>, shape: Shape, known: Known) -> Self {
        Self { values: Saved::new(memory, shape), known }
    }

    /// Uses integers that only the device has as indices. The host does not check them. Ops turn
    /// rows with an invalid index into NaN.
    pub fn on_device(values: Saved<'s, u32>) -> Self {
        Self { values, known: Known::Nothing }
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.values.shape()
    }

    /// The indices as plain integers.
    pub fn values(&self) -> &Saved<'s, u32> {
        &self.values
    }

    /// Returns the same indices with other extents.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) when the number of elements differs.
    pub fn reshape(self, shape: impl Into<Shape>) -> Result<Self> {
        Ok(Self { values: self.values.reshape(shape)?, ..self })
    }

    /// Returns the indices for a scope that ends before `'s`.
    pub(crate) fn lend<'i>(&self) -> Indices<'i> {
        Indices::new(self.values.memory(), self.shape(), self.known)
    }
}

impl<'s> IndexSource<'s> for Indices<'s> {
    type Values = Saved<'s, u32>;

    fn shape(&self) -> Shape {
        self.values.shape()
    }

    fn within(&self, step: &Step<'s>, bound: IndexBound) -> Result<&Saved<'s, u32>> {
        match self.known {
            Known::Upload { largest, .. } if largest[usize::from(bound.ignored)] as usize >= bound.classes => {
                // An empty upload has no index, and a dry run has none on its device.
                bound.check(&self.values.memory().download(step.device(), step.region().time_left())?)?;
            }
            Known::Input(number) => step.region().conditions().bound(number, bound),
            Known::Upload { .. } | Known::Nothing => {}
        }
        Ok(&self.values)
    }

    fn counted(&self) -> Option<usize> {
        match self.known {
            Known::Upload { counted, .. } => Some(counted),
            Known::Input(_) | Known::Nothing => None,
        }
    }
}

/// Integers that only the device has, used as indices: the output of a kernel, or a buffer lent to
/// the step. The host does not check them. Ops turn rows with an invalid index into NaN.
#[derive(Debug)]
pub struct OnDevice<'a, I>(pub &'a I);

impl<'s, I: Source<'s, u32>> IndexSource<'s> for OnDevice<'_, I> {
    type Values = I;

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn within(&self, _: &Step<'s>, _: IndexBound) -> Result<&I> {
        Ok(self.0)
    }

    fn counted(&self) -> Option<usize> {
        None
    }
}

impl<'s> EagerStep<'s> {
    /// Uploads class labels or token ids. Ops that use them check on the host that they are valid.
    #[track_caller]
    pub fn upload_indices(&self, values: &[u32], shape: impl Into<Shape>) -> Result<Indices<'s>> {
        Ok(Indices { values: self.upload(values, shape)?.save(), known: Known::of(values) })
    }
}

impl<'i, 'o> ScratchStep<'i, 'o> {
    /// Lends indices of the outer step.
    pub fn lend_indices(&self, indices: &Indices<'o>) -> Indices<'i> {
        indices.lend()
    }
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for super::Indices<'_> {}
    impl<I> Sealed for super::OnDevice<'_, I> {}
}

impl fmt::Debug for Indices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Indices{}", self.shape())
    }
}
