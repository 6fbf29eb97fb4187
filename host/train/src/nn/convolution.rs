//! Convolutions.

use super::Scope;
use stepscope_core::ops::{Activation, ConvolutionConfig};
use stepscope_core::{Error, Initializer, Parameter, Result, Tape, Var};

/// A convolution of images, as `torch.nn.Conv2d`; see [`Var::conv2d`].
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    /// The weight, `[out, in / groups, height, width]`.
    pub weight: Parameter,
    /// The bias, `[out]`, if there is one.
    pub bias: Option<Parameter>,
    /// Stride, padding, dilation and groups.
    pub config: ConvolutionConfig,
}

impl Conv2d {
    /// Adds `weight`, initialized with [`Initializer::fan_in`], and `bias`, initialized to zero.
    /// `config.groups` divides both numbers of channels.
    pub fn new(
        mut names: Scope<'_>,
        [inputs, outputs]: [usize; 2],
        kernel: [usize; 2],
        config: ConvolutionConfig,
    ) -> Self {
        let own = inputs / config.groups.max(1);
        let fan_in = Initializer::fan_in(own * kernel[0] * kernel[1]);
        let weight = names.add("weight", [outputs, own, kernel[0], kernel[1]], fan_in);
        Self { weight, bias: Some(names.add("bias", [outputs], Initializer::ZERO)), config }
    }

    /// Computes the convolution; `x`: `[batch, in, height, width]`, result:
    /// `[batch, out, height, width]`.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let weight = tape.stored_as::<S>(&tape.parameter(self.weight)?)?;
        biased(tape, x.conv2d(&weight, self.config)?, self.bias)
    }
}

/// A transposed convolution of images, as `torch.nn.ConvTranspose2d`; see
/// [`Var::conv_transpose2d`].
#[derive(Clone, Copy, Debug)]
pub struct ConvTranspose2d {
    /// The weight, `[in, out / groups, height, width]`.
    pub weight: Parameter,
    /// The bias, `[out]`, if there is one.
    pub bias: Option<Parameter>,
    /// Stride, padding, dilation and groups.
    pub config: ConvolutionConfig,
    /// Rows and columns at the end of the result that no window reaches: PyTorch's
    /// `output_padding`.
    pub more: [usize; 2],
}

impl ConvTranspose2d {
    /// Adds `weight`, initialized with [`Initializer::fan_in`] of an output's terms, and `bias`,
    /// initialized to zero. `config.groups` divides both numbers of channels.
    pub fn new(
        mut names: Scope<'_>,
        [inputs, outputs]: [usize; 2],
        kernel: [usize; 2],
        config: ConvolutionConfig,
    ) -> Self {
        let groups = config.groups.max(1);
        let fan_in = Initializer::fan_in((inputs / groups * kernel[0] * kernel[1]).max(1));
        let weight = names.add("weight", [inputs, outputs / groups, kernel[0], kernel[1]], fan_in);
        Self { weight, bias: Some(names.add("bias", [outputs], Initializer::ZERO)), config, more: [0; 2] }
    }

    /// Computes the transposed convolution; `x`: `[batch, in, height, width]`, result:
    /// `[batch, out, height, width]`.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let weight = tape.stored_as::<S>(&tape.parameter(self.weight)?)?;
        biased(tape, x.conv_transpose2d(&weight, self.config, self.more)?, self.bias)
    }
}

/// A convolution of sequences, as `torch.nn.Conv1d`: a [`Conv2d`] of images of one row.
#[derive(Clone, Copy, Debug)]
pub struct Conv1d(pub Conv2d);

impl Conv1d {
    /// Adds the parameters of [`Conv2d::new`], with a weight `[out, in / groups, 1, kernel]`. The
    /// first number of each pair in `config` is that of images of one row.
    pub fn new(names: Scope<'_>, channels: [usize; 2], kernel: usize, config: ConvolutionConfig) -> Self {
        Self(Conv2d::new(names, channels, [1, kernel], config))
    }

    /// Computes the convolution; `x`: `[batch, in, length]`, result: `[batch, out, length]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        if x.shape().extents().len() != 3 {
            return Err(Error::misuse("Conv1d", "an input [batch, channels, length]", x.shape().to_string()));
        }
        self.0.forward(tape, &x.unsqueeze(2)?)?.squeeze(2)
    }
}

/// Adds a bias for each channel.
fn biased<'s, S: Activation>(tape: &Tape<'_, 's>, y: Var<'s, S>, bias: Option<Parameter>) -> Result<Var<'s, S>> {
    let Some(bias) = bias else { return Ok(y) };
    let bias = tape.stored_as::<S>(&tape.parameter(bias)?)?;
    y.add(bias.reshape([bias.shape().elements(), 1, 1])?)
}
