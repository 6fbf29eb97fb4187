//! The choice of matrix-multiply kernels for each element type, and the types that they can write.
//!
//! Invariant: the choice depends only on the tensors' types and the precision. f32 uses
//! [`f32`](super::f32), or [`mma`](super::mma) in TF32. BF16 uses
//! [`bf16`](super::bf16).

use super::super::cast::Cast;
use super::super::sum_rows_into;
use super::gemm::{BiasGradient, Gradient, Product};
use super::grouped;
use super::{bf16 as of_bf16, f32, mma};
use crate::error::Result;
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;

/// The operand type of a matrix multiply. f32 produces f32. BF16 produces BF16 or f32.
pub trait GemmElement<S: Stored>: Products<S> {}

impl GemmElement<f32> for f32 {}
impl<S: Stored> GemmElement<S> for bf16 {}

/// The products of an operand type.
pub trait Products<S: Stored>: Cast {
    #[track_caller]
    fn queue(step: &Step<'_>, product: Product<'_, Self, S>) -> Result<()>;

    /// Queues a product of groups of rows, which begin at `offsets`.
    #[track_caller]
    fn queue_grouped(
        step: &Step<'_>,
        arguments: grouped::Arguments,
        operands: [Slice<'_, Self>; 2],
        offsets: Slice<'_, u32>,
        out: PointerMut<'_, S>,
    ) -> Result<()>;

    /// Queues the gradients of a product. The right operand's gradient and, if requested, the
    /// bias's are f32. The left operand's gradient has the operand's type.
    #[track_caller]
    fn queue_gradients<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, Self>,
        dw: Gradient<'_, impl Source<'s, Self>, impl Target<'s, f32>>,
        db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
        dx: Option<Gradient<'_, impl Source<'s, Self>, impl Target<'s, S>>>,
    ) -> Result<()>;

    /// Queues only the gradient of a product's bias, with the bits of
    /// [`Products::queue_gradients`].
    #[track_caller]
    fn queue_bias_gradient<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, Self>,
        x: &impl Source<'s, Self>,
        db: BiasGradient<'_, impl Target<'s, f32>>,
    ) -> Result<()>;

    /// Queues [`gelu_linear_backward`](crate::ops::launch::gelu_linear_backward), if products of
    /// this type have that epilogue.
    #[track_caller]
    fn through_gelu<'s>(
        step: &Step<'s>,
        pre: &impl Source<'s, Self>,
        w: &impl Source<'s, Self>,
        dy: &impl Source<'s, Self>,
    ) -> Result<Option<Tensor<'s, Self>>>;
}

impl Products<f32> for f32 {
    fn queue(step: &Step<'_>, product: Product<'_, f32, f32>) -> Result<()> {
        match product.form.precision_in(step) {
            Precision::F32 => f32::queue(step, product),
            Precision::Tf32 => mma::queue(step, product),
        }
    }

    fn queue_grouped(
        step: &Step<'_>,
        arguments: grouped::Arguments,
        operands: [Slice<'_, f32>; 2],
        offsets: Slice<'_, u32>,
        out: PointerMut<'_, f32>,
    ) -> Result<()> {
        grouped::queue_f32(step, arguments, operands, offsets, out)
    }

    fn queue_gradients<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, f32>,
        dw: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
        db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
        dx: Option<Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>>,
    ) -> Result<()> {
        let precision = dw.form.precision_in(step);
        match dx {
            // Rounds the operand that both products share only once.
            Some(dx) if precision == Precision::Tf32 => mma::queue_gradients(step, dy, dw, dx)?,
            Some(dx) => {
                f32::queue(step, Product::new(dw.form, dw.of, dy, dw.into))?;
                f32::queue(step, Product::new(dx.form, dy, dx.of, dx.into))?;
            }
            None => Self::queue(step, Product::new(dw.form, dw.of, dy, dw.into))?,
        }
        db.map_or(Ok(()), |db| sum_rows_into(step, dy, db.into, db.accumulate))
    }

    fn queue_bias_gradient<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, f32>,
        _: &impl Source<'s, f32>,
        db: BiasGradient<'_, impl Target<'s, f32>>,
    ) -> Result<()> {
        sum_rows_into(step, dy, db.into, db.accumulate)
    }

    fn through_gelu<'s>(
        _: &Step<'s>,
        _: &impl Source<'s, f32>,
        _: &impl Source<'s, f32>,
        _: &impl Source<'s, f32>,
    ) -> Result<Option<Tensor<'s>>> {
        Ok(None)
    }
}

impl<S: Stored> Products<S> for bf16 {
    fn queue(step: &Step<'_>, product: Product<'_, bf16, S>) -> Result<()> {
        of_bf16::queue(step, product)
    }

    fn queue_grouped(
        step: &Step<'_>,
        arguments: grouped::Arguments,
        operands: [Slice<'_, bf16>; 2],
        offsets: Slice<'_, u32>,
        out: PointerMut<'_, S>,
    ) -> Result<()> {
        grouped::queue_bf16(step, arguments, operands, offsets, out)
    }

    fn queue_gradients<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, bf16>,
        dw: Gradient<'_, impl Source<'s, bf16>, impl Target<'s, f32>>,
        db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
        dx: Option<Gradient<'_, impl Source<'s, bf16>, impl Target<'s, S>>>,
    ) -> Result<()> {
        of_bf16::queue_weight_gradients(step, dy, dw, db)?;
        let Some(dx) = dx else { return Ok(()) };
        of_bf16::queue(step, Product::new(dx.form, dy, dx.of, dx.into))
    }

    fn queue_bias_gradient<'s>(
        step: &Step<'s>,
        dy: &impl Source<'s, bf16>,
        x: &impl Source<'s, bf16>,
        db: BiasGradient<'_, impl Target<'s, f32>>,
    ) -> Result<()> {
        of_bf16::queue_bias_gradient(step, dy, x, db)
    }

    fn through_gelu<'s>(
        step: &Step<'s>,
        pre: &impl Source<'s, bf16>,
        w: &impl Source<'s, bf16>,
        dy: &impl Source<'s, bf16>,
    ) -> Result<Option<Tensor<'s, bf16>>> {
        of_bf16::gelu_linear_backward(step, pre, w, dy).map(Some)
    }
}
