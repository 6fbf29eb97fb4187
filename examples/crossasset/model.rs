//! CrossAsset: one token for each time scale, two transformer layers over the tokens, a head over their mean.
//!
//! With `x: [batch, 12, 193]`: `h_s = x_s W_s + b_s`; twice: `z = rms(h; norm1)`, `q = rms_head(z Wq; q_norm)`,
//! `k = rms_head(z Wk; k_norm)`, `v = z Wv`, 4 heads of 64, `h += softmax(q k^T / 8) v Wo`, `z = rms(h; norm2)`,
//! `h += gelu(z W1 + b1) W2 + b2`; `logits = mean_s(h) Wh + bh`: `[batch, 3]`. 50 tensors, 2,173,443 weights, each matrix
//! `[in, out]`, row-major.

use stepscope::{Initializer, Layout, Parameter, Result, Stack, Tape, Var};

use crate::dataset::CLASSES;
use crate::features::{FEATURES, SCALES};

const WIDTH: usize = 256;
const HEAD: usize = 64;
const HIDDEN: usize = 1024;
const LAYERS: usize = 2;
const EPSILON: f32 = 1e-6;

/// The handles of the model's parameters.
pub(crate) struct Model {
    scale_weights: Stack,
    scale_biases: Stack,
    layers: Vec<Block>,
    head_weight: Parameter,
    head_bias: Parameter,
}

/// One transformer layer.
struct Block {
    norm1: Parameter,
    /// Wq, Wk, Wv.
    projections: Stack,
    /// The gains of q and of k.
    qk_norm: Stack,
    wo: Parameter,
    norm2: Parameter,
    ffn1: [Parameter; 2],
    ffn2: [Parameter; 2],
}

impl Model {
    /// The model and the layout of its parameters.
    ///
    /// # Errors
    /// Never: names and shapes are constant.
    pub(crate) fn new() -> Result<(Self, Layout)> {
        let mut layout = Layout::builder();
        let zero = Initializer::Constant(0.0);
        let scales = SCALES.len();
        let scale_weights =
            layout.add_stack(scales, |s| format!("scale{s}.weight"), [FEATURES, WIDTH], Initializer::fan_in(FEATURES));
        let scale_biases = layout.add_stack(scales, |s| format!("scale{s}.bias"), [WIDTH], zero);
        let mut layers = Vec::new();
        for number in 0..LAYERS {
            let name = |part: &str| format!("layer{number}.{part}");
            let one = Initializer::Constant(1.0);
            let projection = |part: usize| name(["wq.weight", "wk.weight", "wv.weight"][part]);
            let projections = layout.add_stack(3, projection, [WIDTH, WIDTH], Initializer::fan_in(WIDTH));
            let mut matrix = |part, rows, cols| layout.add(name(part), [rows, cols], Initializer::fan_in(rows));
            let wo = matrix("wo.weight", WIDTH, WIDTH);
            let ffn1 = matrix("ffn1.weight", WIDTH, HIDDEN);
            let ffn2 = matrix("ffn2.weight", HIDDEN, WIDTH);
            let norm1 = layout.add(name("norm1.gain"), [WIDTH], one);
            let norm2 = layout.add(name("norm2.gain"), [WIDTH], one);
            let qk_norm = layout.add_stack(2, |part| name(["q_norm.gain", "k_norm.gain"][part]), [HEAD], one);
            layers.push(Block {
                norm1,
                projections,
                qk_norm,
                wo,
                norm2,
                ffn1: [ffn1, layout.add(name("ffn1.bias"), [HIDDEN], zero)],
                ffn2: [ffn2, layout.add(name("ffn2.bias"), [WIDTH], zero)],
            });
        }
        let head_weight = layout.add("head.weight", [WIDTH, CLASSES], Initializer::fan_in(WIDTH));
        let head_bias = layout.add("head.bias", [CLASSES], zero);
        Ok((Self { scale_weights, scale_biases, layers, head_weight, head_bias }, layout.build()?))
    }

    /// The head's weight, whose gradient the report follows.
    pub(crate) fn head_weight(&self) -> Parameter {
        self.head_weight
    }

    /// `x`: `[batch, 12, 193]`, an input of the tape; result: logits `[batch, 3]`.
    ///
    /// # Errors
    /// Those of the ops: the arena is full, say.
    pub(crate) fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        let mut h = tape.linear_per_token(x, &self.scale_weights, &self.scale_biases)?;
        for layer in &self.layers {
            h = layer.forward(tape, &h)?;
        }
        tape.linear(&tape.mean_tokens(&h)?, self.head_weight, Some(self.head_bias))
    }
}

impl Block {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, h: &Var<'s>) -> Result<Var<'s>> {
        let qkv = tape.norm_project(h, self.norm1, EPSILON, &self.projections)?;
        let mixed = tape.attention(&qkv, &self.qk_norm, EPSILON, 1.0 / (HEAD as f32).sqrt())?;
        let h = tape.linear_residual(&mixed, self.wo, None, h)?;
        let z = tape.rms_norm(&h, self.norm2, EPSILON)?;
        let ([w1, b1], [w2, b2]) = (self.ffn1, self.ffn2);
        tape.linear_residual(&tape.linear_gelu(&z, w1, Some(b1))?, w2, Some(b2), &h)
    }
}
