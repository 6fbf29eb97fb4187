//! Matrix products.

use crate::case::{Case, Run, both};
use stepscope::{Result, bf16, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("linear", <S>, |c| {
        let [m, n, k] = c.extents([150, 140, 300]);
        // The residual and the bias are terms too.
        c.longest_product::<S>(m.max(n).max(k + 2));
        let (x, w, bias) = (c.operand::<S>("x", [m, k])?, c.operand::<S>("w", [k, n])?, c.operand("bias", [n])?);
        let (residual, dy) = (c.operand::<S>("residual", [m, n])?, c.operand::<S>("dy", [m, n])?);
        c.result("product", &ops::matmul(c.step, &x, &w)?)?;
        c.result("affine", &ops::linear(c.step, &x, &w, Some(&bias))?)?;
        c.result("y", &ops::linear_residual(c.step, &x, &w, Some(&bias), &residual)?)?;
        c.result("gelu", &ops::linear_gelu(c.step, &x, &w, Some(&bias))?.0)?;
        c.result("silu", &ops::linear_silu(c.step, &x, &w, Some(&bias))?.0)?;
        c.result("gated", &ops::linear_swiglu(c.step, &x, &w, Some(&bias), &residual)?.0)?;
        // The same as on the tape: dw += x^T dy, dx = dy w^T, and the bias's gradient sums the rows
        // of dy.
        let (mut dw, mut dbias) = (ops::fill(c.step, [k, n], 0.0)?, ops::fill(c.step, [n], 0.0)?);
        let mut dx = c.step.empty::<S>([m, k])?;
        let for_dw = ops::Gemm::new(k, n, m).transpose_a().accumulate();
        let for_dw = ops::launch::Gradient { form: for_dw, of: &x, into: &mut dw };
        let for_dx = ops::launch::Gradient { form: ops::Gemm::new(m, k, n).transpose_b(), of: &w, into: &mut dx };
        let for_dbias = ops::launch::BiasGradient { into: &mut dbias, accumulate: true };
        ops::launch::gradients_into(c.step, &dy, for_dw, Some(for_dbias), Some(for_dx))?;
        c.result("dx", &dx)?;
        c.result("dw", &dw)?;
        c.result("dbias", &dbias)
    }),
    &[("gelu_linear_bf16", |c| {
        let [rows, hidden, n] = c.extents([150, 140, 300]);
        c.longest_product::<bf16>(n);
        let (pre, w) = (c.operand::<bf16>("pre", [rows, hidden])?, c.operand::<bf16>("w", [hidden, n])?);
        let dy = c.operand::<bf16>("dy", [rows, n])?;
        c.result("dpre", &ops::launch::gelu_linear_backward(c.step, &pre, &w, &dy)?)
    })],
    &both!("gemm", <S>, |c| {
        let [batches, m, n, k] = c.extents([3, 80, 70, 200]);
        c.longest_product::<S>(k + 2);
        let (a, b) = (c.operand::<S>("a", [batches, m, k])?, c.operand::<S>("b", [batches, n, k])?);
        let (bias, mut out) = (c.operand("bias", [batches, n])?, c.operand::<S>("c", [batches, m, n])?);
        let [stride_a, stride_b, stride_c, stride_bias] = [m * k, n * k, m * n, n];
        let form = ops::Gemm { batches, stride_a, stride_b, stride_c, stride_bias, ..ops::Gemm::new(m, n, k) };
        ops::gemm_into(c.step, &form.transpose_b().scaled(0.75).accumulate(), &a, &b, Some(&bias), &mut out)?;
        c.result("y", &out)
    }),
];
