//! Clipping of gradients by their norm, which candle does not have.

use candle_core::backprop::GradStore;
use candle_core::{DType, Error, Result, Tensor, Var};

/// Scales the gradients of weights so that their norm, over all of them, is at most `most`.
pub(crate) fn clip(gradients: &mut GradStore, weights: &[Var], most: f64) -> Result<()> {
    let mut squares = Vec::new();
    for weight in weights {
        let gradient = gradients.get(weight).ok_or_else(|| Error::msg("a weight has no gradient"))?;
        squares.push(gradient.to_dtype(DType::F32)?.sqr()?.sum_all()?);
    }
    let norm = Tensor::stack(&squares, 0)?.sum_all()?.sqrt()?;
    let scale = ((norm + 1e-6)?.recip()? * most)?.minimum(1.0)?;
    for weight in weights {
        if let Some(gradient) = gradients.remove(weight) {
            let scale = scale.to_dtype(gradient.dtype())?;
            gradients.insert(weight, gradient.broadcast_mul(&scale)?);
        }
    }
    Ok(())
}
