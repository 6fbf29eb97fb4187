//! Ops over whole rows or all elements: sums, maxima, norms.

use crate::case::{Case, Run, both};
use stepscope::tensor::Shape;
use stepscope::{Result, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("sum", <S>, |c| c.reduced::<S, f32>(Shape::elements, |c, x| ops::sum(c.step, x))),
    &both!("scaled_sum", <S>, |c| {
        c.reduced::<S, f32>(Shape::elements, |c, x| ops::scaled_sum(c.step, x, c.scalar("factor")))
    }),
    &both!("mean", <S>, |c| c.reduced::<S, f32>(Shape::elements, |c, x| ops::mean(c.step, x))),
    &both!("squared_norm", <S>, |c| c.reduced::<S, f32>(Shape::elements, |c, x| ops::squared_norm(c.step, x))),
    &both!("max", <S>, |c| c.reduced::<S, f32>(|_| 0, |c, x| ops::max(c.step, x))),
    &both!("sum_columns", <S>, |c| c.reduced::<S, f32>(|x| x.as_rows()[1], |c, x| ops::sum_columns(c.step, x))),
    &both!("sum_rows", <S>, |c| {
        let x = c.operand::<S>("x", c.extents([270, 300]))?;
        c.longest(x.shape().as_rows()[0]);
        let mut y = ops::sum_rows(c.step, &x)?;
        c.result("y", &y)?;
        ops::launch::sum_rows_into(c.step, &x, &mut y, true)?;
        c.result("twice", &y)
    }),
    &both!("max_columns", <S>, |c| c.reduced::<S, f32>(|_| 0, |c, x| ops::max_columns(c.step, x))),
    &both!("argmax_columns", <S>, |c| c.reduced::<S, u32>(|_| 0, |c, x| ops::argmax_columns(c.step, x))),
    &both!("mean_tokens", <S>, |c| {
        let [batch, tokens, cols] = c.extents([40, 12, 70]);
        c.longest(tokens);
        let (x, dy) = (c.operand::<S>("x", [batch, tokens, cols])?, c.operand::<S>("dy", [batch, cols])?);
        c.result("y", &ops::mean_tokens(c.step, &x)?)?;
        c.result("dx", &ops::launch::mean_tokens_backward(c.step, &dy, [batch, tokens, cols])?)
    }),
    &both!("rms_norm", <S>, |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let (x, gain) = (c.operand::<S>("x", [rows, cols])?, c.operand("gain", [cols])?);
        let dy = c.operand("dy", [rows, cols])?;
        let (y, inverse_rms) = ops::rms_norm(c.step, &x, &gain, c.scalar("epsilon"))?;
        c.result("y", &y)?;
        let mut dgain = c.step.empty([cols])?;
        c.result("dx", &ops::launch::rms_norm_backward(c.step, &x, &gain, &inverse_rms, &dy, None, &mut dgain, false)?)?;
        c.result("dgain", &dgain)
    }),
    &both!("rms_norm_residual", <S>, |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let [x, residual, dy] = ["x", "residual", "dy"].map(|name| c.operand::<S>(name, [rows, cols]));
        let (x, residual, dy, gain) = (x?, residual?, dy?, c.operand("gain", [cols])?);
        let (h, y, inverse_rms) = ops::rms_norm_residual(c.step, &x, &residual, &gain, c.scalar("epsilon"))?;
        c.kept("h", &h)?;
        c.result("y", &y)?;
        let mut dgain = c.step.empty([cols])?;
        c.result("dx", &ops::launch::rms_norm_backward(c.step, &h, &gain, &inverse_rms, &dy, None, &mut dgain, false)?)?;
        c.result("dgain", &dgain)
    }),
    &both!("layer_norm", <S>, |c| {
        let [rows, cols] = c.extents([200, 300]);
        c.longest(rows.max(cols));
        let [x, residual, dy] = ["x", "residual", "dy"].map(|name| c.operand::<S>(name, [rows, cols]));
        let (x, residual, dy) = (x?, residual?, dy?);
        let (gain, bias) = (c.operand("gain", [cols])?, c.operand("bias", [cols])?);
        let epsilon = c.scalar("epsilon");
        let (h, out) = ops::layer_norm_residual(c.step, &x, &residual, &gain, &bias, epsilon)?;
        let alone = ops::layer_norm(c.step, &h, &gain, &bias, epsilon)?;
        c.kept("h", &h)?;
        c.result("y", if c.seed.is_multiple_of(2) { &out.y } else { &alone.y })?;
        let kept = [&out.mean, &out.inverse_std];
        let mut sums = [c.step.empty([cols])?, c.step.empty([cols])?];
        let dx = ops::launch::layer_norm_backward(c.step, &h, &gain, kept, &dy, None, sums.each_mut(), [false; 2])?;
        c.result("dx", &dx)?;
        c.result("dgain", &sums[0])?;
        c.result("dbias", &sums[1])
    }),
];
