//! Reductions over rows, over columns and over all elements.
//!
//! The tree of every reduction depends only on the lengths, so results have the same bits on every
//! device. Scratch: a 128th of the input for [`sum_rows`] of more than 1024 rows, and a 4096th for
//! reductions to one value.

use crate::buffer::AnyBuffer;
use crate::error::{Error, Result};
use crate::ops;
use crate::params::{Gradients, Parameter, ParameterEntry};
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::PointerMut;
use kernels::block::{CHUNK, row_chunk};
use kernels::reduce;

/// `out[r] = sum over c of x[r, c]`; `x`: `[.., cols]`, `out`: `[rows]`. Queued.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn sum_columns<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    let [rows, cols] = x.shape().as_rows();
    if cols == 0 {
        return super::fill(step, [rows], 0.0);
    }
    let mut out = step.empty([rows])?;
    step.launch(reduce::sum_columns { x: x.slice(), cols, scale: 1.0, accumulate: 0, out: out.out() })?;
    Ok(out)
}

/// `out[c] = sum over r of x[r, c]`; `x`: `[.., cols]`, `out`: `[cols]`. Queued.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn sum_rows<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    let [_, cols] = x.shape().as_rows();
    let mut out = step.empty([cols])?;
    sum_rows_into(step, x, &mut out, false)?;
    Ok(out)
}

/// `out[c] = sum over r of x[r, c]`, like [`sum_rows`], into an `out` of `cols` elements. Adds to
/// `out` when `accumulate`, otherwise overwrites it. Queued.
///
/// # Errors
/// [`Error::Misuse`] when `out` has a different number of elements; [`Error::ArenaFull`].
#[track_caller]
pub fn sum_rows_into<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    out: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<()> {
    let [rows, cols] = x.shape().as_rows();
    if out.shape().elements() != cols {
        return Err(Error::misuse("sum_rows", format!("an output of {cols} elements"), out.shape().to_string()));
    }
    if rows == 0 {
        return if accumulate { Ok(()) } else { super::fill_into(step, out, 0.0) };
    }
    let chunk = row_chunk(rows);
    let sum = |out: PointerMut<'_, f32>, accumulate| {
        step.launch(reduce::sum_rows { x: x.slice(), cols, chunk, scale: 1.0, accumulate, out })
    };
    if rows <= chunk {
        return sum(out.out(), u32::from(accumulate));
    }
    let mut partial = step.empty([rows.div_ceil(chunk), cols])?;
    sum(partial.out(), 0)?;
    sum_rows_into(step, &partial, out, accumulate)?;
    step.free(partial);
    Ok(())
}

/// The sum of all elements, `[1]`. Queued.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn sum<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    scaled_sum(step, x, 1.0)
}

/// The mean of all elements, `[1]`: their sum times `1 / n`. Queued.
///
/// # Errors
/// [`Error::Misuse`] for no elements; [`Error::ArenaFull`].
#[track_caller]
pub fn mean<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    scaled_sum(step, x, 1.0 / not_empty("mean", x)? as f32)
}

/// The sum of all elements times `factor`, `[1]`. The factor is applied once, to the sum. Queued.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn scaled_sum<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, factor: f32) -> Result<Tensor<'s>> {
    let mut out = step.empty([1])?;
    scaled_sum_into(step, x, factor, &mut out)?;
    Ok(out)
}

/// Computes [`scaled_sum`] into `out`, `[1]`.
#[track_caller]
pub(super) fn scaled_sum_into<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    factor: f32,
    out: &mut impl Target<'s, f32>,
) -> Result<()> {
    let sum = |scale, out| step.launch(reduce::sum_all { x: x.slice(), scale, accumulate: 0, out });
    match x.shape().elements().div_ceil(CHUNK) {
        0 => super::fill_into(step, out, 0.0),
        1 => sum(factor, out.out()),
        blocks => {
            let mut partial = step.empty([blocks])?;
            sum(1.0, partial.out())?;
            scaled_sum_into(step, &partial, factor, out)?;
            step.free(partial);
            Ok(())
        }
    }
}

/// The sum of the squares of all elements, `[1]`. Queued.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn squared_norm<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    let elements = x.shape().elements();
    if elements == 0 {
        return super::fill(step, [1], 0.0);
    }
    let mut squares = step.empty([elements.div_ceil(CHUNK)])?;
    step.launch(reduce::squared_norm { x: x.slice(), out: squares.out() })?;
    if squares.shape().elements() == 1 { Ok(squares) } else { sum(step, &squares) }
}

impl Gradients {
    /// Queues the sum of the squares of all gradients, or of one parameter's, `[1]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when they are on another device, or the handle belongs to another
    /// parameter spec; [`Error::ArenaFull`].
    #[track_caller]
    pub fn squared_norm<'s>(&self, step: &Step<'s>, of: Option<Parameter>) -> Result<Tensor<'s>> {
        let elements = self.spec().elements();
        let range = of.map_or(Ok(0..elements), |of| self.spec().trained_entry(of).map(ParameterEntry::range))?;
        match self.region()? {
            AnyBuffer::F32(all) => squared_norm(step, &step.lend(all, [elements])?.part(range)),
            AnyBuffer::Bf16(all) => squared_norm(step, &step.lend(all, [elements])?.part(range)),
            AnyBuffer::U32(_) => unreachable!("gradients are numbers"),
        }
    }
}

/// The sum of squares of each run of 4096 elements of `x`, written to `out`,
/// `[ceil(elements / 4096)]`. This is the first step of [`squared_norm`]: the [`sum`] of `out` is
/// the squared norm. Queued.
#[track_caller]
pub fn squared_norms_into<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    out: &mut impl Target<'s, f32>,
) -> Result<()> {
    step.launch(reduce::squared_norm { x: x.slice(), out: out.out() })
}

/// The largest element, `[1]`, or NaN if any element is NaN. Queued.
///
/// # Errors
/// [`Error::Misuse`] for no elements; [`Error::ArenaFull`].
#[track_caller]
pub fn max<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    let mut out = step.empty([not_empty("max", x)?.div_ceil(CHUNK)])?;
    step.launch(reduce::max_all { x: x.slice(), out: out.out() })?;
    if out.shape().elements() == 1 { Ok(out) } else { max(step, &out) }
}

/// The largest element of each row, or NaN if any of its elements is NaN; `x`: `[.., cols]`,
/// result: `[rows]`. Queued.
///
/// # Errors
/// [`Error::Misuse`] for rows without elements; [`Error::ArenaFull`].
#[track_caller]
pub fn max_columns<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s>> {
    let [rows, cols] = with_columns("max_columns", x)?;
    let mut out = step.empty([rows])?;
    step.launch(reduce::max_columns { x: x.slice(), cols, out: out.out() })?;
    Ok(out)
}

/// The index of each row's largest element: the first of equal ones, or the first NaN if there is
/// one; `x`: `[.., cols]`, result: `[rows]`. Queued.
///
/// # Errors
/// [`Error::Misuse`] for rows without elements; [`Error::ArenaFull`].
#[track_caller]
pub fn argmax_columns<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, u32>> {
    let [rows, cols] = with_columns("argmax_columns", x)?;
    let mut out = step.empty([rows])?;
    step.launch(reduce::argmax_columns { x: x.slice(), cols, out: out.out() })?;
    Ok(out)
}

fn not_empty<'s, S: Stored>(op: &'static str, x: &impl Source<'s, S>) -> Result<usize> {
    match x.shape().elements() {
        0 => Err(Error::misuse(op, "at least one element", x.shape().to_string())),
        elements => Ok(elements),
    }
}

fn with_columns<'s, S: Stored>(op: &'static str, x: &impl Source<'s, S>) -> Result<[usize; 2]> {
    match x.shape().as_rows() {
        [rows, 0] if rows > 0 => Err(Error::misuse(op, "rows with elements", x.shape().to_string())),
        [rows, cols] => Ok([rows, cols]),
    }
}

/// Makes a tensor with all elements equal to `value`, of x's stored type.
fn filled<'s, S: Stored>(step: &Step<'s>, shape: Shape, value: f32) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(shape)?;
    super::fill_into(step, &mut out, value)?;
    Ok(out)
}

impl<'s> Tape<'_, 's> {
    /// The sum of all elements; `x`: any shape, result: `[1]`, f32. See [`ops::sum`].
    #[track_caller]
    pub fn sum<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s>> {
        let op = self.op("sum", [x])?;
        let (y, shape) = (ops::sum(self.step(), x.value())?, x.shape());
        op.record_scalar(y.save(), x, move |step| filled(step, shape, 1.0))
    }

    /// The mean of all elements; `x`: any shape with elements, result: `[1]`, f32. See
    /// [`ops::mean`].
    #[track_caller]
    pub fn mean<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s>> {
        let op = self.op("mean", [x])?;
        let (y, shape) = (ops::mean(self.step(), x.value())?, x.shape());
        op.record_scalar(y.save(), x, move |step| filled(step, shape, 1.0 / shape.elements() as f32))
    }
}
