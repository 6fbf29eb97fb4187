//! GPT-2 with a tied head: the model of gpt2.py.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{Embedding, Init, LayerNorm, Linear, Module, VarBuilder, layer_norm, linear, loss, ops};

use crate::work::Gpt2Sizes;

pub(crate) struct Gpt2 {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// The causal mask, added to scores: minus infinity for later tokens.
    mask: Tensor,
}

struct Block {
    norm1: LayerNorm,
    norm2: LayerNorm,
    attention: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl Gpt2 {
    pub(crate) fn new(sizes: Gpt2Sizes, vb: VarBuilder) -> Result<Self> {
        let Gpt2Sizes { vocabulary, width, layers, tokens, .. } = sizes;
        let table =
            |name, rows| vb.pp(name).get_with_hints((rows, width), "weight", Init::Randn { mean: 0.0, stdev: 0.02 });
        let block = |layer| Block::new(sizes, vb.pp(format!("blocks.{layer}")));
        let later = |row| (0..tokens).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 });
        let mask: Vec<f32> = (0..tokens).flat_map(later).collect();
        Ok(Self {
            tokens: Embedding::new(table("tokens", vocabulary)?, width),
            positions: table("positions", tokens)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            mask: Tensor::from_vec(mask, (tokens, tokens), vb.device())?.to_dtype(vb.dtype())?,
        })
    }

    /// Returns the cross-entropy of `ids`, `[samples, tokens]`, in f32.
    pub(crate) fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut h = self.tokens.forward(ids)?.broadcast_add(&self.positions)?;
        for block in &self.blocks {
            h = block.forward(&h, &self.mask)?;
        }
        let logits = normed(&self.norm, &h)?.flatten_to(1)?.matmul(&self.tokens.embeddings().t()?)?;
        loss::cross_entropy(&logits.to_dtype(DType::F32)?, &targets.flatten_all()?)
    }
}

impl Block {
    fn new(Gpt2Sizes { width, heads, .. }: Gpt2Sizes, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            attention: linear(width, 3 * width, vb.pp("attention"))?,
            output: linear(width, width, vb.pp("output"))?,
            up: linear(width, 4 * width, vb.pp("up"))?,
            down: linear(4 * width, width, vb.pp("down"))?,
            heads,
        })
    }

    fn forward(&self, h: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (samples, tokens, width) = h.dims3()?;
        let columns = width / self.heads;
        let qkv = self.attention.forward(&normed(&self.norm1, h)?)?;
        let heads = |part: usize| {
            let part = qkv.narrow(2, part * width, width)?.reshape((samples, tokens, self.heads, columns))?;
            part.transpose(1, 2)?.contiguous()
        };
        let (q, k, v) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (q.matmul(&k.t()?)? * (columns as f64).powf(-0.5))?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let h = (h + self.output.forward(&mixed.transpose(1, 2)?.reshape((samples, tokens, width))?)?)?;
        let z = self.up.forward(&normed(&self.norm2, &h)?)?.gelu()?;
        h + self.down.forward(&z)?
    }
}

/// Applies the norm in its differentiable form.
fn normed(norm: &LayerNorm, h: &Tensor) -> Result<Tensor> {
    let bias = norm.bias().expect("it was made with a bias");
    ops::layer_norm_slow(h, norm.weight(), bias, norm.eps() as f32)
}
