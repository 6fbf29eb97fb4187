//! Gates, dropout, and GELU after a bias.

use crate::case::{Case, Run, both};
use stepscope::{Result, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("swiglu", <S>, |c| {
        let shape = c.extents([70, 300]);
        c.longest(1);
        let (gate, up, dy) =
            (c.operand::<S>("gate", shape)?, c.operand::<S>("up", shape)?, c.operand::<S>("dy", shape)?);
        c.result("y", &ops::swiglu(c.step, &gate, &up)?)?;
        let [dgate, dup] = ops::launch::swiglu_backward(c.step, &gate, &up, &dy)?;
        c.result("dgate", &dgate)?;
        c.result("dup", &dup)
    }),
    &both!("swiglu_packed", <S>, |c| {
        let [rows, cols] = c.extents([70, 150]);
        c.longest(1);
        let (x, dy) = (c.operand::<S>("x", [rows, 2 * cols])?, c.operand::<S>("dy", [rows, cols])?);
        c.result("y", &ops::swiglu_packed(c.step, &x)?)?;
        c.result("dx", &ops::launch::swiglu_packed_backward(c.step, &x, &dy)?)
    }),
    &both!("dropout", <S>, |c| {
        let shape = c.extents([70, 300]);
        c.longest(1);
        let (seed, number) = (0x9e37_79b9_7f4a_7c15, (1 << 32) + c.seed);
        let words = [seed, number].map(|word: u64| [word as u32, (word >> 32) as u32]);
        c.given("generator", [4], words.as_flattened())?;
        let (x, dy, p) = (c.operand::<S>("x", shape)?, c.operand::<S>("dy", shape)?, c.share("p"));
        let draws = ops::Generator::at(c.step.device(), seed, number)?.draws(c.step)?;
        let (_, second) = (draws.next(), draws.next());
        c.result("y", &ops::dropout(c.step, &x, p, &second)?)?;
        c.result("dx", &ops::dropout(c.step, &dy, p, &second)?)
    }),
    &both!("gelu_bias", <S>, |c| {
        let [rows, cols] = c.extents([270, 300]);
        c.longest(rows);
        let (x, dy) = (c.operand::<S>("x", [rows, cols])?, c.operand::<S>("dy", [rows, cols])?);
        let bias = c.given("bias", [cols], &vec![0.0; cols])?;
        let before = ops::add_bias(c.step, &x, &bias)?;
        c.result("y", &ops::gelu(c.step, &before)?)?;
        let mut dbias = c.step.empty([cols])?;
        c.result("dx", &ops::launch::gelu_bias_backward(c.step, &before, &dy, &mut dbias, false)?)?;
        c.result("dbias", &dbias)
    }),
];
