//! The CrossAsset model of primitives and layers: the computation of `model.rs`, whose fused layers
//! take fewer launches. `tests/crossasset.rs` compares their losses and gradients.

use stepscope::nn::{Linear, Mlp, RmsNorm};
use stepscope::{DeviceBatch, ParameterSpec, Result, Tape, Var};

use crate::model::Sizes;
use crate::sizes::{CLASSES, FEATURES, SCALES};

/// The columns of a head.
const HEAD: usize = 64;

/// The layers, starting at the input.
pub(crate) struct Model {
    scales: Vec<Linear>,
    blocks: Vec<Block>,
    head: Linear,
}

struct Block {
    norms: [RmsNorm; 2],
    qkv: [Linear; 3],
    head_norms: [RmsNorm; 2],
    output: Linear,
    mlp: Mlp,
}

impl Model {
    /// Builds a model of these sizes, with the names of `model.rs`.
    pub(crate) fn sized(Sizes { width, hidden, layers }: Sizes) -> Result<(Self, ParameterSpec)> {
        let mut spec = ParameterSpec::builder();
        let scale = |number| Linear::new(spec.at(format!("scale{number}")), FEATURES, width);
        let scales = (0..SCALES.len()).map(scale).collect();
        let block = |number| {
            let mut names = spec.at(format!("layer{number}"));
            Block {
                norms: ["norm1", "norm2"].map(|name| RmsNorm::new(names.at(name), width)),
                qkv: ["wq", "wk", "wv"].map(|name| Linear::without_bias(names.at(name), width, width)),
                head_norms: ["q_norm", "k_norm"].map(|name| RmsNorm::new(names.at(name), HEAD)),
                output: Linear::without_bias(names.at("wo"), width, width),
                mlp: Mlp {
                    up: Linear::new(names.at("ffn1"), width, hidden),
                    down: Linear::new(names.at("ffn2"), hidden, width),
                },
            }
        };
        let blocks = (0..layers).map(block).collect();
        let head = Linear::new(spec.at("head"), width, CLASSES);
        Ok((Self { scales, blocks, head }, spec.build()?))
    }
}

impl stepscope::Model for Model {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let scales = tape.input(batch.input::<f32>(0)?).unbind(1)?;
        let tokens = scales.iter().zip(&self.scales).map(|(x, layer)| layer.forward(tape, x));
        let mut h = Var::stack(&tokens.collect::<Result<Vec<_>>>()?, 1)?;
        for block in &self.blocks {
            h = block.forward(tape, &h)?;
        }
        self.head.forward(tape, &h.mean(1)?)
    }
}

impl Block {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, h: &Var<'s>) -> Result<Var<'s>> {
        let &[batch, tokens, width] = h.shape().extents() else { unreachable!("h has three extents") };
        let z = self.norms[0].forward(tape, h)?;
        let heads = |number: usize| {
            let x = self.qkv[number].forward(tape, &z)?.reshape([batch, tokens, width / HEAD, HEAD])?;
            let x = if number < 2 { self.head_norms[number].forward(tape, &x)? } else { x };
            x.permute([0, 2, 1, 3])
        };
        let scores = (heads(0)?.matmul_with(&heads(1)?, [false, true])? / (HEAD as f32).sqrt())?;
        let mixed = scores.softmax()?.matmul(&heads(2)?)?.permute([0, 2, 1, 3])?;
        let h = self.output.forward_residual(tape, &mixed.reshape(h.shape())?, h)?;
        self.mlp.forward_residual(tape, &self.norms[1].forward(tape, &h)?, &h)
    }
}
