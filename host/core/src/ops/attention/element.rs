//! The choice of attention kernels for each element type.
//!
//! Invariant: the choice depends only on the tensors' type, the config, the step's precision, and
//! the device's matrix instruction and memory.

use super::config::{AttentionConfig, Sizes};
use crate::error::{Error, Result};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::launch::{Slice, TensorMap};
use half::bf16;
use kernels::flash_attention_mma::Gradient;
use kernels::{flash_attention as scalar, flash_attention_mma as mma, flash_attention_wgmma as wgmma};

/// The element types of attention: f32 and BF16.
pub trait AttentionElement: AttentionLaunches {}

impl AttentionElement for f32 {}
impl AttentionElement for bf16 {}

/// The launches of attention of an element type.
pub trait AttentionLaunches: Stored {
    /// Rejects configs that the type's kernels do not compute.
    fn check(op: &'static str, form: &AttentionConfig<'_>, sizes: Sizes) -> Result<()>;

    /// Queues the forward kernel for any number of tokens.
    #[track_caller]
    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, Self>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        into: (&mut Tensor<'s, Self>, &mut Tensor<'s>),
    ) -> Result<()>;

    /// Queues the backward kernels. Each writes its own part of the gradient.
    #[track_caller]
    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, Self>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, Self>,
        dqkv: &mut Tensor<'s, Self>,
    ) -> Result<()>;
}

/// Converts a mask to a kernel argument.
fn mask<'m>(mask: &'m Option<Saved<'_, u32>>) -> Slice<'m, u32> {
    mask.as_ref().map_or_else(Slice::empty, Source::slice)
}

/// Queues a kernel with the common arguments and the given ones, in a tile shape that suits the
/// heads if there are several shapes.
macro_rules! launch {
    ($step:ident, $qkv:ident, $form:ident, $sizes:ident, $kernels:ident::$kernel:ident, $SHAPES:ident, $($arguments:tt)*) => {
        launch!($step, $qkv, $form, $sizes, $kernels::$kernel,
            shape: $kernels::Shape::suiting($sizes.width, &$kernels::$SHAPES), $($arguments)*)
    };
    ($step:ident, $qkv:ident, $form:ident, $sizes:ident, $kernels:ident::$kernel:ident, $($name:ident: $value:expr),*) => {
        $step.launch($kernels::$kernel {
            qkv: $qkv.slice(),
            documents: mask(&$form.documents),
            lengths: mask(&$form.lengths),
            layout: $sizes.layout(),
            window: $form.window(),
            scale: $form.scale.unwrap_or($sizes.scale()),
            $($name: $value),*
        })
    };
}

/// Returns the tensor map of `qkv`.
fn qkv_map(sizes: Sizes, qkv: Slice<'_, bf16>) -> TensorMap<'_, bf16> {
    let extents = [sizes.heads, sizes.kv_heads, sizes.width].map(|size| size as u32);
    wgmma::qkv_map(qkv, extents, sizes.stacked)
}

/// Returns the tensor map of `dout`.
fn dout_map(sizes: Sizes, dout: Slice<'_, bf16>) -> TensorMap<'_, bf16> {
    wgmma::dout_map(dout, sizes.heads as u32, sizes.width as u32)
}

/// Queues the kernels that compute the gradients.
macro_rules! launch_backward {
    ($step:ident, $qkv:ident, $form:ident, $sizes:ident, $kernels:ident: [$queries:ident, $QUERIES:ident], [$keys:ident, $KEYS:ident],
        $statistics:ident, $dout:ident, $dqkv:ident) => {{
        let [lse, delta] = $statistics;
        launch!($step, $qkv, $form, $sizes, $kernels::$queries, $QUERIES,
            lse: lse.slice(), delta: delta.slice(), dout: $dout.slice(), dqkv: $dqkv.out())?;
        launch!($step, $qkv, $form, $sizes, $kernels::$keys, $KEYS,
            lse: lse.slice(), delta: delta.slice(), dout: $dout.slice(), dqkv: $dqkv.out())
    }};
}

/// Returns the most blocks of a kernel that computes several tiles of queries in a block. No bit
/// depends on it.
///
/// One block for each multiprocessor overlaps the end of a tile with the copies of the next. Under
/// a causal mask, tiles differ in work. The kernel balances that if all samples are equally long.
/// If they are not, a block for each tile was faster on an H100 from 2,048 tokens on.
fn query_blocks(step: &Step<'_>, form: &AttentionConfig<'_>, sizes: Sizes) -> u32 {
    let unequal = form.window() != 0 && form.lengths.is_some();
    if unequal && sizes.tokens > 1024 { i32::MAX as u32 } else { step.description().processors }
}

/// True if a block of the kernel of dk and dv computes two tiles of keys. No bit depends on it.
///
/// The copies of the second tile overlap the end of the first. But a launch of few blocks should
/// not end with many idle multiprocessors.
fn keys_in_pairs(step: &Step<'_>, sizes: Sizes) -> bool {
    let shape = wgmma::KEYS[0];
    let blocks = sizes.batch * sizes.kv_heads * sizes.tokens.div_ceil(2 * shape.rows() as usize);
    let rounds = blocks.next_multiple_of(step.description().processors.max(1) as usize);
    sizes.width <= shape.width && 10 * blocks >= 9 * rounds
}

/// The most bytes of stored scores: 1.25 GiB, enough for 16 key heads with four query heads of 4096
/// causal tokens each. Three launches of 11 such heads take 5 % longer than two of 16.
const STORED_BYTES: usize = 5 << 28;
/// The key heads below which a launch of [`STORED_BYTES`] leaves part of a GPU idle.
const FEW_HEADS: usize = 8;

/// Returns the key heads of each launch that stores scores: all of them in as few launches as
/// possible, with about the same number each. `arrays` is the number of stored arrays, and
/// `of_group` the elements that a key head has in each. Returns 0 if one key head does not fit.
fn heads_at_once(all: usize, arrays: usize, of_group: usize) -> usize {
    let fit = |bytes: usize| bytes / size_of::<bf16>() / arrays / of_group;
    let most = match fit(STORED_BYTES) {
        few if arrays == 1 && few < FEW_HEADS => fit(2 * STORED_BYTES),
        most => most,
    };
    if most == 0 { 0 } else { all.div_ceil(all.div_ceil(most).max(1)) }
}

/// Queues the kernels that compute the gradients from scores that are stored once, for as many
/// heads at a time as [`heads_at_once`]. Returns false, and queues nothing, where it is faster to
/// compute scores twice.
///
/// Heads of 128 columns store ds, from which dq is one product. Memory that the host shares is too
/// slow for that. Wider heads store p and ds.
fn queue_by_stored_scores<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, bf16>,
    form: &AttentionConfig<'s>,
    sizes: Sizes,
    [lse, delta]: [&dyn Source<'s, f32>; 2],
    dout: &impl Source<'s, bf16>,
    dqkv: &mut Tensor<'s, bf16>,
) -> Result<bool> {
    let (tokens, causal, by_wgmma) = (sizes.tokens as u32, form.window() != 0, step.description().has_wgmma);
    let (narrow, middle, of_head) = if by_wgmma {
        let [narrow, middle] = wgmma::KEYS.map(|shape| shape.width);
        (narrow, middle, wgmma::stored_scores(tokens, causal))
    } else {
        let [narrow, middle, _] = mma::KEYS_BF16.map(|shape| shape.width);
        (narrow, middle, mma::stored_scores(tokens, causal))
    };
    let stores_p = sizes.width > middle;
    if sizes.width <= narrow || (!stores_p && !by_wgmma && step.description().integrated) {
        return Ok(false);
    }
    let of_group = sizes.heads / sizes.kv_heads * of_head;
    let all = sizes.batch * sizes.kv_heads;
    let at_once = heads_at_once(all, if stores_p { 2 } else { 1 }, of_group);
    if at_once == 0 {
        return Ok(false);
    }
    let mut ds = step.empty::<bf16>([at_once * of_group])?;
    let mut p = if stores_p { Some(step.empty::<bf16>([at_once * of_group])?) } else { None };
    let gradients: &[Gradient] =
        if stores_p { &[Gradient::Queries, Gradient::Keys, Gradient::Values] } else { &[Gradient::Queries] };
    let mut before = 0;
    while before < all {
        let count = at_once.min(all - before);
        let (stored, part) = (0..count * of_group, [before as u32, count as u32]);
        macro_rules! launch_part {
            ($kernels:ident: [$keys:ident, $KEYS:ident], [$scores:ident, $SCORES:ident], [$from:ident, $FROM:ident],
                $($name:ident: $value:expr),*) => {{
                if let Some(p) = &mut p {
                    launch!(step, qkv, form, sizes, $kernels::$scores,
                        shape: $kernels::$SCORES, lse: lse.slice(), delta: delta.slice(), dout: dout.slice(),
                        before: part[0], count: part[1], $($name: $value,)* p: p.out().part(stored.clone()),
                        ds: ds.out().part(stored.clone()))?;
                } else {
                    launch!(step, qkv, form, sizes, $kernels::$keys,
                        shape: $kernels::$KEYS[1], lse: lse.slice(), delta: delta.slice(), dout: dout.slice(),
                        before: part[0], count: part[1], $($name: $value,)* ds: ds.out().part(stored.clone()),
                        dqkv: dqkv.out())?;
                }
                for &gradient in gradients {
                    let scores = match &p {
                        Some(p) if gradient == Gradient::Values => p,
                        _ => &ds,
                    };
                    launch!(step, qkv, form, sizes, $kernels::$from,
                        variant: (gradient, $kernels::$FROM[usize::from(stores_p)]),
                        scores: scores.slice().part(stored.clone()), dout: dout.slice(), before: part[0],
                        count: part[1], $($name: $value,)* dqkv: dqkv.out())?;
                }
            }};
        }
        if by_wgmma {
            launch_part!(wgmma: [flash_bwd_dkv_ds_wgmma, KEYS], [flash_bwd_scores_wgmma, SCORES],
                [flash_bwd_from_scores_wgmma, FROM_SCORES],
                samples: sizes.batch as u32, qkv_map: qkv_map(sizes, qkv.slice()),
                dout_map: dout_map(sizes, dout.slice()));
        } else {
            launch_part!(mma: [flash_bwd_dkv_ds_mma, KEYS_BF16], [flash_bwd_scores_mma, SCORES_BF16],
                [flash_bwd_from_scores_mma, FROM_SCORES_BF16],);
        }
        before += count;
    }
    step.free(ds);
    if let Some(p) = p {
        step.free(p);
    }
    Ok(true)
}

/// True if f32 is multiplied as TF32: in a step of [`Precision::Tf32`], if the kernels support
/// the heads and the scale.
fn by_tensor_cores(step: &Step<'_>, form: &AttentionConfig<'_>, sizes: Sizes) -> bool {
    let widest = mma::FORWARD_TF32[mma::FORWARD_TF32.len() - 1].width;
    step.precision() == Precision::Tf32 && sizes.width <= widest && form.scale.is_none_or(|scale| scale > 0.0)
}

impl AttentionLaunches for f32 {
    fn check(_: &'static str, _: &AttentionConfig<'_>, _: Sizes) -> Result<()> {
        Ok(())
    }

    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, f32>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        (out, lse): (&mut Tensor<'s>, &mut Tensor<'s>),
    ) -> Result<()> {
        if by_tensor_cores(step, form, sizes) {
            return launch!(step, qkv, form, sizes, mma::flash_forward_mma, FORWARD_TF32, out: out.out(), lse: lse.out());
        }
        launch!(step, qkv, form, sizes, scalar::flash_forward, FORWARD, out: out.out(), lse: lse.out())
    }

    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, f32>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, f32>,
        dqkv: &mut Tensor<'s>,
    ) -> Result<()> {
        if by_tensor_cores(step, form, sizes) {
            return launch_backward!(step, qkv, form, sizes,
                mma: [flash_bwd_dq_mma, QUERIES_TF32], [flash_bwd_dkv_mma, KEYS_TF32], statistics, dout, dqkv);
        }
        launch_backward!(step, qkv, form, sizes,
            scalar: [flash_bwd_dq, QUERIES], [flash_bwd_dkv, KEYS], statistics, dout, dqkv)
    }
}

impl AttentionLaunches for bf16 {
    fn check(op: &'static str, form: &AttentionConfig<'_>, sizes: Sizes) -> Result<()> {
        if !sizes.width.is_multiple_of(8) {
            let expected = "BF16 heads of a multiple of 8 columns";
            return Err(Error::misuse(op, expected, format!("{} columns", sizes.width)));
        }
        match form.scale {
            Some(scale) if scale.is_nan() || scale <= 0.0 => {
                Err(Error::misuse(op, "a scale above 0 for tensors stored in BF16", scale.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, bf16>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        (out, lse): (&mut Tensor<'s, bf16>, &mut Tensor<'s>),
    ) -> Result<()> {
        if step.description().has_wgmma {
            return launch!(step, qkv, form, sizes, wgmma::flash_forward_wgmma, FORWARD,
                samples: sizes.batch as u32, qkv_map: qkv_map(sizes, qkv.slice()),
                blocks: query_blocks(step, form, sizes), out: out.out(), lse: lse.out());
        }
        launch!(step, qkv, form, sizes, mma::flash_forward_mma, FORWARD_BF16, out: out.out(), lse: lse.out())
    }

    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, bf16>,
        form: &AttentionConfig<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, bf16>,
        dqkv: &mut Tensor<'s, bf16>,
    ) -> Result<()> {
        if queue_by_stored_scores(step, qkv, form, sizes, statistics, dout, dqkv)? {
            return Ok(());
        }
        if step.description().has_wgmma && sizes.width <= wgmma::KEYS[wgmma::KEYS.len() - 1].width {
            let ([lse, delta], samples) = (statistics, sizes.batch as u32);
            let (qkv_map, dout_map) = (qkv_map(sizes, qkv.slice()), dout_map(sizes, dout.slice()));
            launch!(step, qkv, form, sizes, wgmma::flash_bwd_dq_wgmma, QUERIES,
                samples: samples, qkv_map: qkv_map, dout_map: dout_map, blocks: query_blocks(step, form, sizes),
                lse: lse.slice(), delta: delta.slice(), dout: dout.slice(), dqkv: dqkv.out())?;
            return launch!(step, qkv, form, sizes, wgmma::flash_bwd_dkv_wgmma, KEYS,
                samples: samples, qkv_map: qkv_map, dout_map: dout_map, pairs: u32::from(keys_in_pairs(step, sizes)),
                lse: lse.slice(), delta: delta.slice(), dout: dout.slice(), dqkv: dqkv.out());
        }
        launch_backward!(step, qkv, form, sizes,
            mma: [flash_bwd_dq_mma, QUERIES_BF16], [flash_bwd_dkv_mma, KEYS_BF16], statistics, dout, dqkv)
    }
}
