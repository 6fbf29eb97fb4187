//! Operands that broadcast, as in NumPy: extents are compared from the last, and an extent that is
//! 1 or absent repeats.
//!
//! Invariant: an operand of a launch is as long as the result, or its layout repeats it, or it is a
//! number.

use crate::error::{Error, Result};
use crate::tensor::{Brand, Element, Shape, Source, Tensor};
use cuda_std::launch::Slice;
use kernels::broadcast::{OPERAND, RANK};
use std::fmt;
use std::marker::PhantomData;

/// An operand of a pointwise op: a tensor, or a number. It is made from a reference to anything
/// that a kernel of the step can read, and from an `f32`.
pub struct Operand<'x, 's, S> {
    values: Option<(Slice<'x, S>, Shape)>,
    number: f32,
    brand: Brand<'s>,
}

impl<S> Clone for Operand<'_, '_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Operand<'_, '_, S> {}

impl<S> fmt::Debug for Operand<'_, '_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.values {
            Some((_, shape)) => write!(f, "{shape}"),
            None => write!(f, "{}", self.number),
        }
    }
}

impl<S> From<f32> for Operand<'_, '_, S> {
    fn from(number: f32) -> Self {
        Self { values: None, number, brand: PhantomData }
    }
}

impl<'x, 's, S: Element, X: Source<'s, S>> From<&'x X> for Operand<'x, 's, S> {
    fn from(tensor: &'x X) -> Self {
        Self { values: Some((tensor.slice(), tensor.shape())), number: 0.0, brand: PhantomData }
    }
}

impl<'x, 's, S> Operand<'x, 's, S> {
    /// Returns the operand of a shape that a tensor's first elements have.
    pub(super) fn shaped(tensor: &'x Tensor<'s, S>, shape: Shape) -> Self
    where
        S: Element,
    {
        Self { values: Some((tensor.slice(), shape)), number: 0.0, brand: PhantomData }
    }

    /// The elements, none for a number.
    pub(super) fn slice(&self) -> Slice<'x, S> {
        self.values.map_or_else(Slice::empty, |(values, _)| values)
    }

    /// The extents, `None` for a number.
    pub(super) fn shape(&self) -> Option<Shape> {
        self.values.map(|(_, shape)| shape)
    }
}

/// Returns the shape to which the operands broadcast. A number has every shape.
///
/// # Errors
/// [`Error::Misuse`] of `op` with the shapes, unless each extent is the same in all of them, or 1
/// or absent.
pub(super) fn broadcast(op: &'static str, shapes: &[Option<Shape>]) -> Result<Shape> {
    let shapes: Vec<Shape> = shapes.iter().copied().flatten().collect();
    let rank = shapes.iter().map(|shape| shape.extents().len()).max().unwrap_or(0);
    let mut all = vec![1; rank];
    for shape in &shapes {
        let own = &mut all[rank - shape.extents().len()..];
        for (extent, &of_shape) in own.iter_mut().zip(shape.extents()) {
            if *extent == 1 {
                *extent = of_shape;
            } else if of_shape != 1 && of_shape != *extent {
                let got: Vec<String> = shapes.iter().map(Shape::to_string).collect();
                return Err(Error::misuse(op, "shapes that broadcast", got.join(" and ")));
            }
        }
    }
    Shape::of(op, &all)
}

/// The extents of a result without those that no operand distinguishes, and the strides of each
/// operand along them, from the last.
pub(super) struct Merged<const N: usize> {
    extents: Vec<usize>,
    strides: [Vec<isize>; N],
}

impl<const N: usize> Merged<N> {
    /// Merges neighboring extents that are contiguous in every operand.
    pub(super) fn new(extents: &[usize], strides: [&[isize]; N]) -> Self {
        let mut merged = Self { extents: Vec::new(), strides: [const { Vec::new() }; N] };
        for at in (0..extents.len()).rev().filter(|&at| extents[at] != 1) {
            let before = merged.extents.last().copied();
            let continues = before.is_some_and(|before| {
                (0..N).all(|of| {
                    merged.strides[of].last().is_some_and(|&stride| strides[of][at] == stride * before as isize)
                })
            });
            match merged.extents.last_mut().filter(|_| continues) {
                Some(extent) => *extent *= extents[at],
                None => {
                    merged.extents.push(extents[at]);
                    for (merged, strides) in merged.strides.iter_mut().zip(strides) {
                        merged.push(strides[at]);
                    }
                }
            }
        }
        merged
    }

    /// Writes the six extents, the last at the end.
    pub(super) fn write_extents(&self, words: &mut [usize]) {
        words.fill(1);
        words.iter_mut().rev().zip(&self.extents).for_each(|(word, &extent)| *word = extent);
    }

    /// Writes the six strides of an operand. A negative one wraps.
    pub(super) fn write_strides(&self, operand: usize, words: &mut [usize]) {
        words.fill(0);
        words.iter_mut().rev().zip(&self.strides[operand]).for_each(|(word, &stride)| *word = stride as usize);
    }
}

/// Returns the strides of a row-major tensor.
pub(super) fn strides_of(shape: Shape) -> Vec<isize> {
    let mut strides = vec![1; shape.extents().len()];
    for at in (1..strides.len()).rev() {
        strides[at - 1] = strides[at] * shape.extents()[at].max(1) as isize;
    }
    strides
}

/// Returns the strides of a tensor that broadcasts to a shape.
pub(super) fn broadcast_strides(shape: Shape, to: Shape) -> Vec<isize> {
    let absent = to.extents().len() - shape.extents().len();
    let mut strides = vec![0; absent];
    strides.extend(strides_of(shape));
    let extents = shape.extents().iter();
    strides[absent..].iter_mut().zip(extents).filter(|(_, extent)| **extent == 1).for_each(|(stride, _)| *stride = 0);
    strides
}

/// Returns the layout of operands whose result has this shape; see [`kernels::broadcast`].
pub(super) fn layout<S, const N: usize, const WORDS: usize>(
    to: Shape,
    operands: &[Operand<'_, '_, S>; N],
) -> [usize; WORDS] {
    let strides = (*operands).map(|operand| {
        let repeats = operand.shape().filter(|shape| shape.elements() != to.elements());
        // Any strides serve for an operand that does not repeat: those that merge.
        broadcast_strides(repeats.unwrap_or(to), to)
    });
    let merged = Merged::new(to.extents(), strides.each_ref().map(Vec::as_slice));
    let mut words = [0; WORDS];
    let (extents, rest) = words.split_at_mut(RANK);
    merged.write_extents(extents);
    for ((at, operand), words) in operands.iter().enumerate().zip(rest.chunks_exact_mut(OPERAND)) {
        merged.write_strides(at, &mut words[..RANK]);
        words[RANK] = operand.number.to_bits() as usize;
    }
    words
}
