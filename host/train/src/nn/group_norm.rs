//! GroupNorm.

use super::Scope;
use stepscope_core::ops::Cast;
use stepscope_core::{Error, Initializer, Parameter, Result, Shape, Tape, Var};

/// `y = gain (x - mean) / sqrt(variance + epsilon) + bias`, with the mean and the variance of each
/// sample's group of channels (Wu and He, 2018); `x`, `y`: `[batch, channels, ..]`, `gain`, `bias`:
/// `[channels]`. One group is a LayerNorm of the sample, and one channel in each group an instance
/// norm.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// The gain, PyTorch's `weight`.
    pub gain: Parameter,
    /// The bias.
    pub bias: Parameter,
    /// The number of groups, which divides the channels.
    pub groups: usize,
    /// The term that keeps groups of equal values finite.
    pub epsilon: f32,
}

impl GroupNorm {
    /// The default epsilon, as in PyTorch.
    pub const EPSILON: f32 = 1e-5;

    /// Adds `gain`, initialized to one, and `bias`, initialized to zero. Uses
    /// [`GroupNorm::EPSILON`].
    pub fn new(mut names: Scope<'_>, groups: usize, channels: usize) -> Self {
        let gain = names.add("gain", [channels], Initializer::ONE);
        Self { gain, bias: names.add("bias", [channels], Initializer::ZERO), groups, epsilon: Self::EPSILON }
    }

    /// Computes the norm of x.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless x has at least two extents and the groups divide the second;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward<'s, S: Cast>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        const OP: &str = "GroupNorm";
        let shape = x.shape();
        let [batch, channels, ..] = *shape.extents() else {
            return Err(Error::misuse(OP, "an input [batch, channels, ..]", shape.to_string()));
        };
        if self.groups == 0 || !channels.is_multiple_of(self.groups) {
            let expected = format!("channels that {} groups divide", self.groups);
            return Err(Error::misuse(OP, expected, shape.to_string()));
        }
        let rows = x.reshape([batch, self.groups, shape.elements() / (batch * self.groups).max(1)])?;
        let centered = (rows - rows.mean_keep(-1)?)?;
        let variance = centered.square()?.mean_keep(-1)?;
        let normed = (centered * (variance + self.epsilon)?.rsqrt()?)?.reshape(shape)?;
        // [channels, 1, ..]
        let mut of_channel = vec![1; shape.extents().len() - 1];
        of_channel[0] = channels;
        let [gain, bias] = [self.gain, self.bias]
            .map(|parameter| tape.stored_as::<S>(&tape.parameter(parameter)?)?.reshape(Shape::of(OP, &of_channel)?));
        normed.mul(gain?)?.add(bias?)
    }
}
