//! The cases of the cross-entropies, of which rows share a block or have one of their own.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.

#![forbid(unsafe_code)]

use super::inputs::Inputs;
use cuda_std::launch::{PointerMut, Slice};
use kernels::loss::{cross_entropy, cross_entropy_of_rows, loss_rows};
use stepscope_core::{Lent, OnDevice, Result, Source, Stored, Target, Tensor, ops};

/// Labels of rows.
type Labels<'b, 's> = Lent<'b, 's, u32>;

/// Runs the case of a sum over rows.
pub(super) fn of_sum<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    rows::<S>(i, |i, logits, labels| {
        let all = [
            ops::LabelRules::default().weighted(0.1),
            ops::LabelRules { smoothing: 0.1, ignore: true, weight: Some(0.1) },
        ];
        all.into_iter().try_for_each(|rules| {
            let (loss, dlogits) = ops::cross_entropy_by(i.step, logits, &OnDevice(labels), rules)?;
            i.keep(&loss)?;
            i.keep(&dlogits)
        })
    })
}

/// Runs the case of a sum over rows of capped logits.
pub(super) fn of_capped_sum<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    rows::<S>(i, |i, logits, labels| {
        let [rows, classes] = logits.shape().as_rows();
        [0.0, 0.1].into_iter().try_for_each(|smoothing| {
            let mut losses = i.step.empty([rows.div_ceil(loss_rows(classes))])?;
            let mut dlogits = i.step.empty::<S>(logits.shape())?;
            i.step.launch(cross_entropy {
                is_capped: true,
                logits: logits.slice(),
                labels: labels.slice(),
                classes,
                weight: 0.1,
                scale: 1.0,
                smoothing,
                ignore: 0,
                soft_cap: 1.5,
                gradients: 1,
                losses: losses.out(),
                dlogits: dlogits.out(),
            })?;
            i.keep(&losses)?;
            i.keep(&dlogits)
        })
    })
}

/// Runs the case of the losses of rows, and of their gradients. A soft cap of 0 means none.
pub(super) fn of_rows<S: Stored>(i: &Inputs<'_, '_>, soft_cap: f32) -> Result<()> {
    rows::<S>(i, |i, logits, labels| {
        let ([rows, classes], is_capped) = (logits.shape().as_rows(), soft_cap != 0.0);
        let dlosses = i.normals([rows])?;
        let (mut losses, mut dlogits) = (i.step.empty([rows])?, i.step.empty::<S>(logits.shape())?);
        i.step.launch(cross_entropy_of_rows {
            is_capped,
            logits: logits.slice(),
            labels: labels.slice(),
            classes,
            soft_cap,
            gradients: 0,
            dlosses: Slice::empty(),
            losses: losses.out(),
            dlogits: PointerMut::empty(),
        })?;
        i.step.launch(cross_entropy_of_rows {
            is_capped,
            logits: logits.slice(),
            labels: labels.slice(),
            classes,
            soft_cap,
            gradients: 1,
            dlosses: dlosses.slice(),
            losses: PointerMut::empty(),
            dlogits: dlogits.out(),
        })?;
        i.keep(&losses)?;
        i.keep(&dlogits)
    })
}

/// Runs a loss on rows of several lengths, and on rows of whole vectors that a block shares.
fn rows<S: Stored>(
    i: &Inputs<'_, '_>,
    loss: impl for<'s> Fn(&Inputs<'_, 's>, &Tensor<'s, S>, &Labels<'_, 's>) -> Result<()>,
) -> Result<()> {
    fn on<'s, S: Stored>(
        i: &Inputs<'_, 's>,
        logits: &Tensor<'s, S>,
        loss: &impl for<'t> Fn(&Inputs<'_, 't>, &Tensor<'t, S>, &Labels<'_, 't>) -> Result<()>,
    ) -> Result<()> {
        let labels = i.labels(logits)?;
        loss(i, logits, &i.step.lend(&labels, [labels.len()])?)
    }
    i.rows::<S>(|i, logits| on(i, logits, &loss))?;
    on(i, &i.normals([2, 4100])?, &loss)
}
