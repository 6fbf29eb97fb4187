//! CrossAsset: one token for each time scale, two transformer layers over the tokens, a head over their mean.
//!
//! With `x: [batch, 12, 193]`: `h_s = x_s W_s + b_s`; twice: `z = rms(h; norm1)`, `q = rms_head(z Wq; q_norm)`,
//! `k = rms_head(z Wk; k_norm)`, `v = z Wv`, 4 heads of 64, `h += softmax(q k^T / 8) v Wo`, `z = rms(h; norm2)`,
//! `h += gelu(z W1 + b1) W2 + b2`; `logits = mean_s(h) Wh + bh`: `[batch, 3]`. 50 tensors, 2,173,443 weights, each matrix
//! `[in, out]`, row-major.
//!
//! Activations, their gradients and the matrices that products read are f32 or BF16, as S says; weights, the gradients of weights, attention and the
//! loss are f32.

use std::marker::PhantomData;

use stepscope::nn::{Attention, Linear, Mlp, Names, RmsNorm, TokenLinear};
use stepscope::ops::Factor;
use stepscope::{Batch, Layout, Parameter, Result, Tape, Var};

use crate::sizes::{CLASSES, FEATURES, SCALES};

/// How large the model is.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Columns of a token, a multiple of 64.
    pub(crate) width: usize,
    /// Columns between the two linear layers of an MLP.
    pub(crate) hidden: usize,
    /// Transformer layers.
    pub(crate) layers: usize,
}

impl Sizes {
    /// CrossAsset's.
    pub(crate) const CROSSASSET: Self = Self { width: 256, hidden: 1024, layers: 2 };
}

/// The layers, from the input on.
pub(crate) struct Model<S = f32> {
    scales: TokenLinear,
    layers: Vec<Block>,
    head: Linear,
    stored: PhantomData<S>,
}

/// One transformer layer.
struct Block {
    attention: Attention,
    norm: RmsNorm,
    mlp: Mlp,
}

impl<S: Factor<S> + Factor<f32>> Model<S> {
    /// The model and the layout of its parameters.
    ///
    /// # Errors
    /// Never: names and shapes are constant.
    pub(crate) fn new() -> Result<(Self, Layout)> {
        Self::sized(Sizes::CROSSASSET)
    }

    /// The same of these sizes.
    ///
    /// # Errors
    /// Never: names do not come twice.
    pub(crate) fn sized(sizes: Sizes) -> Result<(Self, Layout)> {
        let Sizes { width, layers, .. } = sizes;
        let mut layout = Layout::builder();
        let mut names = layout.names();
        let scales = TokenLinear::new(&mut names, "scale", SCALES.len(), FEATURES, width);
        let layers = (0..layers).map(|number| Block::new(names.at(format!("layer{number}")), sizes)).collect();
        let head = Linear::new(names.at("head"), width, CLASSES);
        Ok((Self { scales, layers, head, stored: PhantomData }, layout.build()?))
    }

    /// `x`: `[batch, 12, 193]`, an input of the tape; result: logits `[batch, 3]`.
    ///
    /// # Errors
    /// Those of the ops: the arena is full, say.
    pub(crate) fn logits<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        let mut h = self.scales.forward(tape, &tape.stored_as::<S>(x)?)?;
        for layer in &self.layers {
            h = layer.forward(tape, &h)?;
        }
        tape.to_f32(&self.head.forward(tape, &tape.mean_tokens(&h)?)?)
    }
}

impl<S: Factor<S> + Factor<f32>> stepscope::Model for Model<S> {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>> {
        self.logits(tape, &tape.input(batch.input::<f32>(0)?))
    }

    /// The head's weight, whose gradient the report follows.
    fn watched(&self) -> Option<Parameter> {
        Some(self.head.weight)
    }
}

impl Block {
    /// Matrices before vectors: the order decides where the weights lie, and so the bits of the gradients' norm.
    fn new(mut names: Names<'_>, Sizes { width, hidden, .. }: Sizes) -> Self {
        let projections = Attention::projections(&mut names, width);
        let output = Linear::without_bias(names.at("wo"), width, width);
        let up = Linear::without_bias(names.at("ffn1"), width, hidden);
        let down = Linear::without_bias(names.at("ffn2"), hidden, width);
        let [norm1, norm2] = ["norm1", "norm2"].map(|name| RmsNorm::new(names.at(name), width));
        let attention = Attention { norm: norm1, projections, qk_norm: Attention::qk_norm(&mut names), output };
        let mlp = Mlp { up: up.with_bias(names.at("ffn1"), hidden), down: down.with_bias(names.at("ffn2"), width) };
        Self { attention, norm: norm2, mlp }
    }

    fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, h: &Var<'s, S>) -> Result<Var<'s, S>> {
        let h = self.attention.forward(tape, h)?;
        self.mlp.forward_residual(tape, &self.norm.forward(tape, &h)?, &h)
    }
}
