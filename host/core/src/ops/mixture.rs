//! Tokens in the order of their experts, and back: the routing of a mixture.
//!
//! ```text
//! ids [tokens, each]      groups, sorted stably              results
//! token 0   2 0           group 0 | 0 1   group 2 | 0 1      combine: y[t] = sum over j of
//! token 1   0 2           dispatch: rows of these tokens     gates[t, j] rows[places[t, j]]
//! ```
//! No token is dropped: there are `tokens * each` rows, whatever the sizes of the groups are. Only
//! the device knows the sizes, so that a step can be captured.
//!
//! Invariant: the rows of a group ascend by token, and a token's rows are added in the order of its
//! ids.

use super::embedding::sorted;
use super::gather;
use crate::error::{Error, Result};
use crate::indices::{IndexSource, Indices};
use crate::ops;
use crate::preconditions::IndexBound;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Saved, Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::Slice;
use kernels::embedding::group_places;
use kernels::mixture as kernel;

/// The groups of the tokens, of which each has several; see [`group_by`].
#[derive(Clone, Copy, Debug)]
pub struct Groups<'s> {
    count: usize,
    /// The entry of `places` of each row.
    order: Indices<'s>,
    /// The token of each row.
    tokens: Indices<'s>,
    /// The rows of each token, `[tokens, each]`.
    places: Indices<'s>,
    /// The first row of each group, and the end of the last.
    offsets: Saved<'s, u32>,
}

impl<'s> Groups<'s> {
    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of rows in all groups.
    pub fn rows(&self) -> usize {
        self.order.shape().elements()
    }

    /// Returns the token of each row, `[rows]`.
    pub fn tokens(&self) -> &Indices<'s> {
        &self.tokens
    }

    /// Returns the rows of each token, `[tokens, each]`.
    pub fn places(&self) -> &Indices<'s> {
        &self.places
    }

    /// Returns the first row of each group, and the end of the last: `[count + 1]`.
    pub fn offsets(&self) -> &Saved<'s, u32> {
        &self.offsets
    }

    fn extents(&self) -> [usize; 2] {
        self.places.shape().as_rows()
    }
}

/// Sorts tokens by their groups; `ids`: `[tokens, each]`, the groups of each token. Queued: for n
/// ids, `3 + log2(n / 512)` launches. Scratch: 16 bytes per id.
///
/// # Errors
/// [`Error::Misuse`] for ids of other extents, or none; [`Error::Label`] for an id of no group;
/// [`Error::ArenaFull`].
#[track_caller]
pub fn group_by<'s>(step: &Step<'s>, ids: &impl IndexSource<'s>, groups: usize) -> Result<Groups<'s>> {
    const OP: &str = "group_by";
    let (shape, offsets) = (ids.shape(), Shape::of(OP, &[groups + 1])?);
    let &[_, each] = shape.extents() else {
        return Err(Error::misuse(OP, "ids [tokens, each]", shape.to_string()));
    };
    let count = shape.elements();
    if count == 0 {
        return Err(Error::misuse(OP, "at least one id", shape.to_string()));
    }
    let ids = ids.within(step, IndexBound::below(groups))?;
    let (sorted, order) = sorted(step, ids)?;
    let (mut tokens, mut places) = (step.empty([count])?, step.empty(shape)?);
    let mut offsets = step.empty(offsets)?;
    step.launch(group_places {
        ids: ids.slice(),
        sorted: sorted.slice(),
        order: order.slice(),
        each,
        length: groups + 1,
        rows: tokens.out(),
        places: places.out(),
        offsets: offsets.out(),
    })?;
    let [order, tokens, places] = [order, tokens, places].map(|tensor| Indices::on_device(tensor.save()));
    Ok(Groups { count: groups, order, tokens, places, offsets: offsets.save() })
}

/// Returns the rows of x in the order of their groups; `x`: `[tokens, cols]`, result: `[rows,
/// cols]`. Queued, one launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`] for another number of tokens; [`Error::ArenaFull`].
#[track_caller]
pub fn dispatch<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, groups: &Groups<'s>) -> Result<Tensor<'s, S>> {
    let [tokens, _] = groups.extents();
    match x.shape().extents() {
        [rows, _] if *rows == tokens => gather(step, x, &groups.tokens),
        _ => Err(Error::misuse("dispatch", format!("rows of {tokens} tokens"), x.shape().to_string())),
    }
}

/// `y[t, c] = sum over j of gates[t, j] rows[places[t, j], c]`, a chain of fused multiply-adds over
/// ascending j in f32, rounded once; `rows`: `[rows, cols]`, `gates`: `[tokens, each]`, `y`:
/// `[tokens, cols]`. Without gates each is 1: this is the gradient of [`dispatch`]. Queued, one
/// launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`] for other extents; [`Error::ArenaFull`].
#[track_caller]
pub fn combine<'s, S: Stored>(
    step: &Step<'s>,
    rows: &impl Source<'s, S>,
    gates: Option<&impl Source<'s, f32>>,
    groups: &Groups<'s>,
) -> Result<Tensor<'s, S>> {
    let ([tokens, each], cols) =
        (groups.extents(), columns("combine", rows.shape(), gates.map(Source::shape), groups)?);
    let mut y = step.empty([tokens, cols])?;
    if y.shape().elements() > 0 {
        let (gates, places) = (gates.map_or(Slice::empty(), Source::slice), groups.places.values().slice());
        let length = y.shape().elements();
        step.launch(kernel::combine_forward { x: rows.slice(), gates, places, each, cols, length, y: y.out() })?;
    }
    Ok(y)
}

/// The gradients of [`combine`]: `drows[r] = gates[t, j] dy[t]` for the row r of (t, j), and
/// `dgates[t, j] = sum over c of dy[t, c] rows[r, c]`; `rows`, `drows`: `[rows, cols]`, `gates`,
/// `dgates`: `[tokens, each]`, `dy`: `[tokens, cols]`. Queued, two launches. Scratch: a float per
/// row. The order of the sum follows from its length.
///
/// # Errors
/// [`Error::Misuse`] for other extents; [`Error::ArenaFull`].
#[track_caller]
pub fn combine_backward<'s, S: Stored>(
    step: &Step<'s>,
    rows: &impl Source<'s, S>,
    gates: &impl Source<'s, f32>,
    dy: &impl Source<'s, S>,
    groups: &Groups<'s>,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    const OP: &str = "combine_backward";
    let ([tokens, each], cols) = (groups.extents(), columns(OP, rows.shape(), Some(gates.shape()), groups)?);
    ops::same_shape(OP, [tokens, cols].into(), dy.shape())?;
    let (mut dx, mut sums) = (step.empty(rows.shape())?, step.empty::<f32>([groups.rows(), 1])?);
    if cols == 0 {
        ops::fill_into(step, &mut sums, 0.0)?;
    } else {
        step.launch(kernel::combine_backward {
            x: rows.slice(),
            dy: dy.slice(),
            gates: gates.slice(),
            order: groups.order.values().slice(),
            each,
            cols,
            dx: dx.out(),
            dgates: sums.out(),
        })?;
    }
    let dgates = gather(step, &sums, &groups.places)?.reshape([tokens, each])?;
    step.free(sums);
    Ok((dx, dgates))
}

/// Returns the columns of rows `[rows, cols]`, if these and the gates fit the groups.
fn columns(op: &'static str, rows: Shape, gates: Option<Shape>, groups: &Groups<'_>) -> Result<usize> {
    let places = groups.places.shape();
    match (rows.extents(), gates) {
        (&[count, cols], gates) if count == groups.rows() && gates.is_none_or(|gates| gates == places) => Ok(cols),
        _ => {
            let expected = format!("{} rows, and gates {places}", groups.rows());
            let got = gates.map_or(rows.to_string(), |gates| format!("{rows} and {gates}"));
            Err(Error::misuse(op, expected, got))
        }
    }
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::dispatch`]; `x`: `[tokens, cols]`, result: `[rows, cols]`. Backward is
    /// [`ops::combine`] without gates.
    #[track_caller]
    pub fn dispatch<S: Stored>(&self, x: &Var<'s, S>, groups: &Groups<'s>) -> Result<Var<'s, S>> {
        let op = self.op("dispatch", [x])?;
        let y = ops::dispatch(self.step(), x.value(), groups)?;
        let (x, groups) = (*x, *groups);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::combine(back.step(), &dy, None::<&Tensor<'s>>, &groups)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::combine`]; `rows`: `[rows, cols]`, `gates`: `[tokens, each]`, result:
    /// `[tokens, cols]`. Backward is [`ops::launch::combine_backward`].
    #[track_caller]
    pub fn combine<S: Stored>(&self, rows: &Var<'s, S>, gates: &Var<'s>, groups: &Groups<'s>) -> Result<Var<'s, S>> {
        let op = self.op("combine", [rows as &dyn crate::tape::AnyVar, gates])?;
        let y = ops::combine(self.step(), rows.value(), Some(gates.value()), groups)?;
        let (rows, gates, groups) = (*rows, *gates, *groups);
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let (drows, dgates) = ops::launch::combine_backward(step, rows.value(), gates.value(), &dy, &groups)?;
            step.free(dy);
            back.add(&rows, drows)?;
            back.add(&gates, dgates)
        }))
    }
}
