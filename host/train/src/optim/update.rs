//! One update in one call, for simple training loops.
//!
//! Invariant: if it returns a loss, that loss and the norm of the gradients are finite.

#![forbid(unsafe_code)]

use super::optimizer::Optimizer;
use super::rule::UpdateRule;
use stepscope_core::internals::is_finite;
use stepscope_core::{Arena, EagerStep, Error, Gradients, Parameters, Quantity, Result, Tape, Var};

impl<R: UpdateRule> Optimizer<R> {
    /// Makes one update, in a step of its own. `loss` computes the loss on the tape, backward
    /// overwrites `gradients`, and the rule changes `weights`. Waits for the loss and returns it.
    ///
    /// It calls [`Optimizer::advance`] and then, in [`Arena::step`], [`Tape::backward_overwrite`]
    /// and [`Optimizer::apply`]. Write these calls out if you need several micro-batches, dropout,
    /// or more than the loss. A [`Trainer`](crate::Trainer) adds captures, checkpoints and a
    /// loader.
    ///
    /// ```
    /// use stepscope::optim::Sgd;
    /// use stepscope::parameters::Initializer;
    /// use stepscope::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// let mut spec = ParameterSpec::builder();
    /// let w = spec.add("w", [2, 2], Initializer::fan_in(2));
    /// let device = Device::open(DeviceKind::Emulated)?;
    /// let mut weights = Parameters::new(&device, &spec.build()?, 7)?;
    /// let mut gradients = Gradients::zeros(&weights)?;
    /// let mut sgd = Optimizer::new(&weights, Sgd::default())?;
    /// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    /// let loss = sgd.update(&mut arena, &mut weights, &mut gradients, |step, tape| {
    ///     let x = tape.input(step.upload(&[1.0, 0.0, 0.0, 1.0], [2, 2])?);
    ///     tape.cross_entropy(&tape.linear(&x, w, None)?, step.upload_indices(&[0, 1], [2])?)
    /// })?;
    /// assert!(loss > 0.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the loss or the norm of all gradients is not finite: the weights are
    /// then worthless.
    pub fn update(
        &mut self,
        arena: &mut Arena,
        weights: &mut Parameters,
        gradients: &mut Gradients,
        loss: impl for<'t, 's> FnOnce(&'t EagerStep<'s>, &Tape<'t, 's>) -> Result<Var<'s>>,
    ) -> Result<f32> {
        let ticket = self.advance()?;
        let update = ticket.number();
        let [loss, squared_norm] = arena.step(|step| {
            let tape = Tape::new(step, weights);
            let loss = loss(step, &tape)?;
            tape.backward_overwrite(&loss, gradients)?;
            let squared_norm = self.apply_with_norm(ticket, step, weights, gradients)?;
            Ok([step.read_scalar(loss.value())?, step.read_scalar(&squared_norm)?])
        })?;
        for (what, value) in [(Quantity::Loss, loss), (Quantity::GradientNorm, squared_norm)] {
            if !is_finite(value) {
                let tensor = weights.first_not_finite(Some(gradients), "")?;
                return Err(Error::NotFinite { update, what, tensor });
            }
        }
        Ok(loss)
    }
}
