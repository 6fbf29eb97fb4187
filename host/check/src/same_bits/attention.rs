//! The cases of attention over any number of tokens, which all variants of a family share.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires. A
//! kernel receives seeded numbers in place of another kernel's output, so no case depends on
//! another kernel.

#![forbid(unsafe_code)]

use super::inputs::Inputs;
use kernels::flash_attention::{CAUSAL, Shape, flash_bwd_dkv, flash_bwd_dq, flash_delta, flash_forward};
use kernels::qkv_layout::QkvLayout;
use stepscope_core::ops::{self, AttentionConfig, PairFactors, QkNorm, Rotary, RotaryScaling};
use stepscope_core::{Result, Source, Stored, Target, Tensor};

/// Batch, tokens, heads and key heads, and whether they are stacked.
type Sizes = ([u32; 4], bool);

/// A configuration of attention.
struct Case<'s> {
    sizes: Sizes,
    width: u32,
    window: u32,
    documents: Tensor<'s, u32>,
    lengths: Tensor<'s, u32>,
    qkv: Tensor<'s>,
}

/// Each head layout and each mask, over several tiles with tails.
const WHOLE: [(Sizes, u32, bool); 4] = [
    (([1, 130, 4, 2], false), CAUSAL, false),
    (([1, 100, 2, 2], true), 70, true),
    (([3, 17, 2, 1], false), 0, true),
    (([1, 65, 1, 1], true), 0, false),
];

/// Two tiles, the second with one row, a group of two heads, and all masks.
const SMALLEST: [(Sizes, u32, bool); 2] = [(([1, 65, 2, 1], false), 33, true), (([1, 70, 1, 1], true), 0, false)];

impl<'s> Inputs<'_, 's> {
    /// Runs attention with each configuration, alternating between the widest head of a shape and
    /// one with a tail.
    fn attends(&self, shape: Shape, run: impl Fn(&Case<'s>) -> Result<()>) -> Result<()> {
        let widths = [shape.width() as u32, shape.width() as u32 / 2 + 8];
        let forms = self.by_size(&WHOLE[..], &SMALLEST);
        for (&(sizes @ ([batch, tokens, heads, kv_heads], _), window, masked), width) in
            forms.iter().zip(widths.into_iter().cycle())
        {
            let qkv = self.normals([(batch * tokens * (heads + 2 * kv_heads) * width) as usize])?;
            let mask = |length: u32, bound: u32| {
                self.random.borrow_mut().belows(if masked { length as usize } else { 0 }, bound)
            };
            let documents = mask(batch * tokens, 2);
            // Most tokens exist.
            let lengths: Vec<u32> = mask(batch, tokens / 4 + 1).into_iter().map(|fewer| tokens - fewer).collect();
            let documents = self.step.upload(&documents, [documents.len()])?;
            let lengths = self.step.upload(&lengths, [lengths.len()])?;
            run(&Case { sizes, width, window, documents, lengths, qkv })?;
        }
        Ok(())
    }

    /// Uploads a number for each token of each head, of the size of a denominator's logarithm.
    fn statistics(&self, case: &Case<'s>) -> Result<Tensor<'s>> {
        let length = case.statistics();
        self.step.upload(&self.random.borrow_mut().uniforms(length, 5.0, 8.0), [length])
    }

    /// Runs the op on heads with q, k and v, and gains for two of them.
    fn heads_of_all<S: Stored>(
        &self,
        run: impl Fn(&Tensor<'s, S>, &AttentionConfig<'s>, &Tensor<'s>) -> Result<()>,
    ) -> Result<()> {
        let smallest = [([1, 21], [4, 2], 32, false), ([1, 9], [1, 1], 80, true), ([1, 5], [2, 1], 256, false)];
        let whole = [([2, 50], [4, 2], 32, false), ([1, 77], [2, 2], 80, true), ([2, 20], [3, 1], 256, false)];
        for ([batch, tokens], [heads, kv_heads], width, stacked) in self.by_size(whole, smallest) {
            let config = AttentionConfig::new(heads).kv_heads(kv_heads);
            let qkv = if stacked {
                self.normals([3, batch, tokens, heads * width])?
            } else {
                self.normals([batch, tokens, (heads + 2 * kv_heads) * width])?
            };
            run(&qkv, &config, &self.normals([2, width])?)?;
        }
        Ok(())
    }
}

impl Case<'_> {
    fn statistics(&self) -> usize {
        let ([batch, tokens, heads, _], _) = self.sizes;
        (batch * tokens * heads) as usize
    }

    fn outputs(&self) -> usize {
        self.statistics() * self.width as usize
    }
}

/// Launches a kernel with the arguments of a case.
macro_rules! launch {
    ($i:ident, $kernel:ident, $shape:expr, $case:expr, { $($name:ident: $value:expr),* }) => {{
        let ([_, tokens, heads, kv_heads], stacked) = $case.sizes;
        $i.step.launch($kernel {
            shape: $shape,
            qkv: $case.qkv.slice(),
            documents: $case.documents.slice(),
            lengths: $case.lengths.slice(),
            layout: QkvLayout { tokens, heads, kv_heads, width: $case.width, stacked: u32::from(stacked) },
            window: $case.window,
            scale: 0.1,
            $($name: $value),*
        })
    }};
}

pub(super) fn forward(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    i.attends(shape, |case| {
        let (mut out, mut lse) = (i.step.empty([case.outputs()])?, i.step.empty([case.statistics()])?);
        launch!(i, flash_forward, shape, case, { out: out.out(), lse: lse.out() })?;
        i.keep(&out)?;
        i.keep(&lse)
    })
}

pub(super) fn queries(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    i.attends(shape, |case| {
        let (lse, delta, dout) = (i.statistics(case)?, i.statistics(case)?, i.normals([case.outputs()])?);
        let mut dqkv = ops::fill(i.step, case.qkv.shape(), 0.0)?;
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch!(i, flash_bwd_dq, shape, case, { lse: lse, delta: delta, dout: dout, dqkv: dqkv.out() })?;
        i.keep(&dqkv)
    })
}

pub(super) fn keys(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    i.attends(shape, |case| {
        let (lse, delta, dout) = (i.statistics(case)?, i.statistics(case)?, i.normals([case.outputs()])?);
        let mut dqkv = ops::fill(i.step, case.qkv.shape(), 0.0)?;
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch!(i, flash_bwd_dkv, shape, case, { lse: lse, delta: delta, dout: dout, dqkv: dqkv.out() })?;
        i.keep(&dqkv)
    })
}

pub(super) fn delta<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    for [batch, tokens, heads, width] in i.by_size([[2, 130, 3, 80], [1, 9, 2, 256]], [[1, 9, 3, 32], [2, 5, 1, 132]]) {
        let length = (batch * tokens * heads) as usize;
        let values = || i.normals::<S>([length * width as usize]);
        let (out, dout, mut delta) = (values()?, values()?, i.step.empty([length])?);
        i.step.launch(flash_delta {
            out: out.slice(),
            dout: dout.slice(),
            tokens,
            heads,
            width,
            delta: delta.out(),
        })?;
        i.keep(&delta)?;
    }
    Ok(())
}

pub(super) fn qk_norm<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    i.heads_of_all::<S>(|qkv, config, gains| {
        let (y, inverse_rms) = ops::qk_norm(i.step, qkv, QkNorm::new(gains, 1e-6), config)?;
        i.keep(&y)?;
        i.keep(&inverse_rms)
    })
}

pub(super) fn qk_norm_backward<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    i.heads_of_all::<S>(|qkv, config, gains| {
        let norm = QkNorm::new(gains, 1e-6);
        let (_, inverse_rms) = ops::qk_norm(i.step, qkv, norm, config)?;
        let (dy, mut dgains) = (i.normals::<S>(qkv.shape())?, i.normals(gains.shape())?);
        let dqkv = ops::launch::qk_norm_backward(i.step, qkv, norm, config, &inverse_rms, dy, &mut dgains, true)?;
        i.keep(&dqkv)?;
        i.keep(&dgains)
    })
}

pub(super) fn rotary<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    i.heads_of_all::<S>(|qkv, config, _| {
        let far = Rotary { offset: 100_000, ..Rotary::new(500_000.0) };
        i.keep(&ops::rotary(i.step, qkv, Rotary::default(), config)?)?;
        i.keep(&ops::launch::rotary_backward(i.step, ops::copy(i.step, qkv)?, far, config)?)
    })
}

pub(super) fn rotary_pairs<S: Stored>(i: &Inputs<'_, '_>) -> Result<()> {
    i.heads_of_all::<S>(|qkv, form, gains| {
        let columns = gains.shape().as_rows()[1].min(2 * PairFactors::MOST);
        let factors: Vec<f32> = (0..columns / 2).map(|pair| 1.0 + 0.25 * pair as f32).collect();
        let factors = PairFactors::new(&factors)?;
        let scaling = RotaryScaling::Long { short: factors, long: factors, context: 64, gain: 1.25 };
        let rotary = Rotary { columns: Some(columns), scaling, ..Rotary::default() };
        i.keep(&ops::rotary(i.step, qkv, rotary, form)?)
    })
}
