//! Batches in host memory: tuples and derived structs of arrays, with one entry for each sample.
//!
//! An array of f32, BF16 or u32, or of nested arrays of these, is an input of the batch.
//! `Vec<[f32; 3]>` is an input `[samples, 3]`. A batch with inputs of other kinds implements
//! [`HostBatch`] itself.
//!
//! Invariant: all arrays of a batch have the same number of samples.

#![forbid(unsafe_code)]

use stepscope_core::{Element, Error, HostInputs, Result, Shape, bf16};

/// Samples in host memory: a batch, or a part of one.
///
/// Tuples of [`HostArray`]s are batches, whose inputs have numbers. A struct derives it, and its
/// inputs also have the names of its fields:
///
/// ```
/// use stepscope::prelude::*;
///
/// #[derive(HostBatch)]
/// struct Flowers {
///     /// `[samples, 4]`, f32.
///     sizes: Vec<[f32; 4]>,
///     /// `[samples]`, u32: labels are `batch.indices("species")`.
///     species: Vec<u32>,
/// }
///
/// # fn main() -> Result<()> {
/// let flowers = Flowers { sizes: vec![[5.1, 3.5, 1.4, 0.2], [6.2, 2.9, 4.3, 1.3]], species: vec![0, 1] };
/// assert_eq!(flowers.len(), 2);
/// assert_eq!(flowers.inputs()?.indices("species")?, [0, 1]);
/// let tuple = (vec![[5.1f32, 3.5, 1.4, 0.2]], vec![0u32]);
/// assert_eq!(tuple.inputs()?.indices(1)?, [0]);
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no batch of samples",
    note = "a tuple of arrays such as `(Vec<[f32; 3]>, Vec<u32>)` is one, and so is a struct with `#[derive(HostBatch)]`"
)]
pub trait HostBatch {
    /// Returns the number of samples, which is above zero.
    fn len(&self) -> usize;

    /// Returns true if there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the values of the samples, in the order in which the model reads its inputs.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a shape's element count differs from the number of values, or the
    /// arrays have different numbers of samples.
    fn inputs(&self) -> Result<HostInputs<'_>>;
}

impl<B: HostBatch + ?Sized> HostBatch for &B {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        (**self).inputs()
    }
}

/// One value of a batch for each sample, such as `Vec<[f32; 3]>` or `Option<Vec<u32>>`. `None` is
/// no input.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no array of samples",
    note = "an array has one f32, bf16 or u32 for each sample, or nested arrays of these, such as `Vec<[f32; 3]>`"
)]
pub trait HostArray {
    /// Returns the number of samples, or none if there is no array.
    fn samples(&self) -> Option<usize>;

    /// Appends the array to a batch of this many samples, with this name unless it is empty.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it has another number of samples.
    fn append<'i>(&'i self, inputs: HostInputs<'i>, samples: usize, name: &'static str) -> Result<HostInputs<'i>>;
}

impl<T: Sample> HostArray for [T] {
    fn samples(&self) -> Option<usize> {
        Some(self.len())
    }

    fn append<'i>(&'i self, inputs: HostInputs<'i>, samples: usize, name: &'static str) -> Result<HostInputs<'i>> {
        if self.len() != samples {
            let array = if name.is_empty() { "each array of the batch".into() } else { format!("`{name}`") };
            let expected = format!("{samples} samples in {array}, as in the first array");
            return Err(Error::misuse("batch", expected, self.len().to_string()));
        }
        Ok(inputs.with(T::elements(self), T::shape(samples))?.named(name))
    }
}

/// Forwards to the array inside.
macro_rules! forward {
    ($([$($generics:tt)*] $array:ty: |$this:ident| $inner:expr;)*) => {$(
        impl<$($generics)*> HostArray for $array {
            fn samples(&self) -> Option<usize> {
                let $this = self;
                $inner.and_then(|array| array.samples())
            }

            fn append<'i>(
                &'i self,
                inputs: HostInputs<'i>,
                samples: usize,
                name: &'static str,
            ) -> Result<HostInputs<'i>> {
                let $this = self;
                match $inner {
                    Some(array) => array.append(inputs, samples, name),
                    None => Ok(inputs),
                }
            }
        }
    )*};
}

forward! {
    [T: Sample] Vec<T>: |this| Some(this.as_slice());
    [T: Sample, const N: usize] [T; N]: |this| Some(this.as_slice());
    [A: HostArray + ?Sized] &A: |this| Some(&**this);
    [A: HostArray + ?Sized] Box<A>: |this| Some(&**this);
    [A: HostArray] Option<A>: |this| this.as_ref();
}

/// A value of one sample: a number, or nested arrays of numbers.
pub trait Sample: Sized {
    /// The type of the numbers.
    type Element: Element;

    /// The number of extents of a sample.
    const RANK: usize;

    /// Returns the numbers of all samples.
    fn elements(samples: &[Self]) -> &[Self::Element];

    /// Returns the shape of this many samples.
    fn shape(samples: usize) -> Shape;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Sample for $number {
            type Element = Self;

            const RANK: usize = 0;

            fn elements(samples: &[Self]) -> &[Self] {
                samples
            }

            fn shape(samples: usize) -> Shape {
                [samples].into()
            }
        }
    )*};
}

numbers! { f32 bf16 u32 }

impl<S: Sample, const N: usize> Sample for [S; N] {
    type Element = S::Element;

    const RANK: usize = 1 + S::RANK;

    fn elements(samples: &[Self]) -> &[S::Element] {
        S::elements(samples.as_flattened())
    }

    fn shape(samples: usize) -> Shape {
        const { assert!(Self::RANK < Shape::MAX_RANK, "a shape has at most four extents, the samples included") };
        // The samples within one of these arrays.
        match *S::shape(N).extents() {
            [first] => [samples, first].into(),
            [first, second] => [samples, first, second].into(),
            [first, second, third] => [samples, first, second, third].into(),
            _ => unreachable!("checked above"),
        }
    }
}

macro_rules! tuples {
    ($(($($array:ident $number:tt)*))*) => {$(
        impl<$($array: HostArray),*> HostBatch for ($($array,)*) {
            fn len(&self) -> usize {
                [$(self.$number.samples()),*].into_iter().flatten().next().unwrap_or(0)
            }

            fn inputs(&self) -> Result<HostInputs<'_>> {
                let (inputs, samples) = (HostInputs::new(), self.len());
                $(let inputs = self.$number.append(inputs, samples, "")?;)*
                Ok(inputs)
            }
        }
    )*};
}

tuples! { (A 0) (A 0 B 1) (A 0 B 1 C 2) (A 0 B 1 C 2 D 3) }

/// A batch that [`Trainer::fit`](super::Trainer::fit) trains on: a [`HostBatch`], several as the
/// parts of one batch, or the result of reading one.
///
/// Each part is a step of its own, and the gradients of all parts are added up.
pub trait IntoBatch {
    /// The type of a part.
    type Part: HostBatch;

    /// Returns the parts.
    ///
    /// # Errors
    /// The error of reading the batch.
    fn into_batch(self) -> Result<Vec<Self::Part>>;
}

impl<B: HostBatch> IntoBatch for B {
    type Part = B;

    fn into_batch(self) -> Result<Vec<B>> {
        Ok(vec![self])
    }
}

impl<B: HostBatch> IntoBatch for Vec<B> {
    type Part = B;

    fn into_batch(self) -> Result<Self> {
        Ok(self)
    }
}

impl<I: IntoBatch> IntoBatch for Result<I> {
    type Part = I::Part;

    fn into_batch(self) -> Result<Vec<I::Part>> {
        self?.into_batch()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn arrays_have_their_shapes() {
        let batch = (vec![[[1.0f32, 2.0, 3.0]; 2]; 5], vec![7u32; 5], [bf16::ONE; 5], None::<Vec<f32>>);
        let inputs = batch.inputs().unwrap();
        assert_eq!((batch.len(), inputs.indices(1)), (5, Ok(&[7; 5][..])));
        let shown = format!("{inputs:?}");
        assert!(shown.contains("[5, 2, 3]") && shown.contains("bf16"), "{shown}");
        assert_eq!(<[[[f32; 2]; 3]; 4]>::shape(5), [5, 4, 3, 2].into());
        assert_eq!(<[[[f32; 2]; 3]; 4]>::elements(&[[[[1.0; 2]; 3]; 4]; 5]), [1.0; 120]);
    }

    #[test]
    fn absent_arrays_are_no_inputs() {
        let batch = (None::<Vec<f32>>, vec![1u32, 2]);
        assert_eq!((batch.len(), batch.inputs().unwrap().indices(0)), (2, Ok(&[1, 2][..])));
        assert!((None::<Vec<f32>>,).is_empty());
    }

    #[test]
    fn different_sample_counts_are_refused() {
        let error = (vec![1.0f32; 3], vec![1u32; 2]).inputs().unwrap_err().to_string();
        assert!(error.ends_with("3 samples in each array of the batch, as in the first array, got 2"), "{error}");
    }

    #[test]
    fn batches_become_parts() {
        let batch = || (vec![1.0f32; 3],);
        assert_eq!(batch().into_batch().unwrap().len(), 1);
        assert_eq!(vec![batch(), batch()].into_batch().unwrap().len(), 2);
        let broken = Error::Loader { reason: "the disk is gone".into() };
        assert_eq!(Err::<Vec<(Vec<f32>,)>, _>(broken.clone()).into_batch().unwrap_err(), broken);
    }
}
