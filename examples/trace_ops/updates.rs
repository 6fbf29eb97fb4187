//! Optimizer updates.

use crate::case::{Case, Run, one};
use stepscope::{Result, Tensor, bf16, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    // Learning rate, beta1, beta2, epsilon, decay, the bias corrections of update 2, and the norm
    // limit.
    &one!("adamw", |c| adamw(c, &[[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.001_999, 1.0]])),
    &one!("adamw_groups", |c| adamw(
        c,
        &[[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.001_999, 1.0], [5e-2, 0.8, 0.99, 1e-6, 0.0, 0.36, 0.0199, 2.0]]
    )),
    // Learning rate, momentum, decay, the norm limit, and 1 for Nesterov momentum.
    &one!("sgd", |c| sgd(c, &[[0.3, 0.9, 0.1, 1.0, (c.seed % 2) as f32]])),
    &one!("sgd_groups", |c| sgd(c, &[[0.3, 0.9, 0.1, 1.0, 0.0], [0.1, 0.5, 0.0, 2.0, 1.0]])),
    &one!("sum_parts", |c| {
        let [levels, quads] = c.extents([7, 300]);
        let (count, pitch) = (1 << (levels - 1), 4 * quads);
        c.longest(count);
        let mut out = c.step.empty([pitch])?;
        ops::launch::sum_parts_into(c.step, &c.operand("parts", [count, pitch])?, &mut out)?;
        c.result("y", &out)
    }),
    &one!("clip_factor", |c| {
        c.longest(1);
        let squared_norm = c.given("squared_norm", [1], &[4.0f32.powi(c.seed as i32 - 2)])?;
        c.result("y", &ops::clip_factor(c.step, &squared_norm, c.scalar("largest"))?)
    }),
];

/// Adds settings, a row for each group, and the groups of the runs if there are several.
fn settings<'s, const N: usize>(
    c: &Case<'_, 's>,
    length: usize,
    rows: &[[f32; N]],
) -> Result<(Tensor<'s>, Option<Tensor<'s, u32>>)> {
    if let [row] = rows {
        return Ok((c.given("hyper", [N], row)?, None));
    }
    let hyper = c.given("hyper", [rows.len(), N], rows.as_flattened())?;
    Ok((hyper, Some(c.groups(length, rows.len() as u32)?)))
}

fn adamw(c: &Case<'_, '_>, rows: &[[f32; 8]]) -> Result<()> {
    let shape = c.extents([2000]);
    c.longest(1);
    let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
    let mut first = c.operand("first", shape)?;
    let second = c.random.borrow_mut().uniforms(shape[0], 0.1, 2.0);
    let mut second = c.given("second", shape, &second)?;
    let (hyper, groups) = settings(c, shape[0], rows)?;
    let squared_norm = ops::squared_norm(c.step, &gradients)?;
    ops::adamw(
        c.step,
        &mut weights,
        None::<&mut Tensor<'_, bf16>>,
        &gradients,
        &mut first,
        &mut second,
        &hyper,
        groups.as_ref(),
        &squared_norm,
    )?;
    let updated = [("weights", &weights), ("first", &first), ("second", &second)];
    updated.into_iter().try_for_each(|(name, tensor)| c.result(name, tensor))
}

fn sgd(c: &Case<'_, '_>, rows: &[[f32; 5]]) -> Result<()> {
    let shape = c.extents([2000]);
    c.longest(1);
    let (mut weights, gradients) = (c.operand("weights", shape)?, c.operand("gradients", shape)?);
    let mut velocity = c.operand("velocity", shape)?;
    let (hyper, groups) = settings(c, shape[0], rows)?;
    let squared_norm = ops::squared_norm(c.step, &gradients)?;
    ops::sgd(
        c.step,
        &mut weights,
        None::<&mut Tensor<'_, bf16>>,
        &gradients,
        &mut velocity,
        &hyper,
        groups.as_ref(),
        &squared_norm,
    )?;
    c.result("weights", &weights)?;
    c.result("velocity", &velocity)
}
