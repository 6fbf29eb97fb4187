//! Which kernels attend to tensors of a type.
//!
//! Invariant: the tensors' type, the form, the norm and the step's precision alone say which kernels run.

use super::form::{AttentionForm, Sizes};
use super::made::{Attention, AttentionKept};
use super::short;
use crate::error::{Error, Result};
use crate::ops::QkNorm;
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::launch::Slice;
use half::bf16;
use kernels::{flash_attention as ieee, flash_attention_tensor as tensor};

/// What attention takes: tensors of f32 or of BF16.
pub trait Attend: Stored {
    /// Refuses what the kernels of the type do not compute.
    #[doc(hidden)]
    fn check(op: &'static str, form: &AttentionForm<'_>, sizes: Sizes) -> Result<()>;

    /// By the kernel for few tokens, if the type has one.
    #[doc(hidden)]
    #[track_caller]
    fn short<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, Self>,
        norm: QkNorm<'_, 's>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
    ) -> Result<Option<Attention<'s, Self>>>;

    /// The gradient of `qkv` by that kernel's own.
    #[doc(hidden)]
    #[track_caller]
    fn short_backward<'s>(
        step: &Step<'s>,
        op: &'static str,
        qkv: &impl Source<'s, Self>,
        norm: QkNorm<'_, 's>,
        form: &AttentionForm<'s>,
        kept: [&Saved<'s>; 2],
        dout: &impl Source<'s, Self>,
        sizes: Sizes,
        gains: (&mut impl Target<'s, f32>, bool),
    ) -> Result<Tensor<'s, Self>>;

    /// Queues the forward kernel for any number of tokens.
    #[doc(hidden)]
    #[track_caller]
    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, Self>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        into: (&mut Tensor<'s, Self>, &mut Tensor<'s>),
    ) -> Result<()>;

    /// Queues the backward kernels: each writes its own part of the gradient.
    #[doc(hidden)]
    #[track_caller]
    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, Self>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, Self>,
        dqkv: &mut Tensor<'s, Self>,
    ) -> Result<()>;
}

/// A mask as a kernel takes it.
fn mask<'m>(mask: &'m Option<Saved<'_, u32>>) -> Slice<'m, u32> {
    mask.as_ref().map_or_else(Slice::empty, Source::slice)
}

/// Queues a kernel: of a shape that suits the heads, told what all kernels are told, and what it is given besides.
macro_rules! launch {
    ($step:ident, $qkv:ident, $form:ident, $sizes:ident, $kernels:ident::$kernel:ident, $SHAPES:ident, $($name:ident: $value:expr),*) => {
        $step.launch($kernels::$kernel {
            shape: $kernels::Shape::suiting($sizes.width, &$kernels::$SHAPES),
            qkv: $qkv.slice(),
            documents: mask(&$form.documents),
            lengths: mask(&$form.lengths),
            tokens: $sizes.tokens as u32,
            heads: $sizes.heads as u32,
            kv_heads: $sizes.kv_heads as u32,
            width: $sizes.width as u32,
            stacked: u32::from($sizes.stacked),
            window: $form.window(),
            scale: $form.scale.unwrap_or($sizes.scale()),
            $($name: $value),*
        })
    };
}

/// Queues the kernels for the gradients.
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

/// Whether f32 is multiplied as TF32: in a step below [`Precision::Ieee`], where the kernels have the heads and the scale.
fn by_tensor_cores(step: &Step<'_>, form: &AttentionForm<'_>, sizes: Sizes) -> bool {
    let widest = tensor::FORWARD_TF32[tensor::FORWARD_TF32.len() - 1].width;
    step.precision() != Precision::Ieee && sizes.width <= widest && form.scale.is_none_or(|scale| scale > 0.0)
}

impl Attend for f32 {
    fn check(_: &'static str, _: &AttentionForm<'_>, _: Sizes) -> Result<()> {
        Ok(())
    }

    fn short<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, f32>,
        norm: QkNorm<'_, 's>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
    ) -> Result<Option<Attention<'s>>> {
        let [out, probabilities, inverse_rms] = short::forward(step, qkv, norm, form.scale, sizes)?;
        Ok(Some(Attention { out, kept: AttentionKept::Short { probabilities, inverse_rms } }))
    }

    fn short_backward<'s>(
        step: &Step<'s>,
        op: &'static str,
        qkv: &impl Source<'s, f32>,
        norm: QkNorm<'_, 's>,
        form: &AttentionForm<'s>,
        kept: [&Saved<'s>; 2],
        dout: &impl Source<'s, f32>,
        sizes: Sizes,
        gains: (&mut impl Target<'s, f32>, bool),
    ) -> Result<Tensor<'s>> {
        short::backward(step, op, qkv, norm, form.scale, kept, dout, sizes, gains)
    }

    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, f32>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        (out, lse): (&mut Tensor<'s>, &mut Tensor<'s>),
    ) -> Result<()> {
        if by_tensor_cores(step, form, sizes) {
            return launch!(step, qkv, form, sizes, tensor::flash_forward_tensor, FORWARD_TF32, out: out.out(), lse: lse.out());
        }
        launch!(step, qkv, form, sizes, ieee::flash_forward, FORWARD, out: out.out(), lse: lse.out())
    }

    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, f32>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, f32>,
        dqkv: &mut Tensor<'s>,
    ) -> Result<()> {
        if by_tensor_cores(step, form, sizes) {
            return launch_backward!(step, qkv, form, sizes,
                tensor: [flash_queries_tensor, QUERIES_TF32], [flash_keys_tensor, KEYS_TF32], statistics, dout, dqkv);
        }
        launch_backward!(step, qkv, form, sizes,
            ieee: [flash_queries, QUERIES], [flash_keys, KEYS], statistics, dout, dqkv)
    }
}

impl Attend for bf16 {
    fn check(op: &'static str, form: &AttentionForm<'_>, sizes: Sizes) -> Result<()> {
        if !sizes.width.is_multiple_of(8) {
            let expected = "heads of a multiple of 8 columns, stored in BF16";
            return Err(Error::misuse(op, expected, format!("{} columns", sizes.width)));
        }
        match form.scale {
            Some(scale) if scale.is_nan() || scale <= 0.0 => {
                Err(Error::misuse(op, "a scale above 0 for tensors stored in BF16", scale.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn short<'s>(
        _: &Step<'s>,
        _: &impl Source<'s, bf16>,
        _: QkNorm<'_, 's>,
        _: &AttentionForm<'s>,
        _: Sizes,
    ) -> Result<Option<Attention<'s, bf16>>> {
        Ok(None)
    }

    fn short_backward<'s>(
        _: &Step<'s>,
        op: &'static str,
        _: &impl Source<'s, bf16>,
        _: QkNorm<'_, 's>,
        _: &AttentionForm<'s>,
        _: [&Saved<'s>; 2],
        _: &impl Source<'s, bf16>,
        _: Sizes,
        _: (&mut impl Target<'s, f32>, bool),
    ) -> Result<Tensor<'s, bf16>> {
        Err(Error::misuse(op, "what attention of BF16 tensors gave", "what the kernel for few tokens of f32 gives"))
    }

    fn queue<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, bf16>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        (out, lse): (&mut Tensor<'s, bf16>, &mut Tensor<'s>),
    ) -> Result<()> {
        launch!(step, qkv, form, sizes, tensor::flash_forward_tensor, FORWARD_BF16, out: out.out(), lse: lse.out())
    }

    fn queue_backward<'s>(
        step: &Step<'s>,
        qkv: &impl Source<'s, bf16>,
        form: &AttentionForm<'s>,
        sizes: Sizes,
        statistics: [&dyn Source<'s, f32>; 2],
        dout: &impl Source<'s, bf16>,
        dqkv: &mut Tensor<'s, bf16>,
    ) -> Result<()> {
        launch_backward!(step, qkv, form, sizes,
            tensor: [flash_queries_tensor, QUERIES_BF16], [flash_keys_tensor, KEYS_BF16], statistics, dout, dqkv)
    }
}
