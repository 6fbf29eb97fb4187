//! One update in one call, for a loop that needs no more.
//!
//! Invariant: the loss and the norm of the gradients are finite where it returns.

#![forbid(unsafe_code)]

use super::optimizer::Optimizer;
use super::rule::UpdateRule;
use crate::autograd::{Tape, Var};
use crate::error::{Error, Quantity, Result};
use crate::finite::is_finite;
use crate::memory::Arena;
use crate::params::{Gradients, Parameters};
use crate::step::Eager;

impl<R: UpdateRule> Optimizer<R> {
    /// Makes one update, in a step of its own: `loss` computes it on the tape, backward gives `gradients`, over whatever they hold, and the
    /// rule changes `weights`. Returns the loss, which it waits for.
    ///
    /// It is [`Optimizer::advance`], then in [`Arena::step`] [`Tape::backward_afresh`] and [`Optimizer::apply`]: write these out for
    /// several micro-batches, for dropout, or to look at more than the loss. A [`Trainer`](crate::Trainer) adds captures, checkpoints and a loader.
    ///
    /// ```
    /// use stepscope::*;
    ///
    /// # fn main() -> Result<()> {
    /// let mut layout = Layout::builder();
    /// let w = layout.add("w", [2, 2], Initializer::fan_in(2));
    /// let device = Device::open(DeviceKind::Emulated)?;
    /// let mut weights = Parameters::new(&device, &layout.build()?, 7)?;
    /// let mut gradients = Gradients::zeros(&weights)?;
    /// let mut sgd = Sgd::new(&weights, SgdConfig::default())?;
    /// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// let loss = sgd.update(&mut arena, &mut weights, &mut gradients, |step, tape| {
    ///     let x = tape.input(step.upload(&[1.0, 0.0, 0.0, 1.0], [2, 2])?);
    ///     tape.cross_entropy(&tape.linear(&x, w, None)?, step.upload(&[0, 1], [2])?.save(), 0.5)
    /// })?;
    /// assert!(loss > 0.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of `loss`, of backward and of the rule; [`Error::NotFinite`] for a loss, or a norm of all gradients, that is not: the weights
    /// are worthless then.
    pub fn update(
        &mut self,
        arena: &mut Arena,
        weights: &mut Parameters,
        gradients: &mut Gradients,
        loss: impl for<'t, 's> FnOnce(&'t Eager<'s>, &Tape<'t, 's>) -> Result<Var<'s>>,
    ) -> Result<f32> {
        let update = self.advance()?;
        let [loss, squared_norm] = arena.step(|step| {
            let tape = Tape::new(step, weights);
            let loss = loss(step, &tape)?;
            tape.backward_afresh(&loss, gradients)?;
            let squared_norm = self.apply_with_norm(step, weights, gradients)?;
            Ok([step.read_scalar(loss.value())?, step.read_scalar(&squared_norm)?])
        })?;
        for (what, value) in [(Quantity::Loss, loss), (Quantity::GradientNorm, squared_norm)] {
            if !is_finite(value) {
                let tensor = weights.first_not_finite(Some(gradients), "")?;
                return Err(Error::NotFinite { update: Some(update), what, tensor });
            }
        }
        Ok(loss)
    }
}
