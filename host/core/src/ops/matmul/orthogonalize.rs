//! Orthogonalized matrices, by Newton-Schulz iterations. The optimizer Muon updates matrices with
//! them.
//!
//! Invariant: a finite matrix gives no NaN, not even a zero one.

use super::super::cast::narrowed;
use super::super::reduce::{scaled_sum_into, squared_norms_into};
use super::super::views::{Places, copy};
use super::super::{add, fill, pointwise, slice, to_f32};
use super::element::GemmElement;
use super::gemm::{Gemm, Product};
use crate::elementary::scale_by_into;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, LentMut, Memory, Shape, Source, Tensor};
use cuda_std::float_mode;
use kernels::block::CHUNK;
use std::collections::BTreeMap;

/// The coefficients a, b and c of an iteration.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// The number of iterations.
const ITERATIONS: usize = 5;
/// The term that is added to a norm, so that a zero matrix stays zero.
const EPSILON: f32 = 1e-7;

/// The most elements that are orthogonalized at once, unless a matrix has more.
const AT_ONCE: usize = 1 << 24;
/// The rows and columns of matrices that are orthogonalized at once are multiples of this, so that
/// each begins where a kernel may write.
const UNIT: usize = 8;

/// Matrices of [`orthogonalize_assign`] that are columns of one tensor.
#[derive(Debug)]
pub struct Matrices<'m, 's> {
    /// Flat. Its first elements are `[rows, cols]`, and the others stay.
    pub values: Tensor<'s>,
    /// The rows and columns of all of them together.
    pub shape: [usize; 2],
    /// The columns of each matrix, or none for one matrix.
    pub columns: &'m [usize],
}

/// A matrix: columns of a tensor.
#[derive(Clone, Copy)]
struct Matrix {
    memory: Memory<f32>,
    whole: Shape,
    first: usize,
    shape: Shape,
}

/// Replaces each matrix M = U S V^T by about U V^T, in place. Singular values of at least 0.002 of
/// the Frobenius norm |M| become numbers between 0.68 and 1.21. They are multiplied by
/// `rms sqrt(max(rows, columns))`, so that the root mean square of a matrix of full rank is about
/// `rms`.
///
/// Each matrix is computed separately:
///
/// ```text
/// X = M / (|M| + 1e-7)               in f32, rounded to S
/// five times:
///     A = X X^T                      X^T X if there are more rows than columns
///     B = b A + c A A
///     X = a X + B X                  a X + X B if there are more rows than columns
/// a = 3.4445, b = -4.7750, c = 2.0315
/// ```
/// A, B and X are of type S, BF16 or f32, and each is rounded once. Products accumulate in f32, and
/// have the bits that [`matmul`](crate::ops::matmul) promises for tensors of this type. The last X
/// is scaled before it is rounded.
///
/// Matrices of one shape share their launches, if their extents are multiples of 8 and all of them
/// together have at most 2^24 elements. The bits do not depend on it. Queued: five launches for
/// each matrix, and some 25 for those that share them. Scratch: at most 16 bytes for each of the
/// elements that are computed at once, and two S for each element of their A.
///
/// # Errors
/// [`Error::Misuse`] when a tensor has too few elements, or the columns of its matrices are not
/// `cols` together; [`Error::ArenaFull`].
///
/// Source: Jordan et al., 2024, <https://kellerjordan.github.io/posts/muon>.
#[track_caller]
pub fn orthogonalize_assign<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    tensors: &mut [Matrices<'_, 's>],
    rms: f32,
) -> Result<()> {
    let mut by_shape: BTreeMap<[usize; 2], Vec<Matrix>> = BTreeMap::new();
    for Matrices { values, shape: [rows, cols], columns } in tensors {
        let whole = checked([*rows, *cols], columns, values.shape())?;
        let (memory, mut first) = (values.memory().part(0, whole.elements()), 0);
        for &own in if columns.is_empty() { &[*cols][..] } else { columns } {
            let matrix = Matrix { memory, whole, first, shape: [*rows, own].into() };
            by_shape.entry([*rows, own]).or_default().push(matrix);
            first += own;
        }
    }
    for ([rows, cols], matrices) in by_shape {
        let Some(most) = AT_ONCE.checked_div(rows * cols) else { continue };
        let may_share = [rows, cols].iter().all(|extent| extent.is_multiple_of(UNIT));
        for some in matrices.chunks(if may_share { most.max(1) } else { 1 }) {
            step.workspace(|step| replace::<S>(step, some, [rows, cols], rms))?;
        }
    }
    Ok(())
}

/// Returns the shape of all matrices of a tensor, whose first elements they are.
fn checked([rows, cols]: [usize; 2], columns: &[usize], tensor: Shape) -> Result<Shape> {
    const OP: &str = "orthogonalize_assign";
    let shape = Shape::from([rows, cols]);
    if shape.checked_elements().is_none_or(|elements| elements > tensor.elements()) {
        return Err(Error::misuse(OP, format!("at least the elements of {shape}"), tensor.to_string()));
    }
    let together = columns.iter().try_fold(0usize, |sum, &own| sum.checked_add(own));
    if !columns.is_empty() && together != Some(cols) {
        return Err(Error::misuse(OP, format!("matrices of {cols} columns together"), format!("{columns:?}")));
    }
    Ok(shape)
}

impl Matrix {
    /// Returns the elements next to each other, in a copy unless they are.
    fn packed<'s>(&self, step: &Step<'s>) -> Result<Lent<'_, 's>> {
        let Self { memory, whole, first, shape } = *self;
        if shape == whole {
            return Ok(Lent::new(memory, whole));
        }
        let [_, cols] = shape.as_rows();
        let copied = slice(step, &Lent::new(memory, whole), 1, first..first + cols)?;
        Ok(Lent::new(copied.memory(), shape))
    }
}

/// Replaces matrices of one shape.
#[track_caller]
fn replace<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    matrices: &[Matrix],
    [rows, cols]: [usize; 2],
    rms: f32,
) -> Result<()> {
    let (elements, shape) = (rows * cols, Shape::from([rows, cols]));
    let packed: Vec<_> = matrices.iter().map(|matrix| matrix.packed(step)).collect::<Result<_>>()?;
    // A matrix has one of four numbers, because kernels write from a multiple of 16 bytes on.
    let norms = fill(step, [4 * matrices.len()], 0.0)?;
    let norm = |of: &Tensor<'s>, number: usize| of.memory().part(4 * number, 1);
    for (number, matrix) in packed.iter().enumerate() {
        let mut squares = step.empty([elements.div_ceil(CHUNK)])?;
        squared_norms_into(step, matrix, &mut squares)?;
        scaled_sum_into(step, &squares, 1.0, &mut LentMut::new(norm(&norms, number), [1].into()))?;
        step.free(squares);
    }
    let inverses = pointwise::div(step, 1.0, &add(step, &pointwise::sqrt(step, &norms)?, EPSILON)?)?;
    let scaled = step.empty([matrices.len(), rows, cols])?;
    for (number, matrix) in packed.iter().enumerate() {
        let inverse = Lent::new(norm(&inverses, number), [1].into());
        let mut place = LentMut::new(scaled.memory().part(number * elements, elements), shape);
        scale_by_into(step, matrix, &inverse, &mut place, false)?;
    }
    let y = match S::erase(iterate::<S>(step, scaled, rms)?) {
        AnyTensor::F32(y) => y,
        AnyTensor::Bf16(y) => to_f32(step, &y)?,
    };
    for (number, Matrix { memory, whole, first, .. }) in matrices.iter().enumerate() {
        let (y, places) = (y.memory().part(number * elements, elements), Places::of(*whole).from(1, *first));
        let whole = &mut LentMut::new(*memory, *whole);
        copy(step, shape, (&Lent::new(y, shape), &Places::of(shape)), (whole, &places))?;
    }
    Ok(())
}

/// Returns orthogonalized matrices, scaled, of matrices with norms of at most 1; `x`: `[matrices,
/// rows, cols]`.
#[track_caller]
fn iterate<'s, S: GemmElement<S>>(step: &Step<'s>, x: Tensor<'s>, rms: f32) -> Result<Tensor<'s, S>> {
    let &[batches, rows, cols] = x.shape().extents() else { unreachable!("matrices of one shape") };
    let (least, most, is_tall) = (rows.min(cols), rows.max(cols), rows > cols);
    let (whole, square) = (rows * cols, least * least);
    let mut x = narrowed::<S>(step, x)?;
    let [a, b, c] = COEFFICIENTS;
    let squares = Gemm::new(least, least, most);
    let squares = if is_tall { squares.transpose_a() } else { squares.transpose_b() };
    let squares = Gemm { batches, stride_a: whole, stride_b: whole, stride_c: square, ..squares };
    for number in 1..=ITERATIONS {
        let mut gram = step.empty([batches, least, least])?;
        S::queue(step, Product::new(squares, &x, &x, &mut gram))?;
        let form = Gemm { alpha: c, beta: b, ..Gemm::new(least, least, least) };
        let form = Gemm { batches, stride_a: square, stride_b: square, stride_c: square, ..form };
        let mut polynomial = step.empty([batches, least, least])?;
        S::queue(step, Product::new(form, &gram, &gram, &mut polynomial).c(Some(&gram)))?;
        step.free(gram);
        let scale = || if number == ITERATIONS { rms * (most as f32).sqrt() } else { 1.0 };
        let [alpha, beta] = float_mode::in_default(|| [scale(), a * scale()]);
        let [stride_a, stride_b] = if is_tall { [whole, square] } else { [square, whole] };
        let form = Gemm { alpha, beta, batches, stride_a, stride_b, stride_c: whole, ..Gemm::new(rows, cols, least) };
        let mut next = step.empty([batches, rows, cols])?;
        let [left, right] = if is_tall { [&x, &polynomial] } else { [&polynomial, &x] };
        S::queue(step, Product::new(form, left, right, &mut next).c(Some(&x)))?;
        step.free(polynomial);
        step.free(std::mem::replace(&mut x, next));
    }
    Ok(x)
}
