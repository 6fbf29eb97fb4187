//! The CrossAsset model: one token per time scale, two transformer layers over the tokens, and a
//! head over their mean.
//!
//! For `x: [batch, 12, 193]`, `h_s = x_s W_s + b_s`. Each of two layers computes `z = rms(h;
//! norm1)`, `q = rms_head(z Wq; q_norm)`, `k = rms_head(z Wk; k_norm)`, `v = z Wv`, with 4 heads of
//! 64, `h += softmax(q k^T / 8) v Wo`, `z = rms(h; norm2)`, and `h += gelu(z W1 + b1) W2 + b2`.
//! Then `logits = mean_s(h) Wh + bh`: `[batch, 3]`. There are 50 tensors with 2,173,443 weights.
//! Each matrix is `[in, out]`, row-major.
//!
//! Activations, their gradients and the operands of matrix multiplies are f32 or BF16, as `S`
//! selects. Weights, their gradients, attention and the loss are f32.

#[path = "layers.rs"]
mod layers;

use std::marker::PhantomData;

use stepscope::nn::{Linear, Mlp, RmsNorm, Scope};
use stepscope::ops::Activation;
use stepscope::{DeviceBatch, ParameterSpec, Result, Tape, Var};

use self::layers::{Attention, TokenLinear};
use crate::sizes::{CLASSES, FEATURES, SCALES};

/// The size of the model.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Columns per token, a multiple of 64.
    pub(crate) width: usize,
    /// Columns between the two linear layers of an MLP.
    pub(crate) hidden: usize,
    /// Transformer layers.
    pub(crate) layers: usize,
}

impl Sizes {
    /// The sizes of CrossAsset.
    pub(crate) const CROSSASSET: Self = Self { width: 256, hidden: 1024, layers: 2 };
}

/// The layers, starting at the input.
pub(crate) struct Model<S = f32> {
    scales: TokenLinear,
    layers: Vec<Block>,
    pub(crate) head: Linear,
    stored: PhantomData<S>,
}

/// A transformer layer.
struct Block {
    attention: Attention,
    norm: RmsNorm,
    mlp: Mlp,
}

impl<S: Activation> Model<S> {
    /// Builds the model and its parameter spec.
    ///
    /// # Errors
    /// Never, since names and shapes are constant.
    pub(crate) fn new() -> Result<(Self, ParameterSpec)> {
        Self::sized(Sizes::CROSSASSET)
    }

    /// Builds a model of these sizes.
    ///
    /// # Errors
    /// Never, since names are unique.
    pub(crate) fn sized(sizes: Sizes) -> Result<(Self, ParameterSpec)> {
        let Sizes { width, layers, .. } = sizes;
        let mut spec = ParameterSpec::builder();
        let scales = TokenLinear::new(&mut spec, "scale", SCALES.len(), FEATURES, width);
        let layers = (0..layers).map(|number| Block::new(spec.at(format!("layer{number}")), sizes)).collect();
        let head = Linear::new(spec.at("head"), width, CLASSES);
        Ok((Self { scales, layers, head, stored: PhantomData }, spec.build()?))
    }

    /// Returns logits `[batch, 3]` for `x: [batch, 12, 193]`, an input of the tape.
    ///
    /// # Errors
    /// When an op fails, for example because the arena is full.
    pub(crate) fn logits<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s, S>> {
        let mut h = self.scales.forward(tape, &tape.stored_as::<S>(x)?)?;
        for layer in &self.layers {
            h = layer.forward(tape, &h)?;
        }
        self.head.forward(tape, &tape.mean_tokens(&h)?)
    }
}

impl<S: Activation> stepscope::Model<S> for Model<S> {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, S>> {
        self.logits(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

impl Block {
    /// Adds matrices before vectors. The order sets the positions of the weights, and with them the
    /// bits of the gradient norm.
    fn new(mut names: Scope<'_>, Sizes { width, hidden, .. }: Sizes) -> Self {
        let projections = Attention::projections(&mut names, width);
        let output = Linear::without_bias(names.at("wo"), width, width);
        let up = Linear::without_bias(names.at("ffn1"), width, hidden);
        let down = Linear::without_bias(names.at("ffn2"), hidden, width);
        let [norm1, norm2] = ["norm1", "norm2"].map(|name| RmsNorm::new(names.at(name), width));
        let attention = Attention { norm: norm1, projections, qk_norm: Attention::qk_norm(&mut names), output };
        let mlp = Mlp { up: up.with_bias(names.at("ffn1"), hidden), down: down.with_bias(names.at("ffn2"), width) };
        Self { attention, norm: norm2, mlp }
    }

    fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, h: &Var<'s, S>) -> Result<Var<'s, S>> {
        let h = self.attention.forward(tape, h)?;
        self.mlp.forward_residual(tape, &self.norm.forward(tape, &h)?, &h)
    }
}
