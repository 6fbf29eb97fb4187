//! The cases of attention on tensor cores, which all variants of a family share.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.
//! In the smallest size every sum is exact, so the rule by which a GPU's tensor cores add changes
//! nothing. The values of q, k, v and dout are small whole numbers, with more zeros in wider heads.
//! The weights are powers of two, because scores are multiples of ln 2. In the whole size all
//! numbers are random, and the digests have the bits of the rule.

#![forbid(unsafe_code)]

use super::CaseSize;
use super::inputs::Inputs;
use half::bf16;
use kernels::flash_attention::CAUSAL;
use kernels::flash_attention_mma::{
    Gradient, SCORES_BF16, Shape, flash_bwd_dkv_ds_mma, flash_bwd_dkv_mma, flash_bwd_dq_mma, flash_bwd_from_scores_mma,
    flash_bwd_scores_mma, flash_forward_mma, stored_scores,
};
use kernels::flash_attention_wgmma::{
    self as wgmma, flash_bwd_dkv_ds_wgmma, flash_bwd_dkv_wgmma, flash_bwd_dq_wgmma, flash_bwd_from_scores_wgmma,
    flash_bwd_scores_wgmma, flash_forward_wgmma,
};
use kernels::qkv_layout::QkvLayout;
use std::f32::consts::LN_2;
use stepscope_core::{Result, Source, Stored, Target, Tensor};

/// Batch, tokens, heads and key heads, whether they are stacked, the window, and whether there are
/// documents and lengths.
type Sizes = ([u32; 4], bool, u32, bool);

/// A configuration of attention.
struct Case<'s, S: Stored> {
    sizes: Sizes,
    width: u32,
    documents: Tensor<'s, u32>,
    lengths: Tensor<'s, u32>,
    qkv: Tensor<'s, S>,
}

/// Each head layout and each mask, over several tiles with tails.
const WHOLE: [Sizes; 4] = [
    ([1, 200, 4, 2], false, CAUSAL, false),
    ([1, 140, 2, 2], true, 70, true),
    ([3, 17, 2, 1], false, 0, true),
    ([1, 65, 1, 1], true, 0, false),
];

/// Two tiles, the second with one row, a group of two heads, and all masks.
const SMALLEST: [Sizes; 2] = [([1, 65, 2, 1], false, 33, true), ([1, 70, 1, 1], true, 0, false)];

impl<'s> Inputs<'_, 's> {
    /// Uploads random numbers. In the smallest size they are whole numbers up to `most` in
    /// magnitude, of which one in `few` is nonzero.
    fn sparse<S: Stored>(&self, length: usize, most: usize, few: usize) -> Result<Tensor<'s, S>> {
        if self.size == CaseSize::Whole {
            return self.normals([length]);
        }
        let below = self.random.borrow_mut().belows(length, (2 * most * few) as u32);
        let value = |below: u32| if below > 2 * most as u32 { 0.0 } else { below as f32 - most as f32 };
        self.step.upload(&below.into_iter().map(|below| S::narrow(value(below))).collect::<Vec<S>>(), [length])
    }

    /// Runs attention with each configuration, alternating between heads of `widest` columns and
    /// narrower ones with a tail.
    fn attends_by_tensor<S: Stored>(&self, widest: usize, run: impl Fn(&Case<'s, S>) -> Result<()>) -> Result<()> {
        let widths = [widest as u32, widest as u32 / 2 + 8];
        for (&sizes, width) in self.by_size(&WHOLE[..], &SMALLEST).iter().zip(widths.into_iter().cycle()) {
            let ([batch, tokens, heads, kv_heads], _, _, masked) = sizes;
            let qkv = self.sparse((batch * tokens * (heads + 2 * kv_heads) * width) as usize, 1, widest.isqrt())?;
            let mask = |length: u32, bound: u32| {
                self.random.borrow_mut().belows(if masked { length as usize } else { 0 }, bound)
            };
            let documents = mask(batch * tokens, 2);
            // Most tokens exist.
            let lengths: Vec<u32> = mask(batch, tokens / 4 + 1).into_iter().map(|fewer| tokens - fewer).collect();
            let documents = self.step.upload(&documents, [documents.len()])?;
            let lengths = self.step.upload(&lengths, [lengths.len()])?;
            run(&Case { sizes, width, documents, lengths, qkv })?;
        }
        Ok(())
    }

    /// Uploads `lse`, `delta` and `dout`. The values of `lse` belong to scores of up
    /// to 8.
    fn gradients_by_tensor<S: Stored>(&self, case: &Case<'s, S>) -> Result<(Tensor<'s>, Tensor<'s>, Tensor<'s, S>)> {
        let statistics = case.statistics();
        let mut random = self.random.borrow_mut();
        let more: Vec<f32> = match self.size {
            CaseSize::Whole => random.uniforms(statistics, 0.0, 4.0),
            CaseSize::Smallest => random.belows(statistics, 4).into_iter().map(|more| more as f32).collect(),
        };
        drop(random);
        let lse: Vec<f32> = more.into_iter().map(|more| (8.0 + more) * LN_2).collect();
        Ok((
            self.step.upload(&lse, [statistics])?,
            self.sparse(statistics, 4, 2)?,
            self.sparse(statistics * case.width as usize, 1, 8)?,
        ))
    }
}

impl<S: Stored> Case<'_, S> {
    fn statistics(&self) -> usize {
        let ([batch, tokens, heads, _], ..) = self.sizes;
        (batch * tokens * heads) as usize
    }

    /// Returns the part of all samples' key heads that a kernel of stored scores computes: all but
    /// the first, if there are several. Also returns the elements of their scores, of which a head
    /// has `stored_scores`.
    fn part(&self, stored_scores: fn(u32, bool) -> usize) -> ([u32; 2], usize) {
        let ([batch, tokens, heads, kv_heads], _, window, _) = self.sizes;
        let all = batch * kv_heads;
        let before = u32::from(all > 1);
        let queries = ((all - before) * (heads / kv_heads)) as usize;
        ([before, all - before], queries * stored_scores(tokens, window != 0))
    }
}

/// Launches a kernel with the arguments of a case.
macro_rules! launch {
    ($i:ident, $kernel:ident, $case:expr, { $($name:ident: $value:expr),* }) => {{
        let ([_, tokens, heads, kv_heads], stacked, window, _) = $case.sizes;
        $i.step.launch($kernel {
            qkv: $case.qkv.slice(),
            documents: $case.documents.slice(),
            lengths: $case.lengths.slice(),
            layout: QkvLayout { tokens, heads, kv_heads, width: $case.width, stacked: u32::from(stacked) },
            window,
            scale: $i.by_size(LN_2 / 2.0, LN_2),
            $($name: $value),*
        })
    }};
    ($i:ident, $kernel:ident, $shape:expr, $case:expr, { $($arguments:tt)* }) => {
        launch!($i, $kernel, $case, { shape: $shape, $($arguments)* })
    };
}

/// Launches a kernel of warpgroups, which also takes tensor maps.
macro_rules! launch_wgmma {
    ($i:ident, $kernel:ident, $case:expr, { dout: $dout:expr, $($arguments:tt)* }) => {{
        let ([_, _, heads, _], ..) = $case.sizes;
        let dout_map = wgmma::dout_map($dout, heads, $case.width);
        launch_wgmma!($i, $kernel, $case, { dout_map: dout_map, dout: $dout, $($arguments)* })
    }};
    ($i:ident, $kernel:ident, $case:expr, { $($arguments:tt)* }) => {{
        let ([samples, _, heads, kv_heads], stacked, ..) = $case.sizes;
        let qkv_map = wgmma::qkv_map($case.qkv.slice(), [heads, kv_heads, $case.width], stacked);
        launch!($i, $kernel, $case, { samples: samples, qkv_map: qkv_map, $($arguments)* })
    }};
    ($i:ident, $kernel:ident, $shape:expr, $case:expr, { $($arguments:tt)* }) => {
        launch_wgmma!($i, $kernel, $case, { $($arguments)*, shape: $shape })
    };
}

/// Makes the cases of the three families of one instruction, in S.
macro_rules! cases {
    (<$S:ident>, $width:expr, $i:ident, $shape:expr, $launch:ident forward $kernel:ident { $($name:ident: $value:expr),* }) => {
        $i.attends_by_tensor::<$S>($width, |case| {
            let outputs = case.statistics() * case.width as usize;
            let (mut out, mut lse) = ($i.step.empty::<$S>([outputs])?, $i.step.empty([case.statistics()])?);
            $launch!($i, $kernel, $shape, case, { $($name: $value,)* out: out.out(), lse: lse.out() })?;
            $i.keep(&out)?;
            $i.keep(&lse)
        })
    };
    (<$S:ident>, $width:expr, $i:ident, $shape:expr, $launch:ident backward $kernel:ident { $($name:ident: $value:expr),* }) => {
        $i.attends_by_tensor::<$S>($width, |case| {
            let (lse, delta, dout) = $i.gradients_by_tensor(case)?;
            let mut dqkv = $i.sparse::<$S>(case.qkv.shape().elements(), 1, 2)?;
            let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
            $launch!($i, $kernel, $shape, case, {
                dout: dout, $($name: $value,)* lse: lse, delta: delta, dqkv: dqkv.out()
            })?;
            $i.keep(&dqkv)
        })
    };
}

pub(super) fn forward<S: Stored>(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    cases!(<S>, shape.width, i, shape, launch forward flash_forward_mma {})
}

pub(super) fn queries<S: Stored>(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    cases!(<S>, shape.width, i, shape, launch backward flash_bwd_dq_mma {})
}

pub(super) fn keys<S: Stored>(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    cases!(<S>, shape.width, i, shape, launch backward flash_bwd_dkv_mma {})
}

pub(super) fn forward_of_warpgroup(i: &Inputs<'_, '_>, shape: wgmma::Shape) -> Result<()> {
    cases!(<bf16>, shape.width, i, shape, launch_wgmma forward flash_forward_wgmma { blocks: 5 })
}

pub(super) fn queries_of_warpgroup(i: &Inputs<'_, '_>, shape: wgmma::Shape) -> Result<()> {
    cases!(<bf16>, shape.width, i, shape, launch_wgmma backward flash_bwd_dq_wgmma { blocks: 5 })
}

pub(super) fn keys_of_warpgroup(i: &Inputs<'_, '_>, shape: wgmma::Shape) -> Result<()> {
    cases!(<bf16>, shape.width, i, shape, launch_wgmma backward flash_bwd_dkv_wgmma { pairs: u32::from(shape.parts() == 1) })
}

pub(super) fn scores(i: &Inputs<'_, '_>) -> Result<()> {
    i.attends_by_tensor::<bf16>(SCORES_BF16.width, |case| {
        let (lse, delta, dout) = i.gradients_by_tensor(case)?;
        let ([before, count], length) = case.part(stored_scores);
        // Squares that the mask hides are not written.
        let (mut p, mut ds) = (i.sparse::<bf16>(length, 1, 2)?, i.sparse::<bf16>(length, 1, 2)?);
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch!(i, flash_bwd_scores_mma, SCORES_BF16, case, {
            lse: lse, delta: delta, dout: dout, before: before, count: count, p: p.out(), ds: ds.out()
        })?;
        i.keep(&p)?;
        i.keep(&ds)
    })
}

pub(super) fn keys_and_ds(i: &Inputs<'_, '_>, shape: Shape) -> Result<()> {
    i.attends_by_tensor::<bf16>(shape.width, |case| {
        let (lse, delta, dout) = i.gradients_by_tensor(case)?;
        let ([before, count], length) = case.part(stored_scores);
        // Squares that the mask hides are not written.
        let mut ds = i.sparse::<bf16>(length, 1, 2)?;
        let mut dqkv = i.sparse::<bf16>(case.qkv.shape().elements(), 1, 2)?;
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch!(i, flash_bwd_dkv_ds_mma, shape, case, {
            lse: lse, delta: delta, dout: dout, before: before, count: count, ds: ds.out(), dqkv: dqkv.out()
        })?;
        i.keep(&ds)?;
        i.keep(&dqkv)
    })
}

pub(super) fn from_scores(i: &Inputs<'_, '_>, variant: (Gradient, Shape)) -> Result<()> {
    i.attends_by_tensor::<bf16>(variant.1.width, |case| {
        let ([before, count], length) = case.part(stored_scores);
        let scores = i.sparse::<bf16>(length, 1, 2)?;
        let dout = i.sparse::<bf16>(case.statistics() * case.width as usize, 1, 8)?;
        let mut dqkv = i.sparse::<bf16>(case.qkv.shape().elements(), 1, 2)?;
        launch!(i, flash_bwd_from_scores_mma, case, {
            variant: variant, scores: scores.slice(), dout: dout.slice(), before: before, count: count, dqkv: dqkv.out()
        })?;
        i.keep(&dqkv)
    })
}

pub(super) fn keys_and_ds_of_warpgroup(i: &Inputs<'_, '_>, shape: wgmma::Shape) -> Result<()> {
    i.attends_by_tensor::<bf16>(shape.width, |case| {
        let (lse, delta, dout) = i.gradients_by_tensor(case)?;
        let ([before, count], length) = case.part(wgmma::stored_scores);
        let mut dqkv = i.sparse::<bf16>(case.qkv.shape().elements(), 1, 2)?;
        // Tiles that the mask hides are not written.
        let mut ds = i.sparse::<bf16>(length, 1, 2)?;
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch_wgmma!(i, flash_bwd_dkv_ds_wgmma, shape, case, {
            dout: dout, lse: lse, delta: delta, before: before, count: count, dqkv: dqkv.out(), ds: ds.out()
        })?;
        i.keep(&dqkv)?;
        i.keep(&ds)
    })
}

pub(super) fn scores_of_warpgroup(i: &Inputs<'_, '_>, shape: wgmma::Shape) -> Result<()> {
    i.attends_by_tensor::<bf16>(shape.width, |case| {
        let (lse, delta, dout) = i.gradients_by_tensor(case)?;
        let ([before, count], length) = case.part(wgmma::stored_scores);
        let (mut p, mut ds) = (i.sparse::<bf16>(length, 1, 2)?, i.sparse::<bf16>(length, 1, 2)?);
        let (lse, delta, dout) = (lse.slice(), delta.slice(), dout.slice());
        launch_wgmma!(i, flash_bwd_scores_wgmma, shape, case, {
            dout: dout, lse: lse, delta: delta, before: before, count: count, p: p.out(), ds: ds.out()
        })?;
        i.keep(&p)?;
        i.keep(&ds)
    })
}

pub(super) fn from_scores_of_warpgroup(i: &Inputs<'_, '_>, variant: (Gradient, wgmma::Shape)) -> Result<()> {
    i.attends_by_tensor::<bf16>(variant.1.width, |case| {
        let ([before, count], length) = case.part(wgmma::stored_scores);
        let scores = i.sparse::<bf16>(length, 1, 2)?;
        let dout = i.sparse::<bf16>(case.statistics() * case.width as usize, 1, 8)?;
        let mut dqkv = i.sparse::<bf16>(case.qkv.shape().elements(), 1, 2)?;
        launch_wgmma!(i, flash_bwd_from_scores_wgmma, case, {
            dout: dout.slice(), variant: variant, scores: scores.slice(), before: before, count: count, dqkv: dqkv.out()
        })?;
        i.keep(&dqkv)
    })
}
