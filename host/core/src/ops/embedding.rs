//! Table lookup by token ids or by positions, and gather. Gradients are sums in a fixed order.

use super::cast::narrowed;
use super::{add_bias, fill_into, same_shape, sum_rows_into};
use crate::error::{Error, Result};
use crate::indices::{IndexSource, Indices};
use crate::ops;
use crate::params::Parameter;
use crate::preconditions::IndexBound;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{AnyTensor, Element, Lent, LentMut, Shape, Source, Stored, Target, Tensor};
use half::bf16;
use kernels::embedding as kernel;

/// `y[.., c] = table[ids[..], c]`; `table`: `[rows, cols]`, `ids`: up to three extents, `y`: those
/// extents and `cols`, of any stored type.
///
/// An id without a row is an error if the host knows the ids, as it does for [`Indices`] that were
/// uploaded or are an input. Any other such id produces a row of NaN. Queued, one launch; no
/// scratch.
///
/// # Errors
/// [`Error::Misuse`] for other extents. [`Error::Label`] with the id's index, here or at the
/// replay. [`Error::ArenaFull`].
#[track_caller]
pub fn embedding<'s, S: Stored>(
    step: &Step<'s>,
    table: &impl Source<'s, f32>,
    ids: &impl IndexSource<'s>,
) -> Result<Tensor<'s, S>> {
    let ([rows, cols], shape) = forms("embedding", table.shape(), ids.shape())?;
    let ids = ids.within(step, IndexBound::below(rows))?;
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::embedding_forward { table: table.slice(), ids: ids.slice(), cols, y: y.out() })?;
    }
    Ok(y)
}

/// `y[.., c] = table[ids[..], c]`, like [`embedding`], of a table in BF16. Rows are looked up
/// before they are converted, so that the table is not. Queued, one launch, or two for f32.
#[track_caller]
pub fn embedding_bf16<'s, S: Stored>(
    step: &Step<'s>,
    table: &impl Source<'s, bf16>,
    ids: &impl IndexSource<'s>,
) -> Result<Tensor<'s, S>> {
    let rows = gather(step, table, ids).map_err(|error| error.in_op("embedding"))?;
    if <S as Element>::NAME != f32::NAME {
        return Ok(S::restore(AnyTensor::Bf16(rows)).expect("f32 or BF16"));
    }
    let wide = ops::to_f32(step, &rows)?;
    step.free(rows);
    Ok(S::restore(AnyTensor::F32(wide)).expect("f32 or BF16"))
}

/// `dtable[id, c] = sum of dy[.., c] over the occurrences of each id`; `dy`: the extents of `ids`
/// and `cols`, `dtable`: `[rows, cols]`. Adds to `dtable` when `accumulate`, otherwise overwrites
/// it, with zeros for ids that do not occur. An id without a row contributes nothing.
///
/// Queued: for n ids, `2 + log2(n / 512)` launches, one more without `accumulate`, and one more
/// from 65 ids on. Scratch: 16 bytes per id, and a 64th of dy. The bits depend only on the ids and
/// dy: an id's occurrences are taken in ascending order, in chunks of 64. Each chunk is summed, and
/// then the chunks are, starting with the existing value and the first chunk.
#[track_caller]
pub fn embedding_backward<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    ids: &impl IndexSource<'s>,
    dtable: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<()> {
    const OP: &str = "embedding_backward";
    let ([rows, cols], shape) = forms(OP, dtable.shape(), ids.shape())?;
    same_shape(OP, shape, dy.shape())?;
    if !accumulate {
        fill_into(step, dtable, 0.0)?;
    }
    if ids.shape().elements() == 0 || cols == 0 {
        return Ok(());
    }
    add_rows(step, dy, ids.within(step, IndexBound::below(rows))?, cols, dtable, accumulate)
}

/// Adds up the rows of dy with the same id, as [`embedding_backward`] does; there are columns and
/// ids. Rows of `out` whose id does not occur are unchanged.
pub(super) fn add_rows<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    ids: &impl Source<'s, u32>,
    cols: usize,
    out: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<()> {
    let (count, length) = (ids.shape().elements(), out.shape().elements());
    let (sorted, order) = sorted(step, ids)?;
    let mut partials = step.empty([count.div_ceil(kernel::CHUNK), cols])?;
    step.launch(kernel::rows_sum {
        dy: dy.slice(),
        sorted: sorted.slice(),
        order: order.slice(),
        cols,
        length,
        accumulate: u32::from(accumulate),
        out: out.out(),
        partials: partials.out(),
    })?;
    if count > kernel::CHUNK {
        let (sorted, partials) = (sorted.slice(), partials.slice());
        step.launch(kernel::rows_finish { sorted, partials, cols, length, out: out.out() })?;
    }
    Ok(())
}

/// Sorts the ids, stably. Returns them with their original indices.
pub(super) fn sorted<'s>(step: &Step<'s>, ids: &impl Source<'s, u32>) -> Result<(Tensor<'s, u32>, Tensor<'s, u32>)> {
    let count = ids.shape().elements();
    let pair = || -> Result<(Tensor<'s, u32>, Tensor<'s, u32>)> { Ok((step.empty([count])?, step.empty([count])?)) };
    let (mut now, mut run) = (pair()?, kernel::RUN);
    step.launch(kernel::sort_ids { ids: ids.slice(), sorted: now.0.out(), order: now.1.out() })?;
    if run >= count {
        return Ok(now);
    }
    let mut next = pair()?;
    while run < count {
        let (ids, order) = (now.0.slice(), now.1.slice());
        step.launch(kernel::merge_ids { ids, order, run, merged: next.0.out(), merged_order: next.1.out() })?;
        std::mem::swap(&mut now, &mut next);
        run *= 2;
    }
    Ok(now)
}

/// `y[.., c] = x[ids[..], c]`; `x`: `[rows, cols]`. This is [`embedding`] for an x that is not a
/// parameter.
#[track_caller]
pub fn gather<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    ids: &impl IndexSource<'s>,
) -> Result<Tensor<'s, S>> {
    let ([rows, cols], shape) = forms("gather", x.shape(), ids.shape())?;
    let ids = ids.within(step, IndexBound::below(rows))?;
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::gather { x: x.slice(), ids: ids.slice(), cols, y: y.out() })?;
    }
    Ok(y)
}

/// `dx[id, c] = sum of dy[.., c] over the occurrences of each id`; `dx`: `[rows, cols]`. The order
/// is the same as in [`embedding_backward`], and the sum is rounded once. Scratch: as much as
/// [`embedding_backward`], and for BF16 the sums in f32.
#[track_caller]
pub fn gather_backward<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    ids: &impl IndexSource<'s>,
    rows: usize,
) -> Result<Tensor<'s, S>> {
    let cols = dy.shape().extents().last().copied().unwrap_or(0);
    let mut dx = step.empty::<f32>([rows, cols])?;
    embedding_backward(step, dy, ids, &mut dx, false).map_err(|error| error.in_op("gather_backward"))?;
    narrowed(step, dx)
}

/// Returns the table's extents, and the result's extents for these ids.
fn forms(op: &'static str, table: Shape, ids: Shape) -> Result<([usize; 2], Shape)> {
    let (&[rows, cols], shape) = (table.extents(), ids.extents()) else {
        return Err(Error::misuse(op, "a table [rows, cols]", table.to_string()));
    };
    let shape: Shape = match *shape {
        [a] => [a, cols].into(),
        [a, b] => [a, b, cols].into(),
        [a, b, c] => [a, b, c, cols].into(),
        _ => return Err(Error::misuse(op, "ids of one to three extents", ids.to_string())),
    };
    Ok(([rows, cols], shape))
}

/// `y[b, t, c] = x[b, t, c] + table[t, c]`; `x`, `y`: `[batch, tokens, cols]`, `table`:
/// `[context, cols]`, where `context` is at least `tokens`. Queued, one launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`] for other extents; [`Error::ArenaFull`].
#[track_caller]
pub fn add_positions<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    table: &impl Source<'s, f32>,
) -> Result<Tensor<'s, S>> {
    let [batch, row] = position_rows("add_positions", x.shape(), table.shape())?;
    if batch * row == 0 {
        return step.empty(x.shape());
    }
    // Each sample is treated as a row, and the first rows of the table as its bias.
    let samples = Lent::new(x.memory(), [batch, row].into());
    let bias = Lent::new(table.memory().part(0, row), [row].into());
    add_bias(step, &samples, &bias)?.reshape(x.shape())
}

/// `dtable[t, c] = sum over b of dy[b, t, c]`; `dy`: `[batch, tokens, cols]`, `dtable`: `[context,
/// cols]`. Adds to `dtable` when `accumulate`, otherwise overwrites it, with zeros from row
/// `tokens` on. Queued. Scratch and the order of the sum are as in [`sum_rows_into`].
#[track_caller]
pub fn add_positions_backward<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    dtable: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<()> {
    let [batch, row] = position_rows("add_positions_backward", dy.shape(), dtable.shape())?;
    let has_others = row < dtable.shape().elements();
    if !accumulate && has_others {
        fill_into(step, dtable, 0.0)?;
    }
    if row == 0 {
        return Ok(());
    }
    let mut sums = LentMut::new(dtable.memory().part(0, row), [row].into());
    sum_rows_into(step, &Lent::new(dy.memory(), [batch, row].into()), &mut sums, accumulate || has_others)
}

/// Returns the number of samples, and the elements of each.
fn position_rows(op: &'static str, x: Shape, table: Shape) -> Result<[usize; 2]> {
    match (x.extents(), table.extents()) {
        (&[batch, tokens, cols], &[context, width]) if cols == width && tokens <= context => Ok([batch, tokens * cols]),
        _ => {
            let expected = "x [batch, tokens, cols] and a table [at least tokens, cols]";
            Err(Error::misuse(op, expected, format!("{x} and {table}")))
        }
    }
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::embedding`] with a parameter `[rows, cols]`; `ids`: up to three extents,
    /// result: those extents and `cols`. Backward is [`ops::launch::embedding_backward`]. Another
    /// op, such as the language model's head, may share the parameter.
    #[track_caller]
    pub fn embedding<S: Stored>(&self, table: Parameter, ids: Indices<'s>) -> Result<Var<'s, S>> {
        let op = self.op("embedding", [])?;
        let y = match op.is_bf16(table)? {
            true => embedding_bf16(self.step(), &op.weights_as(table)?, &ids)?,
            false => ops::embedding(self.step(), &op.weights(table)?, &ids)?,
        };
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let (mut dtable, accumulate) = back.gradient_uninit(table)?;
            ops::launch::embedding_backward(step, &dy, &ids, &mut dtable, accumulate)?;
            step.free(dy);
            Ok(())
        }))
    }

    /// Records [`ops::add_positions`] with a parameter `[context, cols]`; `x`, result:
    /// `[batch, tokens, cols]`.
    #[track_caller]
    pub fn add_positions<S: Stored>(&self, x: &Var<'s, S>, table: Parameter) -> Result<Var<'s, S>> {
        let op = self.op("add_positions", [x])?;
        let (y, x) = (ops::add_positions(self.step(), x.value(), &op.weights(table)?)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            if let Some((mut dtable, accumulate)) = back.gradient_if_trained(table)? {
                ops::launch::add_positions_backward(step, &dy, &mut dtable, accumulate)?;
            }
            back.add(&x, dy)
        }))
    }
}
