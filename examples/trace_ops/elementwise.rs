//! Sums in place, scalings, casts and copies.

use crate::case::{Case, Run, both, one};
use stepscope::{Result, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("add_assign", <S>, |c| {
        c.pair::<S>(|c, a, b| {
            let mut out = ops::copy(c.step, a)?;
            ops::add_assign(c.step, &mut out, b)?;
            Ok(out)
        })
    }),
    &both!("scale", <S>, |c| c.reduced::<S, S>(|_| 1, |c, x| ops::scale(c.step, x, c.scalar("factor")))),
    &both!("scale_by", <S>, |c| {
        c.reduced::<S, S>(|_| 1, |c, x| ops::scale_by(c.step, x, &c.operand::<f32>("factor", [1])?))
    }),
    &both!("scale_by_into", <S>, |c| {
        c.pair::<S>(|c, a, b| {
            let mut out = ops::copy(c.step, a)?;
            ops::launch::scale_by_into(c.step, b, &c.operand::<f32>("factor", [1])?, &mut out, true)?;
            Ok(out)
        })
    }),
    &both!("add_bias", <S>, |c| {
        c.reduced::<S, S>(|_| 1, |c, x| ops::add_bias(c.step, x, &c.operand::<f32>("bias", [x.shape().as_rows()[1]])?))
    }),
    &both!("fill", <S>, |c| {
        c.reduced::<S, S>(
            |_| usize::from(S::IS_ROUNDED),
            |c, x| {
                let mut out = c.step.empty(x.shape())?;
                ops::fill_into(c.step, &mut out, c.scalar("value"))?;
                Ok(out)
            },
        )
    }),
    &one!("to_bf16", |c| c.reduced::<f32, f32>(|_| 0, |c, x| ops::to_f32(c.step, &ops::to_bf16(c.step, x)?))),
    &one!("to_f32", |c| c.reduced::<f32, f32>(|_| 0, |c, x| ops::to_f32(c.step, &ops::to_bf16(c.step, x)?))),
    &both!("copy", <S>, |c| {
        c.reduced::<S, S>(
            |_| 0,
            |c, x| {
                let mut out = c.step.empty(x.shape())?;
                ops::copy_into(c.step, x, &mut out)?;
                Ok(out)
            },
        )
    }),
];
