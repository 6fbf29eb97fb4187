//! Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
//! Embedding", 2021).

use super::attention::{AttentionConfig, Sizes};
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::{Pointer, PointerMut};
use kernels::rotary as kernel;

/// The rotation of pairs of columns at each position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base, above 1. Pair i rotates by `base^(-2 i / width)` radians per position.
    pub base: f64,
    /// The position of the first token.
    pub offset: u32,
}

impl Rotary {
    /// Makes a rotation that starts at position 0.
    pub fn new(base: f64) -> Self {
        Self { base, offset: 0 }
    }

    /// Computes `base^(-2 / width)` in units of 2^-64.
    fn ratio(self, op: &'static str, width: usize) -> Result<u64> {
        if !(self.base > 1.0 && self.base.is_finite()) {
            return Err(Error::misuse(op, "a base above 1", self.base.to_string()));
        }
        if !width.is_multiple_of(8) {
            return Err(Error::misuse(op, "heads of a multiple of 8 columns", format!("{width} columns")));
        }
        // libm's `pow` is the same on every machine.
        Ok((libm::pow(self.base, -2.0 / width as f64) * 2f64.powi(64)) as u64)
    }
}

impl Default for Rotary {
    /// Makes a rotation with base 10,000 that starts at position 0.
    fn default() -> Self {
        Self::new(10_000.0)
    }
}

/// `(x cos - y sin, y cos + x sin)` for columns i and i + width / 2, `(x, y)`, of each head of q
/// and k, as in GPT-NeoX and Llama; v is copied. The angle is
/// `(offset + token) base^(-2 i / width)`. Its sine and cosine are within 2 ulp at every position.
/// `qkv`: a layout of [`AttentionConfig`]; result: the same. Queued; no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes do not fit `form`, or the heads' columns are not a multiple of 8;
/// [`Error::ArenaFull`].
#[track_caller]
pub fn rotary<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    rotary: Rotary,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    let sizes = form.sizes("rotary", qkv.shape())?;
    let ratio = rotary.ratio("rotary", sizes.width)?;
    let mut y = step.empty(qkv.shape())?;
    launch(step, sizes, (ratio, rotary.offset, false), (qkv.pointer(), y.out()))?;
    Ok(y)
}

/// The gradient of [`rotary`]'s `qkv`, from `dy`, the gradient of its result, in the memory of
/// `dy`. It rotates back. Queued; no scratch.
///
/// # Errors
/// The errors of [`rotary`].
#[track_caller]
pub fn rotary_backward<'s, S: Stored>(
    step: &Step<'s>,
    mut dy: Tensor<'s, S>,
    rotary: Rotary,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    let sizes = form.sizes("rotary_backward", dy.shape())?;
    let ratio = rotary.ratio("rotary_backward", sizes.width)?;
    launch(step, sizes, (ratio, rotary.offset, true), dy.in_place())?;
    Ok(dy)
}

#[track_caller]
fn launch<S: Stored>(
    step: &Step<'_>,
    sizes: Sizes,
    (ratio, offset, back): (u64, u32, bool),
    (x, out): (Pointer<'_, S>, PointerMut<'_, S>),
) -> Result<()> {
    step.launch(kernel::rotary {
        x,
        tokens: sizes.tokens as u32,
        heads: sizes.heads as u32,
        kv_heads: sizes.kv_heads as u32,
        width: sizes.width as u32,
        stacked: u32::from(sizes.stacked),
        ratio,
        offset,
        back: u32::from(back),
        samples: sizes.batch as u32,
        out,
    })
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::rotary`]. Backward is [`ops::rotary_backward`].
    #[track_caller]
    pub fn rotary<S: Stored>(
        &self,
        qkv: &Var<'s, S>,
        rotary: Rotary,
        form: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("rotary", [qkv])?;
        let y = ops::rotary(self.step(), qkv.value(), rotary, form)?;
        let (qkv, form) = (*qkv, *form);
        Ok(op.record(y.save(), move |back, dy| {
            let dqkv = ops::rotary_backward(back.step(), dy, rotary, &form)?;
            back.add(&qkv, dqkv)
        }))
    }
}
