//! The head of a language model: the product with the vocabulary's matrix, the loss and both
//! gradients, in chunks of rows.
//!
//! ```text
//! for each chunk of rows     for each quarter: logits  = hidden w   [rows, vocabulary]
//!                                              dlogits = those of the loss
//!                            dhidden = dlogits w^T      the chunk's rows
//!                            dw     += hidden^T dlogits [width, vocabulary]
//! ```
//! Each chunk reads and writes all of dw, so few chunks are fast. Logits are read only by the loss,
//! so a quarter of a chunk's logits exist at a time.
//!
//! Invariant: gradients of logits exist for only one chunk at a time. The sizes of chunks and
//! quarters depend only on shapes and the config, and so does the order of every sum.

use super::loss::losses_into;
use super::reduce::scaled_sum_into;
use super::{Activation, Gemm, LabelRules, fill_into, gemm_into, pieces, same_shape};
use crate::elementary;
use crate::error::{Error, Result};
use crate::indices::{IndexSource, Indices};
use crate::ops;
use crate::params::Parameter;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Element, Lent, LentMut, Shape, Source, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::loss::loss_rows;

/// The matrix layout and the label rules of [`linear_cross_entropy`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LmHeadConfig {
    /// True if the matrix is `[vocabulary, width]`, as an embedding's table. Otherwise it is
    /// `[width, vocabulary]`, as a linear layer's weights.
    pub tied: bool,
    /// The label rules.
    pub rules: LabelRules,
    /// The rows of a chunk, rounded down to a multiple of [`LmHeadConfig::UNIT`], but at least
    /// that. `None`: as many rows as have [`LmHeadConfig::BYTES`] of gradients of logits.
    pub chunk: Option<usize>,
}

impl LmHeadConfig {
    /// Bytes of a chunk's gradients of logits. At a tenth of this, a GB10 would spend as long on
    /// adding to the weights' gradient, once per chunk, as on the products.
    pub const BYTES: usize = 1 << 29;
    /// The unit of a chunk's rows: the rows of a large tile.
    pub const UNIT: usize = 128;

    /// Sets the matrix layout to `[vocabulary, width]`.
    #[must_use]
    pub fn tied(self) -> Self {
        Self { tied: true, ..self }
    }

    /// Sets the label rules.
    #[must_use]
    pub fn rules(self, rules: LabelRules) -> Self {
        Self { rules, ..self }
    }

    /// Sets the rows of a chunk. Fewer rows take less memory and more time. The bits depend on it.
    #[must_use]
    pub fn chunk(self, rows: usize) -> Self {
        Self { chunk: Some(rows), ..self }
    }

    /// The rows of a chunk and of its quarter; the last ones may have fewer. Both have a multiple
    /// of four blocks of the loss's kernel, so that their losses begin where a kernel may write.
    fn rows<S: Element>(&self, vocabulary: usize) -> [usize; 2] {
        let unit = Self::UNIT.max(4 * loss_rows(vocabulary));
        let wanted = self.chunk.unwrap_or(Self::BYTES / size_of::<S>() / vocabulary);
        [wanted, wanted / 4].map(|rows| (rows / unit).max(1) * unit)
    }

    /// The products for this many rows: logits, dhidden, and the weights' gradient.
    fn products(&self, rows: usize, width: usize, vocabulary: usize) -> [Gemm; 3] {
        let (logits, dhidden) = (Gemm::new(rows, vocabulary, width), Gemm::new(rows, width, vocabulary));
        if self.tied {
            [logits.transpose_b(), dhidden, Gemm::new(vocabulary, width, rows).transpose_a()]
        } else {
            [logits, dhidden.transpose_b(), Gemm::new(width, vocabulary, rows).transpose_a()]
        }
    }
}

/// The mean over rows of `-log softmax(hidden w)[label]`, `[1]`, and its gradients with respect to
/// `hidden` and, in f32, to `w`; `hidden`: `[.., width]`, `w`: as in `form`, `labels`: hidden's
/// extents without the last. Returns all three. The label rules, and with them the weight of
/// another sum than the mean, are as in [`ops::cross_entropy_by`].
///
/// The gradients of logits, `[rows, vocabulary]`, exist for only one chunk of rows at a time, and
/// the logits for a quarter of it. The results have the bits of [`ops::linear`] and
/// [`ops::cross_entropy_by`] over a quarter's rows, and of [`ops::launch::gradients_into`] over a
/// chunk's, with split-K chosen by these extents. The losses of rows are summed as for all rows at
/// once. The gradient of `w` is summed over chunks in ascending order.
///
/// Queued. Scratch: a chunk's gradients of logits and a quarter of its logits, at most 5/4
/// [`LmHeadConfig::BYTES`] unless [`LmHeadConfig::UNIT`] rows have more. In addition, one value per
/// eight rows, and at most 64 MiB for split-K products.
///
/// # Errors
/// [`Error::Misuse`] when extents differ.
#[track_caller]
pub fn linear_cross_entropy<'s, S: Activation>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    form: &LmHeadConfig,
) -> Result<(Tensor<'s>, Tensor<'s, S>, Tensor<'s>)> {
    let (loss, dhidden, dw) = with_gradients(step, hidden, w, labels, form, [true; 2])?;
    let both = "both gradients are wanted";
    Ok((loss, dhidden.expect(both), dw.expect(both)))
}

/// Computes [`linear_cross_entropy`], with only the `wanted` gradients of hidden and w.
#[track_caller]
fn with_gradients<'s, S: Activation>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    form: &LmHeadConfig,
    wanted: [bool; 2],
) -> Result<(Tensor<'s>, Option<Tensor<'s, S>>, Option<Tensor<'s>>)> {
    const OP: &str = "linear_cross_entropy";
    let ([rows, _], vocabulary) = extents(OP, hidden.shape(), w.shape(), labels.shape(), form.tied)?;
    let weight = form.rules.weight(OP, labels)?.of_loss();
    let labels = form.rules.check(OP, step, labels, vocabulary)?;
    let mut loss = step.empty([1])?;
    let mut losses = step.empty([rows.div_ceil(loss_rows(vocabulary))])?;
    let (dhidden, dw) = in_chunks(step, hidden, w, form, vocabulary, wanted, &mut |quarter| {
        let Quarter { step, first, logits, dlogits } = quarter;
        let [rows, _] = logits.shape().as_rows();
        let (labels, blocks) = (part(labels, first, [rows]), [rows.div_ceil(loss_rows(vocabulary))]);
        let mut losses = part_mut(&mut losses, first / loss_rows(vocabulary), blocks);
        losses_into(step, &logits, &labels, [weight, 1.0], form.rules, &mut losses, dlogits)
    })?;
    scaled_sum_into(step, &losses, weight, &mut loss)?;
    Ok((loss, dhidden, dw))
}

/// The logits of a quarter of a chunk, and the memory of their gradients if they are wanted.
struct Quarter<'q, 'i, S: Element> {
    step: &'q Step<'i>,
    /// The first of its rows.
    first: usize,
    logits: Tensor<'i, S>,
    dlogits: Option<&'q mut LentMut<'q, 'i, S>>,
}

/// Computes logits quarter by quarter, passes them to `of_quarter`, which writes their gradients,
/// and returns the `wanted` gradients of hidden and w. Extents are checked.
#[track_caller]
fn in_chunks<'s, S: Activation>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    form: &LmHeadConfig,
    vocabulary: usize,
    wanted: [bool; 2],
    of_quarter: &mut dyn for<'q, 'i> FnMut(Quarter<'q, 'i, S>) -> Result<()>,
) -> Result<(Option<Tensor<'s, S>>, Option<Tensor<'s>>)> {
    let [rows, width] = hidden.shape().as_rows();
    let mut dhidden = wanted[0].then(|| step.empty(hidden.shape())).transpose()?;
    let mut dw = wanted[1].then(|| step.empty(w.shape())).transpose()?;
    if let Some(dw) = dw.as_mut().filter(|_| rows == 0) {
        fill_into(step, dw, 0.0)?;
    }
    let [in_chunk, in_quarter] = form.rows::<S>(vocabulary);
    let has_gradients = wanted.contains(&true);
    for chunk in (0..rows).step_by(in_chunk) {
        let in_chunk = in_chunk.min(rows - chunk);
        step.workspace(|step| {
            let mut dlogits = step.empty([if has_gradients { in_chunk } else { 0 }, vocabulary])?;
            for quarter in (0..in_chunk).step_by(in_quarter) {
                let (first, rows) = (chunk + quarter, in_quarter.min(in_chunk - quarter));
                step.workspace(|step| {
                    let [for_logits, ..] = form.products(rows, width, vocabulary);
                    let (w, x) = (Lent::new(w.memory(), w.shape()), part(hidden, first, [rows, width]));
                    let mut logits = step.empty([rows, vocabulary])?;
                    gemm_into(step, &for_logits, &x, &w, None::<&Tensor<'_>>, &mut logits)?;
                    let mut dlogits = has_gradients.then(|| part_mut(&mut dlogits, quarter, [rows, vocabulary]));
                    of_quarter(Quarter { step, first, logits, dlogits: dlogits.as_mut() })
                })?;
            }
            let (w, none) = (Lent::new(w.memory(), w.shape()), None::<&Tensor<'_>>);
            let [_, for_dhidden, for_dw] = form.products(in_chunk, width, vocabulary);
            if let Some(dhidden) = &mut dhidden {
                let mut dhidden = part_mut(dhidden, chunk, [in_chunk, width]);
                gemm_into(step, &for_dhidden, &dlogits, &w, none, &mut dhidden)?;
            }
            let Some(dw) = &dw else { return Ok(()) };
            let for_dw = if chunk == 0 { for_dw } else { for_dw.accumulate() };
            let (x, dlogits) = (part(hidden, chunk, [in_chunk, width]), Lent::new(dlogits.memory(), dlogits.shape()));
            let [left, right] = if form.tied { [dlogits, x] } else { [x, dlogits] };
            gemm_into(step, &for_dw, &left, &right, none, &mut LentMut::new(dw.memory(), dw.shape()))
        })?;
    }
    Ok((dhidden, dw))
}

/// The loss `-log softmax(hidden w)[label]` of each row; `hidden`: `[.., width]`, `w`: as in
/// `form`, `labels`, result: hidden's extents without the last. The result is f32, also for logits
/// that are stored as BF16. Rows with the label [`IGNORED`](super::IGNORED) have the loss 0. The
/// logits exist as in [`linear_cross_entropy`], and have its bits.
///
/// Queued. Scratch: a quarter of a chunk's logits, and at most 64 MiB for split-K products.
///
/// # Errors
/// [`Error::Misuse`] when extents differ, and for label rules, which are those of a sum of rows.
#[track_caller]
pub fn linear_cross_entropy_of_rows<'s, S: Activation>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    form: &LmHeadConfig,
) -> Result<Tensor<'s>> {
    let (vocabulary, labels) = rows_of(step, hidden, w, labels, form)?;
    let mut losses = step.empty(labels.shape())?;
    in_chunks(step, hidden, w, form, vocabulary, [false; 2], &mut |Quarter { step, first, logits, .. }| {
        let [rows, classes] = logits.shape().as_rows();
        step.launch(kernels::loss::cross_entropy_of_rows {
            logits: logits.slice(),
            labels: part(labels, first, [rows]).slice(),
            classes,
            gradients: 0,
            dlosses: Slice::empty(),
            losses: part_mut(&mut losses, first, [rows]).out(),
            dlogits: PointerMut::empty(),
        })
    })?;
    Ok(losses)
}

/// The `wanted` gradients of hidden and, in f32, of w, from the gradients `dlosses` of the losses
/// of [`linear_cross_entropy_of_rows`]. The logits are computed again. Their gradients exist, and
/// are summed, as in [`linear_cross_entropy`].
///
/// # Errors
/// The errors of [`linear_cross_entropy_of_rows`], and [`Error::Misuse`] unless there is a gradient
/// for each label.
#[track_caller]
pub fn linear_cross_entropy_of_rows_backward<'s, S: Activation>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    (dlosses, form): (&impl Source<'s, f32>, &LmHeadConfig),
    wanted: [bool; 2],
) -> Result<(Option<Tensor<'s, S>>, Option<Tensor<'s>>)> {
    let (vocabulary, labels) = rows_of(step, hidden, w, labels, form)?;
    same_shape("linear_cross_entropy_of_rows", labels.shape(), dlosses.shape())?;
    in_chunks(step, hidden, w, form, vocabulary, wanted, &mut |Quarter { step, first, logits, dlogits }| {
        let [rows, classes] = logits.shape().as_rows();
        step.launch(kernels::loss::cross_entropy_of_rows {
            logits: logits.slice(),
            labels: part(labels, first, [rows]).slice(),
            classes,
            gradients: 1,
            dlosses: part(dlosses, first, [rows]).slice(),
            losses: PointerMut::empty(),
            dlogits: dlogits.map_or_else(PointerMut::empty, Target::out),
        })
    })
}

/// Checks the operands of [`linear_cross_entropy_of_rows`]. Returns the vocabulary's size and the
/// labels.
#[track_caller]
fn rows_of<'a, 's, S: Activation, I: IndexSource<'s>>(
    step: &Step<'s>,
    hidden: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    labels: &'a I,
    form: &LmHeadConfig,
) -> Result<(usize, &'a I::Values)> {
    const OP: &str = "linear_cross_entropy_of_rows";
    if form.rules != LabelRules::default() {
        let expected = "the default label rules: each row has its loss, and the label `IGNORED` the loss 0";
        return Err(Error::misuse(OP, expected, format!("{:?}", form.rules)));
    }
    let (_, vocabulary) = extents(OP, hidden.shape(), w.shape(), labels.shape(), form.tied)?;
    let rules = LabelRules { ignore: true, ..LabelRules::default() };
    Ok((vocabulary, rules.check(OP, step, labels, vocabulary)?))
}

/// Returns the rows and the width of `hidden`, and the vocabulary's size.
fn extents(op: &'static str, hidden: Shape, w: Shape, labels: Shape, tied: bool) -> Result<([usize; 2], usize)> {
    let rows = hidden.as_rows();
    let vocabulary = match *w.extents() {
        [vocabulary, width] if tied && width == rows[1] => Some(vocabulary),
        [width, vocabulary] if !tied && width == rows[1] => Some(vocabulary),
        _ => None,
    };
    let before = hidden.extents().split_last().map(|(_, before)| before);
    match vocabulary {
        Some(vocabulary) if vocabulary > 0 && before == Some(labels.extents()) => Ok((rows, vocabulary)),
        _ => {
            let matrix = if tied { "[vocabulary, width]" } else { "[width, vocabulary]" };
            let expected =
                format!("hidden [.., width], a matrix {matrix} and labels of hidden's extents except the last");
            Err(Error::misuse(op, expected, format!("{hidden}, {w} and {labels}")))
        }
    }
}

/// Multiplies a matrix by `factor`, `[1]`, in pieces of rows. Scratch: a piece.
fn scale_in_place<'s>(step: &Step<'s>, x: &mut Tensor<'s>, factor: &impl Source<'s, f32>) -> Result<()> {
    let [rows, cols] = x.shape().as_rows();
    for piece in pieces::pieces(rows, cols * size_of::<f32>(), &[cols]) {
        let scaled = ops::scale_by(step, &pieces::part(x, &piece), factor)?;
        ops::copy_into(step, &scaled, &mut pieces::part_mut(x, &piece))?;
        step.free(scaled);
    }
    Ok(())
}

/// Lends the part of this shape, starting at a row, of an outer step's tensor to the scope `'i`.
fn part<'b, 'i, 's, T: Element, const N: usize>(
    of: &'b impl Source<'s, T>,
    row: usize,
    shape: [usize; N],
) -> Lent<'b, 'i, T> {
    let row_len: usize = shape[1..].iter().product();
    Lent::new(of.memory().part(row * row_len, shape[0] * row_len), shape.into())
}

/// Lends a part like [`part`], for writing.
fn part_mut<'b, 'i, 's, T: Element, const N: usize>(
    of: &'b mut impl Target<'s, T>,
    row: usize,
    shape: [usize; N],
) -> LentMut<'b, 'i, T> {
    let row_len: usize = shape[1..].iter().product();
    LentMut::new(of.memory().part(row * row_len, shape[0] * row_len), shape.into())
}

impl<'s> Tape<'_, 's> {
    /// Records the loss of [`ops::linear_cross_entropy`], `[1]`, with a parameter `w`; `hidden`:
    /// `[.., width]`. Another op, such as the embedding, may share the parameter. The gradients are
    /// computed with the loss, and backward multiplies them by the loss's own gradient. Until then
    /// they occupy memory: w's size in f32, and that of `hidden`. On an evaluation tape
    /// ([`Tape::evaluating`]) they are not computed, and backward returns an error.
    ///
    /// # Errors
    /// [`Error::Misuse`] when extents differ.
    #[track_caller]
    pub fn linear_cross_entropy<S: Activation>(
        &self,
        hidden: &Var<'s, S>,
        w: Parameter,
        labels: Indices<'s>,
        form: LmHeadConfig,
    ) -> Result<Var<'s>> {
        let op = self.op("linear_cross_entropy", [hidden])?;
        let weights = op.weights_as::<S>(w)?;
        let trains = !self.is_evaluating();
        let wanted = [trains && hidden.wants_gradient(), trains && op.frozen(w)?.is_none()];
        let (loss, dhidden, dw) = with_gradients(self.step(), hidden.value(), &weights, &labels, &form, wanted)?;
        let hidden = *hidden;
        Ok(op.record(loss.save(), move |back, dloss| {
            if !trains {
                let expected = "a tape for training (`Tape::with_generator`), which computes the head's gradients";
                return Err(Error::misuse("linear_cross_entropy", expected, "backward on an evaluation tape"));
            }
            let step = back.step();
            if let Some(dw) = dw
                && let Some(dw) = back.adopt_gradient(w, dw, |dw| scale_in_place(step, dw, &dloss))?
            {
                let (mut gradient, accumulate) = back.gradient_uninit(w)?;
                ops::launch::scale_by_into(step, &dw, &dloss, &mut gradient, accumulate)?;
                step.free(dw);
            }
            let Some(dhidden) = dhidden else { return Ok(()) };
            let scaled = ops::scale_by(step, &dhidden, &dloss)?;
            step.free(dhidden);
            back.add(&hidden, scaled)
        }))
    }

    /// Records the losses of [`ops::linear_cross_entropy_of_rows`] with a parameter `w`; `hidden`:
    /// `[.., width]`, result: hidden's extents without the last. Backward computes the logits
    /// again, so nothing of the vocabulary's size is kept for it.
    ///
    /// # Errors
    /// The errors of [`ops::linear_cross_entropy_of_rows`].
    #[track_caller]
    pub fn linear_cross_entropy_of_rows<S: Activation>(
        &self,
        hidden: &Var<'s, S>,
        w: Parameter,
        labels: Indices<'s>,
        form: LmHeadConfig,
    ) -> Result<Var<'s>> {
        let op = self.op("linear_cross_entropy_of_rows", [hidden])?;
        let weights = op.matrix::<S>(w)?;
        let wanted = [hidden.wants_gradient(), op.frozen(w)?.is_none()];
        let losses = linear_cross_entropy_of_rows(self.step(), hidden.value(), &weights, &labels, &form)?;
        weights.free(self.step());
        let hidden = *hidden;
        Ok(op.record(losses.save(), move |back, dlosses| {
            let (step, weights) = (back.step(), back.matrix::<S>(w)?);
            let (dhidden, dw) = linear_cross_entropy_of_rows_backward(
                step,
                hidden.value(),
                &weights,
                &labels,
                (&dlosses, &form),
                wanted,
            )?;
            weights.free(step);
            step.free(dlosses);
            if let Some(dw) = dw
                && let Some(dw) = back.adopt_gradient(w, dw, |_| Ok(()))?
            {
                let (mut gradient, accumulate) = back.gradient_uninit(w)?;
                match accumulate {
                    true => elementary::add_assign(step, &mut gradient, &dw)?,
                    false => ops::copy_into(step, &dw, &mut gradient)?,
                }
                step.free(dw);
            }
            match dhidden {
                Some(dhidden) => back.add(&hidden, dhidden),
                None => Ok(()),
            }
        }))
    }
}
