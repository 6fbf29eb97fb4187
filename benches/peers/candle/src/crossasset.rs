//! CrossAsset: the model of examples/crossasset/model.rs.

use candle_core::{D, DType, IndexOp, Result, Tensor};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear, linear_no_bias, loss, ops, rms_norm};

use crate::work::crossasset::{CLASSES, FEATURES, HEADS, HIDDEN, LAYERS, SCALES, WIDTH};

pub(crate) struct CrossAsset {
    scales: Vec<Linear>,
    blocks: Vec<Block>,
    head: Linear,
}

struct Block {
    norm1: RmsNorm,
    norm2: RmsNorm,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    ffn1: Linear,
    ffn2: Linear,
}

impl CrossAsset {
    pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
        let scale = |scale| linear(FEATURES, WIDTH, vb.pp(format!("scale{scale}")));
        Ok(Self {
            scales: (0..SCALES).map(scale).collect::<Result<_>>()?,
            blocks: (0..LAYERS).map(|layer| Block::new(vb.pp(format!("layer{layer}")))).collect::<Result<_>>()?,
            head: linear(WIDTH, CLASSES, vb.pp("head"))?,
        })
    }

    /// Returns the cross-entropy of `x`, `[batch, scales, features]`, in f32.
    pub(crate) fn loss(&self, x: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let token = |(scale, linear): (usize, &Linear)| linear.forward(&x.i((.., scale))?.contiguous()?);
        let tokens = self.scales.iter().enumerate().map(token).collect::<Result<Vec<_>>>()?;
        let mut h = Tensor::stack(&tokens, 1)?;
        for block in &self.blocks {
            h = block.forward(&h)?;
        }
        let logits = self.head.forward(&h.mean(1)?)?;
        loss::cross_entropy(&logits.to_dtype(DType::F32)?, labels)
    }
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        let norm = |size, name| rms_norm(size, 1e-6, vb.pp(name));
        let square = |name| linear_no_bias(WIDTH, WIDTH, vb.pp(name));
        Ok(Self {
            norm1: norm(WIDTH, "norm1")?,
            norm2: norm(WIDTH, "norm2")?,
            wq: square("wq")?,
            wk: square("wk")?,
            wv: square("wv")?,
            wo: square("wo")?,
            q_norm: norm(WIDTH / HEADS, "q_norm")?,
            k_norm: norm(WIDTH / HEADS, "k_norm")?,
            ffn1: linear(WIDTH, HIDDEN, vb.pp("ffn1"))?,
            ffn2: linear(HIDDEN, WIDTH, vb.pp("ffn2"))?,
        })
    }

    fn forward(&self, h: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = h.dims3()?;
        let z = self.norm1.forward_diff(h)?;
        let heads = |linear: &Linear| linear.forward(&z)?.reshape((batch, tokens, HEADS, WIDTH / HEADS));
        let q = self.q_norm.forward_diff(&heads(&self.wq)?)?.transpose(1, 2)?.contiguous()?;
        let k = self.k_norm.forward_diff(&heads(&self.wk)?)?.transpose(1, 2)?.contiguous()?;
        let v = heads(&self.wv)?.transpose(1, 2)?.contiguous()?;
        let scores = (q.matmul(&k.t()?)? * ((WIDTH / HEADS) as f64).powf(-0.5))?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let h = (h + self.wo.forward(&mixed.transpose(1, 2)?.reshape((batch, tokens, WIDTH))?)?)?;
        let z = self.ffn1.forward(&self.norm2.forward_diff(&h)?)?.gelu()?;
        h + self.ffn2.forward(&z)?
    }
}
