//! Indexed rows, slices and permutations.

use crate::case::{Case, Run, both};
use stepscope::{Result, Tensor, bf16, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("embedding", <S>, |c| {
        let [count, rows, cols] = c.extents([700, 40, 70]);
        c.longest(count);
        let (table, ids) = (c.operand::<f32>("table", [rows, cols])?, c.belows(count, rows));
        let (ids, dy) = (c.indices("ids", [count], &ids)?, c.operand::<S>("dy", [count, cols])?);
        let y: Tensor<'_, S> = ops::embedding(c.step, &table, &ids)?;
        c.result("y", &y)?;
        let mut dtable = c.step.empty([rows, cols])?;
        ops::launch::embedding_backward(c.step, &dy, &ids, &mut dtable, false)?;
        c.result("dtable", &dtable)
    }),
    &both!("embedding_of_half", <S>, |c| {
        let [count, rows, cols] = c.extents([700, 40, 70]);
        c.longest(0);
        let (table, ids) = (c.operand::<bf16>("table", [rows, cols])?, c.belows(count, rows));
        let y: Tensor<'_, S> = ops::embedding_bf16(c.step, &table, &c.indices("ids", [count], &ids)?)?;
        c.result("y", &y)
    }),
    &both!("one_hot", <S>, |c| {
        let [count, classes] = c.extents([70, 30]);
        c.longest(0);
        c.given("classes", [1], &[classes as u32])?;
        let ids = c.indices("ids", [count], &c.belows(count, classes))?;
        let y: Tensor<'_, S> = ops::one_hot(c.step, &ids, classes)?;
        c.result("y", &y)
    }),
    &both!("grouped_linear", <S>, |c| {
        let [tokens, each, experts, inputs, outputs] = c.extents([70, 4, 6, 40, 24]);
        c.longest_product::<S>(inputs);
        c.given("experts", [1], &[experts as u32])?;
        let ids = c.indices("ids", [tokens, each], &c.belows(tokens * each, experts))?;
        let (x, w) = (c.operand::<S>("x", [tokens, inputs])?, c.operand::<S>("w", [inputs, experts * outputs])?);
        let groups = ops::group_by(c.step, &ids, experts)?;
        let rows = ops::dispatch(c.step, &x, &groups)?;
        c.result("rows", &rows)?;
        c.result("y", &ops::grouped_linear(c.step, &rows, &w, &groups)?)
    }),
    &both!("combine", <S>, |c| {
        let [tokens, each, groups, cols] = c.extents([40, 4, 6, 70]);
        c.longest(cols.max(each));
        let ids = c.indices("ids", [tokens, each], &c.belows(tokens * each, groups))?;
        let (rows, gates) = (c.operand::<S>("rows", [tokens * each, cols])?, c.operand::<f32>("gates", [tokens, each])?);
        let (groups, dy) = (ops::group_by(c.step, &ids, groups)?, c.operand::<S>("dy", [tokens, cols])?);
        c.result("y", &ops::combine(c.step, &rows, Some(&gates), &groups)?)?;
        let (drows, dgates) = ops::launch::combine_backward(c.step, &rows, &gates, &dy, &groups)?;
        c.result("drows", &drows)?;
        c.result("dgates", &dgates)
    }),
    &both!("gather", <S>, |c| {
        let [count, rows, cols] = c.extents([700, 40, 70]);
        c.longest(count);
        let (x, ids) = (c.operand::<S>("x", [rows, cols])?, c.belows(count, rows));
        let (ids, dy) = (c.indices("ids", [count], &ids)?, c.operand::<S>("dy", [count, cols])?);
        c.result("y", &ops::gather(c.step, &x, &ids)?)?;
        c.result("dx", &ops::launch::gather_backward(c.step, &dy, &ids, rows)?)
    }),
    &both!("add_positions", <S>, |c| {
        let [batch, tokens, cols] = c.extents([40, 12, 70]);
        c.longest(batch);
        let (x, table) = (c.operand::<S>("x", [batch, tokens, cols])?, c.operand::<f32>("table", [tokens + 3, cols])?);
        let dy = c.operand::<S>("dy", [batch, tokens, cols])?;
        c.result("y", &ops::add_positions(c.step, &x, &table)?)?;
        let mut dtable = c.step.empty([tokens + 3, cols])?;
        ops::launch::add_positions_backward(c.step, &dy, &mut dtable, false)?;
        c.result("dtable", &dtable)
    }),
    &both!("slice", <S>, |c| {
        let [a, b, cols] = c.extents([9, 40, 70]);
        c.longest(0);
        let (start, end) = (b / 3, b / 3 + b.div_ceil(2));
        c.given("range", [2], &[start as u32, end as u32])?;
        let x = c.operand::<S>("x", [a, b, cols])?;
        c.result("y", &ops::slice(c.step, &x, 1, start..end)?)
    }),
    &both!("concat", <S>, |c| {
        let [rows, a, b] = c.extents([70, 130, 60]);
        c.longest(0);
        let (left, right) = (c.operand::<S>("a", [rows, a])?, c.operand::<S>("b", [rows, b])?);
        let dy = c.operand::<S>("dy", [rows, a + b])?;
        c.result("y", &ops::concat(c.step, &[&left, &right], 1)?)?;
        c.result("da", &ops::slice(c.step, &dy, 1, 0..a)?)?;
        c.result("db", &ops::slice(c.step, &dy, 1, a..a + b)?)
    }),
    &both!("transpose", <S>, |c| {
        let [matrices, rows, cols] = c.extents([3, 70, 130]);
        c.longest(0);
        let x = c.operand::<S>("x", [matrices, rows, cols])?;
        let dy = c.operand::<S>("dy", [matrices, cols, rows])?;
        c.result("y", &ops::transpose(c.step, &x)?)?;
        c.result("dx", &ops::transpose(c.step, &dy)?)
    }),
    &both!("swap_extents", <S>, |c| {
        let [batch, tokens, heads, cols] = c.extents([5, 30, 6, 20]);
        c.longest(0);
        let x = c.operand::<S>("x", [batch, tokens, heads, cols])?;
        let dy = c.operand::<S>("dy", [batch, heads, tokens, cols])?;
        c.result("y", &ops::swap_extents(c.step, &x, 1, 2)?)?;
        c.result("dx", &ops::swap_extents(c.step, &dy, 1, 2)?)
    }),
];
