//! Orthogonalized matrices, by Newton-Schulz iterations. The optimizer Muon updates matrices with
//! them.
//!
//! Invariant: a finite matrix gives no NaN, not even a zero one.

use super::super::cast::narrowed;
use super::super::views::{Places, copy};
use super::super::{add, pointwise, scale_by, slice, squared_norm, to_f32};
use super::element::GemmElement;
use super::gemm::{Gemm, Product};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{AnyTensor, Lent, LentMut, Shape, Source, Target, Tensor};
use cuda_std::float_mode;
use kernels::cast::cast_to_f32;

/// The coefficients a, b and c of an iteration.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// The number of iterations.
const ITERATIONS: usize = 5;
/// The term that is added to a norm, so that a zero matrix stays zero.
const EPSILON: f32 = 1e-7;

/// Replaces each matrix M = U S V^T by about U V^T, in place. Singular values of at least 0.002 of
/// the Frobenius norm |M| become numbers between 0.68 and 1.21. They are multiplied by
/// `rms sqrt(max(rows, columns))`, so that the root mean square of a matrix of full rank is about
/// `rms`.
///
/// `x`: flat, whose first elements are `[rows, cols]`; the others stay. `matrices`: the columns of
/// each matrix of which `[rows, cols]` consists, or none for one matrix. Each matrix is computed
/// separately:
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
/// is scaled before it is rounded. Queued, about 25 launches for a matrix; scratch: 8 bytes for
/// each element of the largest matrix, 16 if there are several or in f32, and two S for each
/// element of A.
///
/// # Errors
/// [`Error::Misuse`] when `x` has too few elements, or the columns of the matrices are not `cols`
/// together; [`Error::ArenaFull`].
///
/// Source: Jordan et al., 2024, <https://kellerjordan.github.io/posts/muon>.
#[track_caller]
pub fn orthogonalize_assign<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &mut impl Target<'s, f32>,
    [rows, cols]: [usize; 2],
    matrices: &[usize],
    rms: f32,
) -> Result<()> {
    const OP: &str = "orthogonalize_assign";
    let matrices = if matrices.is_empty() { &[cols][..] } else { matrices };
    let shape = Shape::from([rows, cols]);
    if shape.checked_elements().is_none_or(|elements| elements > x.shape().elements()) {
        return Err(Error::misuse(OP, format!("at least the elements of {shape}"), x.shape().to_string()));
    }
    if matrices.iter().try_fold(0usize, |sum, &own| sum.checked_add(own)) != Some(cols) {
        return Err(Error::misuse(OP, format!("matrices of {cols} columns together"), format!("{matrices:?}")));
    }
    let (memory, mut first) = (x.memory().part(0, shape.elements()), 0);
    for &own in matrices {
        step.workspace(|step| {
            let columns =
                if own == cols { None } else { Some(slice(step, &Lent::new(memory, shape), 1, first..first + own)?) };
            let mut whole = LentMut::new(memory, shape);
            let y = match &columns {
                None => iterate::<S>(step, &whole, rms)?,
                Some(columns) => iterate::<S>(step, columns, rms)?,
            };
            let y = match S::erase(y) {
                AnyTensor::F32(y) => y,
                AnyTensor::Bf16(y) if columns.is_none() => {
                    return step.launch(cast_to_f32 { x: y.slice(), out: whole.out() });
                }
                AnyTensor::Bf16(y) => to_f32(step, &y)?,
            };
            let places = Places::of(shape).from(1, first);
            copy(step, y.shape(), (&y, &Places::of(y.shape())), (&mut whole, &places))
        })?;
        first += own;
    }
    Ok(())
}

/// Returns the orthogonalized matrix, scaled.
#[track_caller]
fn iterate<'s, S: GemmElement<S>>(step: &Step<'s>, matrix: &impl Source<'s, f32>, rms: f32) -> Result<Tensor<'s, S>> {
    let [rows, cols] = matrix.shape().as_rows();
    let (least, most, is_tall) = (rows.min(cols), rows.max(cols), rows > cols);
    let norm = pointwise::sqrt(step, &squared_norm(step, matrix)?)?;
    let inverse = pointwise::div(step, 1.0, &add(step, &norm, EPSILON)?)?;
    let mut x = narrowed::<S>(step, scale_by(step, matrix, &inverse)?)?;
    let [a, b, c] = COEFFICIENTS;
    let squares = Gemm::new(least, least, most);
    let squares = if is_tall { squares.transpose_a() } else { squares.transpose_b() };
    for number in 1..=ITERATIONS {
        let mut gram = step.empty([least, least])?;
        S::queue(step, Product::new(squares, &x, &x, &mut gram))?;
        let form = Gemm { alpha: c, beta: b, ..Gemm::new(least, least, least) };
        let mut polynomial = step.empty([least, least])?;
        S::queue(step, Product::new(form, &gram, &gram, &mut polynomial).c(Some(&gram)))?;
        step.free(gram);
        let scale = || if number == ITERATIONS { rms * (most as f32).sqrt() } else { 1.0 };
        let [alpha, beta] = float_mode::in_default(|| [scale(), a * scale()]);
        let (form, mut next) = (Gemm { alpha, beta, ..Gemm::new(rows, cols, least) }, step.empty([rows, cols])?);
        let [left, right] = if is_tall { [&x, &polynomial] } else { [&polynomial, &x] };
        S::queue(step, Product::new(form, left, right, &mut next).c(Some(&x)))?;
        step.free(polynomial);
        step.free(std::mem::replace(&mut x, next));
    }
    Ok(x)
}
